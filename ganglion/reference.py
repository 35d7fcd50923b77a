"""References to the user's own code, "package.module:name", looked up in the current folder too."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import cast

from ganglion.errors import ConfigError


def load_function(reference: str, key: str) -> Callable[..., object]:
    """Return the function of a reference "package.module:function".

    `key` is the run-file key of the reference; every error names it.
    """
    setting = f"{key} = {reference!r}"
    module_name, colon, name = reference.partition(":")
    is_dotted = all(part.isidentifier() for part in module_name.split("."))
    if not colon or not name.isidentifier() or not is_dotted:
        raise ConfigError(f'{setting} is not of the form "package.module:function"')
    module = _import_module(module_name, setting)
    if not hasattr(module, name):
        origin = getattr(module, "__file__", None) or "built-in"
        raise ConfigError(
            f"{setting}: module {module_name!r} ({origin}) has nothing named {name!r}; check the "
            f"part after the colon"
        )
    function = getattr(module, name)
    if not callable(function):
        raise ConfigError(
            f"{setting}: {name!r} is of type {type(function).__name__} and cannot be called; name "
            f"a function"
        )
    return cast(Callable[..., object], function)


def _import_module(module_name: str, setting: str) -> ModuleType:
    with current_folder_importable():
        try:
            return importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if f"{module_name}.".startswith(f"{missing}."):
                raise ConfigError(
                    f"{setting}: there is no module {missing!r}; it was looked for in "
                    f"{Path.cwd()} and among the installed packages: run from the folder that "
                    f"holds it, or install it"
                ) from error
            raise ConfigError(
                f"{setting}: module {module_name!r} needs {missing!r}, which is not installed: "
                f"install it"
            ) from error
        except (ImportError, SyntaxError) as error:
            raise ConfigError(
                f"{setting}: module {module_name!r} does not load: {error}"
            ) from error


@contextmanager
def current_folder_importable() -> Iterator[None]:
    """Make modules of the current folder importable inside a `with` block."""
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    # Finders that listed the folder before do not see a module written since.
    importlib.invalidate_caches()
    try:
        yield
    finally:
        # The imported code may have changed the path itself: remove our entry only.
        if folder in sys.path:
            sys.path.remove(folder)
