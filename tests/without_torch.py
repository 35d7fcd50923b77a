"""A process in which torch does not exist for a while, even if it has been imported before.

torch breaks when it is imported twice. So its modules are put aside and put back, the same objects,
and with them whatever may hold torch: all of ganglion and of the tests. Inside, these are imported
anew, from nothing, and every import of torch fails, at the top of a module or in a function.
"""

from __future__ import annotations

import sys
from types import ModuleType

# `safetensors` needs no torch, only this part of it does.
PUT_ASIDE = ("torch", "functorch", "torchgen", "transformers", "ganglion", "tests")
TORCH_PARTS = ("safetensors.torch",)


class WithoutTorch:
    """Enter to lose torch, leave to have it back; what was imported inside waits for next time."""

    def __init__(self) -> None:
        self._others: dict[str, ModuleType] = {}
        self.refused: list[str] = []

    def __enter__(self) -> None:
        assert self not in sys.meta_path, "entered twice, it would bring torch back"
        self._exchange()
        sys.meta_path.insert(0, self)  # type: ignore[arg-type]

    def __exit__(self, *error: object) -> None:
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        self._exchange()

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Refuse torch; leave everything else to the finders of Python."""
        if name.partition(".")[0] == "torch":
            self.refused.append(name)
            raise ModuleNotFoundError(f"{name}: the deciding half must do without torch", name=name)

    def _exchange(self) -> None:
        """Take the modules that are put aside out of `sys.modules`, and put in those that wait."""
        taken = {name: module for name, module in sys.modules.items() if _is_put_aside(name)}
        for name in taken:
            del sys.modules[name]
        sys.modules.update(self._others)
        self._others = taken


def _is_put_aside(name: str) -> bool:
    return name.partition(".")[0] in PUT_ASIDE or name in TORCH_PARTS
