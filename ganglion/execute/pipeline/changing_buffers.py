"""Buffers that a forward changes, and how to run that forward again without changing them twice.

Running means count every microbatch once, and a forward that reads a buffer it changes (the vectors
of a spectral norm) must find the same values the second time:

    first forward     copy what it will change, run          buffers move on
    second forward    put the copies in place, run, put the buffers back
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ganglion.errors import ConfigError

Place = tuple[nn.Module, str]
Buffers = dict[Place, Tensor]
_Stamp = tuple[int, int]


class ChangingBuffers:
    """Knows which buffers of some modules a forward changes: it learns that from the first one.

    A change from training to evaluation, or back, makes it learn again.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Watch the buffers of `modules` and of all inside them."""
        inside = dict.fromkeys(part for module in modules for part in module.modules())
        self._owners = [owner for owner in inside if any(_own(owner))]
        self._changing: dict[tuple[bool, ...], frozenset[Place]] = {}

    @contextmanager
    def watched(self) -> Iterator[Buffers]:
        """Yield what will hold, after the forward inside, the buffers it changes as they were."""
        before = self._present()
        mode = tuple(owner.training for owner in self._owners)
        known = self._changing.get(mode)
        copies = _copies({p: t for p, t in before.items() if known is None or p in known})
        stamps = self._stamps()
        yield copies
        if known is None:
            known = frozenset(p for p, t in self._present().items() if not _same(copies.get(p), t))
            self._changing[mode] = known
        self._refuse_others(stamps, known)
        for place in copies.keys() - known:
            del copies[place]

    @contextmanager
    def as_before(self, copies: Mapping[Place, Tensor]) -> Iterator[None]:
        """Let the forward inside find, and change, the copies instead of the buffers."""
        present = {(owner, name): getattr(owner, name) for owner, name in copies}
        stamps = self._stamps()
        _put(copies)
        try:
            yield
            self._refuse_others(stamps, copies.keys())
        finally:
            _put(present)

    def _refuse_others(self, stamps: Mapping[Place, _Stamp], known: Collection[Place]) -> None:
        """Refuse a forward that changed more than is known to change."""
        for (owner, name), stamp in self._stamps().items():
            if (owner, name) not in known and stamps.get((owner, name)) != stamp:
                raise ConfigError(
                    f"buffer {name!r} of a {type(owner).__name__} did not change in the first "
                    f"forward but does in a later one, which then cannot be repeated: let every "
                    f'forward change it, or set memory.recompute = "none"'
                )

    def _stamps(self) -> dict[Place, _Stamp]:
        """Return what tells most changes cheaply: which tensor it is and how often it was set."""
        return {place: (id(tensor), tensor._version) for place, tensor in self._present().items()}

    def _present(self) -> Buffers:
        return {(owner, name): tensor for owner in self._owners for name, tensor in _own(owner)}


def _own(owner: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return owner.named_buffers(recurse=False)


def _copies(buffers: Mapping[Place, Tensor]) -> Buffers:
    """Copy every tensor once, for one may be the buffer of several modules."""
    copied = {id(tensor): tensor.clone() for tensor in buffers.values()}
    return {place: copied[id(tensor)] for place, tensor in buffers.items()}


def _same(before: Tensor | None, after: Tensor) -> bool:
    """Compare values: batch norms change theirs behind the back of version counters."""
    if before is None or before.shape != after.shape or before.dtype != after.dtype:
        return False
    same: bool = torch.equal(before, after)
    return same


def _put(buffers: Mapping[Place, Tensor]) -> None:
    for (owner, name), tensor in buffers.items():
        setattr(owner, name, tensor)
