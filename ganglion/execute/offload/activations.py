"""Offload saved activations: tensors that autograd saves are moved to a tier until their backward.

A forward runs part after part. The tensors saved by a part are written while the next part
computes; backward reads a part while the one after it computes:

    forward    compute   | part 0 | part 1 | part 2 |
               write              ~ part 0 ~ part 1 ~            two parts in memory
    backward   compute   | part 2 | part 1 | part 0 |
               read      ~ part 1 ~ part 0 ~                     the ends of 2 never left

Tensors that share memory are moved once; memory that lives anyway stays: parameters of any version,
buffers, data. Backward gets the same bytes at the same offsets, so results are bit for bit those of
a run that keeps its activations.
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

MIN_BYTES = 64 * 1024  # smaller ones cost more to move than to keep
_NUM_PENDING = 1  # parts whose writing may go on while the next one computes


class Hooks(NamedTuple):
    """The two functions of `saved_tensors_hooks`."""

    pack: Callable[[Tensor], object]
    unpack: Callable[[Any], Tensor]


class ActivationOffload:
    """Move the saved activations of one rank, for one computing thread."""

    def __init__(self, tier: ActivationTier, *, min_bytes: int = MIN_BYTES) -> None:
        """Move memory of at least `min_bytes` to `tier`."""
        self.tier = tier
        self.min_bytes = min_bytes
        self._pending: deque[_Part] = deque()

    def saved_tensors(
        self, modules: Iterable[nn.Module], data: Iterable[Tensor], *, ahead: bool
    ) -> SavedTensors:
        """Return the saved tensors of one forward, empty yet; `data` are not moved.

        With `ahead`, backward reads memory before it needs it. It must not if some is needed much
        later than its part, as by deferred weight gradients.
        """
        return SavedTensors(self, _living(modules, data), ahead)

    def finish_before(self, part: _Part) -> None:
        """Register a part that is complete, and finish those before it."""
        self._pending.append(part)
        while len(self._pending) > _NUM_PENDING:
            self._pending.popleft().finish_write()

    def finish_others(self, saved: SavedTensors) -> None:
        """Free the memory of all other forwards."""
        for part in [part for part in self._pending if part.saved() is not saved]:
            self._pending.remove(part)
            part.finish_write()

    def close(self) -> None:
        """Close the tier."""
        self._pending.clear()
        self.tier.close()


class SavedTensors:
    """The saved tensors of one forward: the hooks, and the parts."""

    def __init__(self, offload: ActivationOffload, living: set[int], ahead: bool) -> None:
        """Do not move storages that are `living` anyway."""
        self._offload = offload
        self._living = living
        self.ahead = ahead  # whether backward reads memory before it needs it
        self._known: dict[_Key, _Memory] = {}
        self._part = _Part(self, None)
        self._is_back = False

    @property
    def hooks(self) -> Hooks:
        """The hooks of this forward, for code that sets hooks of its own inside."""
        return Hooks(self._pack, _unpack)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Move the tensors that autograd saves inside."""
        try:
            with saved_tensors_hooks(*self.hooks):
                yield
            self.begin_part()
        finally:
            self._known.clear()
            self._living = set()

    def begin_part(self) -> None:
        """Begin the next part of the forward, or end the last one."""
        if self._part.memories:
            self._offload.finish_before(self._part)
            self._part = _Part(self, self._part)

    def begin_backward(self) -> None:
        """Free the memory of other forwards, once."""
        if not self._is_back:
            self._is_back = True
            self._offload.finish_others(self)

    def _pack(self, tensor: Tensor) -> Tensor | _Ticket:
        if not self._is_moved(tensor):
            return tensor
        with torch.no_grad():
            key = _Key.of(tensor)
            memory = self._known.get(key)
            if memory is None:
                memory = self._known[key] = _Memory(tensor, key, self._offload.tier)
            self._part.memories.append(weakref.ref(memory))
        start = tensor.storage_offset() * tensor.itemsize - key.start
        view = _View(tensor.dtype, tensor.shape, tensor.stride(), start // tensor.itemsize)
        return _Ticket(memory, self._part, self, view)

    def _is_moved(self, tensor: Tensor) -> bool:
        is_plain = tensor.layout == torch.strided and type(tensor) in (Tensor, nn.Parameter)
        if not is_plain or tensor.is_conj() or tensor.is_neg():
            return False
        storage = tensor.untyped_storage()
        is_large = tensor.numel() > 0 and storage.nbytes() >= self._offload.min_bytes
        return is_large and storage._cdata not in self._living


class _Key(NamedTuple):
    """A state of some memory: storage, count of writes, and range of bytes."""

    storage: int
    version: int
    start: int
    num_bytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Key:
        """Return the whole storage, or the range that a tensor spans if that is less than half."""
        storage = tensor.untyped_storage()
        start = int(tensor.storage_offset()) * tensor.itemsize
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        span = (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.itemsize
        if 2 * span >= storage.nbytes():
            start, span = 0, storage.nbytes()
        return cls(storage._cdata, tensor._version, start, span)


class _View(NamedTuple):
    """Where a tensor lies in moved memory."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self, flat: Tensor) -> Tensor:
        """Return the tensor inside the bytes of its memory."""
        first = flat.storage_offset() // self.dtype.itemsize
        made = torch.empty(0, dtype=self.dtype, device=flat.device)
        return made.set_(flat.untyped_storage(), first + self.offset, self.shape, self.stride)


class _Ticket(NamedTuple):
    """Autograd's substitute for a tensor."""

    memory: _Memory
    part: _Part
    saved: SavedTensors
    view: _View


def _unpack(ticket: Tensor | _Ticket) -> Tensor:
    if isinstance(ticket, Tensor):
        return ticket
    memory, part, saved, view = ticket
    saved.begin_backward()
    if saved.ahead:
        part.start_read()
        if part.before is not None:
            part.before.start_read()
    return view.tensor(memory.flat())


class _Part:
    """The memory that one part of a forward saved, in order, as long as backward needs it."""

    def __init__(self, saved: SavedTensors, before: _Part | None) -> None:
        self.saved = weakref.ref(saved)
        self.before = before
        self.memories: list[weakref.ref[_Memory]] = []
        self._is_started = False

    def finish_write(self) -> None:
        """Return when all are written and their sources are free."""
        for memory in self._alive():
            memory.finish_write()

    def start_read(self) -> None:
        """Start to read them, the last saved first, once."""
        if self._is_started:
            return
        self._is_started = True
        for memory in reversed(self._alive()):
            memory.start_read()

    def _alive(self) -> list[_Memory]:
        return [memory for ref in self.memories if (memory := ref()) is not None]


class _Memory:
    """Memory that is moved: still in place, in flight, on the tier, or back."""

    def __init__(self, tensor: Tensor, key: _Key, tier: ActivationTier) -> None:
        """Start to write it."""
        self._device = tensor.device
        self._num_bytes = key.num_bytes
        self._version = key.version
        # While this is held, no other storage can get the same address.
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
        # Missing if __init__ failed before.
        if hasattr(self, "_stored"):
            self._stored.give_back()

    def finish_write(self) -> None:
        """Return when it is written and its source is free."""
        self._writing.wait()
        self._is_spoilt = self._is_changed()
        self._source = self._watched = None

    def start_read(self) -> None:
        """Start to read it, unless it is in memory."""
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
            # Until it is written, the writing thread keeps alive what backward frees.
            self._writing.wait()
            return self._source
        self.start_read()
        assert self._back is not None
        if self._reading is not None:
            self._reading.wait()
            self._reading = None
        return self._back

    def _is_changed(self) -> bool:
        return self._watched is not None and self._watched._version != self._version


def _bytes(tensor: Tensor, key: _Key) -> Tensor:
    """Return the memory as a flat tensor of bytes, without a copy."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), key.start, (key.num_bytes,), (1,))


def _living(modules: Iterable[nn.Module], data: Iterable[Tensor]) -> set[int]:
    """Return the storages that live independently of a graph."""
    kept = [tensor for tensor in data if isinstance(tensor, Tensor)]
    for module in modules:
        kept += [*module.parameters(), *module.buffers()]
        for part in module.modules():
            kept += _cached(part)
    return {tensor.untyped_storage()._cdata for tensor in kept}


def _cached(part: nn.Module) -> list[Tensor]:
    """Return the tensors that a module keeps besides its buffers, such as a table of positions."""
    mine = list(vars(part).values())
    others = [value for value in mine if not isinstance(value, (nn.Module, Tensor))]
    mine += [inner for value in others for inner in getattr(value, "__dict__", {}).values()]
    return [value for value in mine if isinstance(value, Tensor)]
