"""Saved activations on another tier: what autograd keeps leaves, and comes back for its backward.

A forward runs part after part. What autograd saves of a part is on its way to the tier while the
next part computes; backward calls for a part while the one behind it computes:

    forward    compute   | part 0 | part 1 | part 2 |
               write              ~ part 0 ~ part 1 ~            two parts in memory
    backward   compute   | part 2 | part 1 | part 0 |
               read      ~ part 1 ~ part 0 ~                     the ends of 2 never left

Memory goes as whole pieces: tensors that share one travel once, and what lives anyway stays where
it is: parameters of whichever version, buffers, data. Backward gets the same bytes in the same
places, so every number is that of a run that keeps its activations, to the last bit.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from ganglion.errors import ConfigError
from ganglion.execute.offload.activation_tiers import ActivationTier, Move, Stored

MIN_BYTES = 64 * 1024  # what is smaller costs more to move than to keep
_NUM_PENDING = 1  # parts whose writing may go on while the next one computes


class Hooks(NamedTuple):
    """What takes a tensor that autograd saves, and what gives it back."""

    pack: Callable[[Tensor], object]
    unpack: Callable[[Any], Tensor]


class ActivationOffload:
    """Moves the saved activations of one rank; for one computing thread."""

    def __init__(self, tier: ActivationTier, *, min_bytes: int = MIN_BYTES) -> None:
        """Move pieces of at least `min_bytes` to `tier`."""
        self.tier = tier
        self.min_bytes = min_bytes
        self._pending: deque[_Part] = deque()

    def trip(self, modules: Iterable[nn.Module], data: Iterable[Tensor], *, ahead: bool) -> Trip:
        """Return what takes the saved tensors of one forward; `data` are not moved.

        With `ahead`, backward calls for pieces before it needs them. It must not if some are needed
        much later than their part, as by weight gradients that are put off.
        """
        return Trip(self, _living(modules, data), ahead)

    def is_being_written(self, part: _Part) -> None:
        """Take note of a part that is complete, and finish those before it."""
        self._pending.append(part)
        while len(self._pending) > _NUM_PENDING:
            self._pending.popleft().let_go()

    def finish_others(self, trip: Trip) -> None:
        """Let go of everything that belongs to another forward than this."""
        for part in [part for part in self._pending if part.trip() is not trip]:
            self._pending.remove(part)
            part.let_go()

    def close(self) -> None:
        """Give the tier back."""
        self._pending.clear()
        self.tier.close()


class Trip:
    """The saved tensors of one forward: the hooks, and the parts."""

    def __init__(self, offload: ActivationOffload, living: set[int], ahead: bool) -> None:
        """Leave storages that are `living` anyway where they are."""
        self._offload = offload
        self._living = living
        self._ahead = ahead
        self._known: dict[_Key, _Piece] = {}
        self._part = _Part(self, None)
        self._is_back = False

    @property
    def hooks(self) -> Hooks:
        """What takes the tensors of this forward, for whoever has hooks of its own inside."""
        return Hooks(self._pack, _unpack)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Take what autograd saves inside."""
        try:
            with saved_tensors_hooks(*self.hooks):
                yield
            self.begin_part()
        finally:
            self._known.clear()
            self._living = set()

    def begin_part(self) -> None:
        """Say that the next part of the forward begins, or that there is none."""
        if self._part.pieces:
            self._offload.is_being_written(self._part)
            self._part = _Part(self, self._part)

    def begin_backward(self) -> None:
        """Make room for what comes back, once."""
        if not self._is_back:
            self._is_back = True
            self._offload.finish_others(self)

    @property
    def calls_ahead(self) -> bool:
        """Whether backward calls for pieces before it needs them."""
        return self._ahead

    def _pack(self, tensor: Tensor) -> Tensor | _Ticket:
        if not self._is_moved(tensor):
            return tensor
        with torch.no_grad():
            key = _Key.of(tensor)
            piece = self._known.get(key)
            if piece is None:
                piece = self._known[key] = _Piece(tensor, key, self._offload.tier)
            self._part.pieces.append(weakref.ref(piece))
        start = tensor.storage_offset() * tensor.itemsize - key.start
        place = _Place(tensor.dtype, tensor.shape, tensor.stride(), start // tensor.itemsize)
        return _Ticket(piece, self._part, self, place)

    def _is_moved(self, tensor: Tensor) -> bool:
        is_plain = tensor.layout == torch.strided and type(tensor) in (Tensor, nn.Parameter)
        if not is_plain or tensor.is_conj() or tensor.is_neg():
            return False
        storage = tensor.untyped_storage()
        is_large = tensor.numel() > 0 and storage.nbytes() >= self._offload.min_bytes
        return is_large and storage._cdata not in self._living


class _Key(NamedTuple):
    """A piece of memory in one state: which storage, how often written, which bytes of it."""

    storage: int
    version: int
    start: int
    num_bytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Key:
        """Return the whole storage, or what of it a tensor spans if that is less than half."""
        storage = tensor.untyped_storage()
        start = int(tensor.storage_offset()) * tensor.itemsize
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        span = (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.itemsize
        if 2 * span >= storage.nbytes():
            start, span = 0, storage.nbytes()
        return cls(storage._cdata, tensor._version, start, span)


class _Place(NamedTuple):
    """Where in a piece a tensor lies."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self, flat: Tensor) -> Tensor:
        """Return the tensor inside the bytes of its piece."""
        first = flat.storage_offset() // self.dtype.itemsize
        made = torch.empty(0, dtype=self.dtype, device=flat.device)
        return made.set_(flat.untyped_storage(), first + self.offset, self.shape, self.stride)


class _Ticket(NamedTuple):
    """What autograd keeps instead of a tensor."""

    piece: _Piece
    part: _Part
    trip: Trip
    place: _Place


def _unpack(ticket: Tensor | _Ticket) -> Tensor:
    if isinstance(ticket, Tensor):
        return ticket
    piece, part, trip, place = ticket
    trip.begin_backward()
    if trip.calls_ahead:
        part.call_back()
        if part.before is not None:
            part.before.call_back()
    return place.tensor(piece.flat())


class _Part:
    """The pieces that one part of a forward saved, in order, as long as backward needs them."""

    def __init__(self, trip: Trip, before: _Part | None) -> None:
        self.trip = weakref.ref(trip)
        self.before = before
        self.pieces: list[weakref.ref[_Piece]] = []
        self._is_called = False

    def let_go(self) -> None:
        """Return when all are written, and leave the memory they came from."""
        for piece in self._alive():
            piece.let_go()

    def call_back(self) -> None:
        """Begin to read them, the last saved first, once."""
        if self._is_called:
            return
        self._is_called = True
        for piece in reversed(self._alive()):
            piece.call_back()

    def _alive(self) -> list[_Piece]:
        return [piece for ref in self.pieces if (piece := ref()) is not None]


class _Piece:
    """A piece of memory that left: in memory, under way, on the tier, or back."""

    def __init__(self, tensor: Tensor, key: _Key, tier: ActivationTier) -> None:
        """Begin to write it."""
        self._device = tensor.device
        self._num_bytes = key.num_bytes
        self._version = key.version
        # While this is held, no other storage can come to be known by the same number.
        self._ref = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        # Shares the counter of writes with the tensor that was saved.
        self._watched: Tensor | None = tensor
        self._is_spoilt = False
        self._source: Tensor | None = _bytes(tensor, key)
        self._back: Tensor | None = None
        self._reading: Move | None = None
        self._stored: Stored = tier.room(key.num_bytes)
        self._writing: Move = self._stored.begin_write(self._source)

    def __del__(self) -> None:
        # Without one, it failed before it had any.
        if hasattr(self, "_stored"):
            self._stored.give_back()

    def let_go(self) -> None:
        """Return when it is written, and leave the memory it came from."""
        self._writing.wait()
        self._is_spoilt = self._is_changed()
        self._source = self._watched = None

    def call_back(self) -> None:
        """Begin to read it, unless it is there."""
        if self._source is None and self._back is None:
            self._back = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._device)
            self._reading = self._stored.begin_read(self._back)

    def flat(self) -> Tensor:
        """Return its bytes."""
        if self._is_spoilt or self._is_changed():
            raise ConfigError(
                f"a tensor of {self._num_bytes} bytes that backward needs was changed in place "
                f"before it reached the tier of memory.offload_activations: use inplace=False"
            )
        if self._source is not None:
            # Until it is written, the thread that writes it would hold on to what backward frees.
            self._writing.wait()
            return self._source
        self.call_back()
        assert self._back is not None
        if self._reading is not None:
            self._reading.wait()
            self._reading = None
        return self._back

    def _is_changed(self) -> bool:
        return self._watched is not None and self._watched._version != self._version


def _bytes(tensor: Tensor, key: _Key) -> Tensor:
    """Return a piece as a flat tensor of bytes, without copying it."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), key.start, (key.num_bytes,), (1,))


def _living(modules: Iterable[nn.Module], data: Iterable[Tensor]) -> set[int]:
    """Return the storages that live whether a graph needs them or not."""
    kept = [tensor for tensor in data if isinstance(tensor, Tensor)]
    for module in modules:
        kept += [*module.parameters(), *module.buffers()]
        for part in module.modules():
            kept += _cached(part)
    return {tensor.untyped_storage()._cdata for tensor in kept}


def _cached(part: nn.Module) -> list[Tensor]:
    """Return what a module keeps beside its buffers, such as a table of positions."""
    mine = list(vars(part).values())
    others = [value for value in mine if not isinstance(value, (nn.Module, Tensor))]
    mine += [inner for value in others for inner in getattr(value, "__dict__", {}).values()]
    return [value for value in mine if isinstance(value, Tensor)]
