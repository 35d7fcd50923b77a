"""Names of a package that are loaded when first used, for packages with parts that load slowly."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping


def lazy_names(package: str, home: Mapping[str, str]) -> Callable[[str], object]:
    """Return the `__getattr__` of a package that finds each name in its own module.

    `home` maps a name to the module below the package that defines it. Give the same names to type
    checkers under `if TYPE_CHECKING`.
    """

    def load(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(importlib.import_module(f"{package}.{home[name]}"), name)
        setattr(sys.modules[package], name, value)  # the next look-up comes straight through
        return value

    return load
