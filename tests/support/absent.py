"""A process in which a package does not exist for a while, even if it was imported before.

torch breaks when it is imported twice. So its modules are put aside and put back, the same objects,
and with them whatever may hold them: all of ganglion and of the tests. Inside, these are imported
anew, from nothing, and every import of the package fails, at the top of a module or in a function.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

HOLDERS = ("ganglion", "tests")


class Absent:
    """Enter to lose packages, leave to restore them; imports made inside are kept for next time.

    `beside` names modules of others that hold them, too. `refused` has every import that failed.
    """

    def __init__(self, *packages: str, beside: Sequence[str] = ()) -> None:
        self._packages = packages
        self._put_aside = (*packages, *beside, *HOLDERS)
        self._waiting: dict[str, ModuleType] = {}
        self.refused: list[str] = []

    def __enter__(self) -> None:
        assert self not in sys.meta_path, "entered twice, it would bring back the absent modules"
        self._exchange()
        sys.meta_path.insert(0, self)  # type: ignore[arg-type]

    def __exit__(self, *error: object) -> None:
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        self._exchange()

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Refuse absent modules; leave all others to the finders of Python."""
        if _belongs(name, self._packages):
            self.refused.append(name)
            raise ModuleNotFoundError(f"{name} is absent here", name=name)

    def _exchange(self) -> None:
        """Take the modules that are put aside out of `sys.modules`, and put in those that wait."""
        taken = {n: module for n, module in sys.modules.items() if _belongs(n, self._put_aside)}
        for name in taken:
            del sys.modules[name]
        sys.modules.update(self._waiting)
        self._waiting = taken


def without_torch() -> Absent:
    """Return the absence of torch."""
    return Absent("torch", "functorch", "torchgen", beside=("transformers", "safetensors.torch"))


def _belongs(name: str, packages: Sequence[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)
