"""Names of a package that are loaded on first use, for packages with modules that load slowly."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping


def lazy_names(package: str, home: Mapping[str, str]) -> Callable[[str], object]:
    """Return a `__getattr__` for a package that loads each name from its module on first use.

    `home` maps a name to the module of the package that defines it. Import the same names under
    `if TYPE_CHECKING` for type checkers.
    """

    def load(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(importlib.import_module(f"{package}.{home[name]}"), name)
        setattr(sys.modules[package], name, value)  # the next access finds it directly
        return value

    return load
