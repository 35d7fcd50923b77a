"""All weights of a model in one flat vector, so that an exchange is one message.

Every trainable parameter, and every floating point buffer behind them, becomes a view of flat
memory: one piece for each run of equal dtype. If all is float32 (or all float64), that memory is
itself the vector that is exchanged, without copies:

    flat      | conv.weight |pad| conv.bias |pad| ... || running_mean |pad| running_var |pad|
                ^ p.data is a view of this            ^ num_trained

Half-precision weights keep their own memory, and `flat` is a float32 copy: `gather()` fills it,
`scatter()` writes it back. Padding is zero in every worker, and thus in the centre.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from ganglion.errors import ConfigError

_ALIGN = 64  # elements: every tensor begins at a multiple of 256 bytes of float32
_EXCHANGED = (torch.float32, torch.float64)
_MAX_SAMPLE = 4096


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the model and its place in the flat vector; tied tensors share an entry."""

    name: str
    owners: tuple[Tensor, ...]
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return self.owners[0].numel()

    def view(self, flat: Tensor, start: int = 0) -> Tensor:
        """Return this tensor's part of a vector that begins at element `start` of the layout."""
        offset = flat.storage_offset() + self.offset - start
        return flat.as_strided(self.shape, self.stride, offset)


@dataclass(frozen=True, slots=True)
class _Piece:
    start: int
    storage: Tensor
    entries: tuple[Entry, ...]


class Packed:
    """The weights of a module as one vector; equal modules have equal layouts."""

    def __init__(self, module: nn.Module) -> None:
        """Move the weights of `module` into flat memory."""
        trained = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        buffers = [(n, b) for n, b in module.named_buffers() if b.is_floating_point()]
        if not trained:
            raise ConfigError("the model has no trainable parameter: check requires_grad")
        _check_place([*trained, *buffers])
        self.entries, self.num_trained = _lay_out(trained, buffers)
        self.numel = _end(self.entries[-1])
        self._pieces = [_piece(run) for run in _runs(self.entries)]
        self._is_live = len(self._pieces) == 1 and self._pieces[0].storage.dtype in _EXCHANGED
        self.flat = self._pieces[0].storage if self._is_live else self._copy()
        self._gradients: Tensor | None = None
        self._places = list(_places(module, self.entries))
        self.repack()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the packed tensors, in order of the flat vector."""
        return tuple(entry.name for entry in self.entries)

    @property
    def numels(self) -> tuple[int, ...]:
        """The sizes of the packed tensors, without padding."""
        return tuple(entry.numel for entry in self.entries)

    def gather(self) -> Tensor:
        """Return `flat`, filled with the present weights."""
        if not self._is_live:
            for piece in self._pieces:
                part = self.flat[piece.start : piece.start + piece.storage.numel()]
                part.copy_(piece.storage)
        return self.flat

    def sample(self) -> Tensor:
        """Return a copy of up to 4096 of the present weights, evenly spread over all."""
        stride = -(-self.numel // _MAX_SAMPLE) | 1  # odd, because rows of matrices seldom are
        taken = [piece.storage[::stride] for piece in self._pieces]
        return torch.cat([part.to(self.flat.dtype) for part in taken])

    def scatter(self) -> None:
        """Set the weights to the values of `flat`."""
        if not self._is_live:
            for piece in self._pieces:
                part = self.flat[piece.start : piece.start + piece.storage.numel()]
                piece.storage.copy_(part)

    def subtract(self, force: Tensor) -> None:
        """Subtract a force, on any device, from the weights."""
        self.gather().sub_(force.to(self.flat.device))
        self.scatter()

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views of any vector of this layout, by name."""
        return {entry.name: entry.view(flat) for entry in self.entries}

    def check(self) -> None:
        """Raise ConfigError if a parameter or buffer is no longer a view of the flat memory."""
        for holder, key, owner in self._places:
            if holder[key] is not owner:
                raise ConfigError(
                    f"{key} of the model was replaced by another tensor, which the optimizer does "
                    f"not know (load_state_dict(assign=True) does that): change it in place"
                )
        for piece in self._pieces:
            base, size = piece.storage.data_ptr(), piece.storage.element_size()
            for entry in piece.entries:
                address = base + (entry.offset - piece.start) * size
                if entry.numel and any(o.data_ptr() != address for o in entry.owners):
                    raise ConfigError(
                        f"{entry.name} left the packed memory of the model (.to() and p.data = ... "
                        f"do that): call repack() afterwards"
                    )

    def repack(self) -> None:
        """Copy the values of all tensors into flat memory and make them views of it again."""
        for piece in self._pieces:
            for entry in piece.entries:
                view = entry.view(piece.storage, piece.start)
                _check_same(entry, view)
                if entry.owners[0].data_ptr() != view.data_ptr():
                    view.copy_(entry.owners[0].detach())
                for owner in entry.owners:
                    owner.data = view
        self.gather()

    def gather_gradients(self) -> Tensor:
        """Return all gradients as one vector of `num_trained` elements; a missing one is 0."""
        if self._gradients is None:
            self._gradients = self.flat.new_zeros(self.num_trained)
        for entry in self._trained():
            view = entry.view(self._gradients)
            gradient = entry.owners[0].grad
            if gradient is None:
                view.zero_()
            elif gradient.data_ptr() != view.data_ptr():
                view.copy_(gradient)
        return self._gradients

    def scatter_gradients(self) -> None:
        """Set all gradients from that vector, without a copy if possible."""
        assert self._gradients is not None, "gather_gradients comes first"
        for entry in self._trained():
            view = entry.view(self._gradients)
            for owner in entry.owners:
                owner.grad = view.to(owner.dtype)

    def bounds(self, max_elements: int | None) -> tuple[tuple[int, int], ...]:
        """Cut the flat vector between tensors into parts of at most `max_elements` (begin, end).

        A larger tensor is a part of its own; without a bound there is one part. Every element is
        in exactly one part.
        """
        cuts = [0]
        for entry in self.entries:
            too_long = max_elements is not None and _end(entry) - cuts[-1] > max_elements
            if too_long and entry.offset > cuts[-1]:
                cuts.append(entry.offset)
        return tuple(zip(cuts, [*cuts[1:], self.numel], strict=True))

    def fragments(self, number: int) -> tuple[tuple[int, int], ...]:
        """Cut the flat vector between parameters into that many parts of about equal size.

        Buffers belong to the last part.
        """
        starts = [entry.offset for entry in self._trained() if entry.numel]
        if not 1 <= number <= len(starts):
            raise ConfigError(
                f"fragments = {number}, but the model has {len(starts)} tensors to share out: give "
                f"1 to {len(starts)}"
            )
        cuts = [0]
        for index in range(1, number):
            # Every part that is still to come needs a tensor of its own.
            left = starts[starts.index(cuts[-1]) + 1 : len(starts) - (number - 1 - index)]
            cuts.append(min(left, key=lambda s: abs(s - index * self.num_trained / number)))
        return tuple(zip(cuts, [*cuts[1:], self.numel], strict=True))

    def _trained(self) -> Iterator[Entry]:
        return (entry for entry in self.entries if entry.offset < self.num_trained)

    def _copy(self) -> Tensor:
        has_double = any(piece.storage.dtype == torch.float64 for piece in self._pieces)
        dtype = torch.float64 if has_double else torch.float32
        return self._pieces[0].storage.new_zeros(self.numel, dtype=dtype)


def _piece(entries: tuple[Entry, ...]) -> _Piece:
    start, first = entries[0].offset, entries[0].owners[0]
    numel = _end(entries[-1]) - start
    return _Piece(start, torch.zeros(numel, dtype=first.dtype, device=first.device), entries)


def _end(entry: Entry) -> int:
    """Return the offset at which the next entry may begin."""
    return entry.offset + -(-entry.numel // _ALIGN) * _ALIGN


def _lay_out(
    trained: Sequence[tuple[str, Tensor]], buffers: Sequence[tuple[str, Tensor]]
) -> tuple[tuple[Entry, ...], int]:
    """Place parameters first, then buffers; equal dtypes together, so that one copy serves all."""
    entries: list[Entry] = []
    num_trained = 0
    for tensors in (trained, buffers):
        for name, owners in _by_dtype(_untied(tensors)):
            offset = _end(entries[-1]) if entries else 0
            entries.append(_entry(name, owners, offset))
        if tensors is trained:
            num_trained = _end(entries[-1])
    return tuple(entries), num_trained


def _entry(name: str, owners: tuple[Tensor, ...], offset: int) -> Entry:
    # Dense strides in the same order of dims: channels_last stays channels_last.
    dense = torch.empty_like(owners[0], device="meta")
    return Entry(name, owners, offset, tuple(dense.shape), dense.stride())


def _untied(tensors: Sequence[tuple[str, Tensor]]) -> Mapping[str, tuple[Tensor, ...]]:
    """Return the tensors by name, with those of the same memory in one group."""
    found: dict[tuple[object, ...], tuple[str, list[Tensor]]] = {}
    for name, tensor in tensors:
        same = tensor.data_ptr() or id(tensor)
        key = (same, tensor.shape, tensor.stride())
        found.setdefault(key, (name, []))[1].append(tensor)
    groups = {name: tuple(owners) for name, owners in found.values()}
    _check_overlap(groups)
    return groups


def _check_overlap(groups: Mapping[str, tuple[Tensor, ...]]) -> None:
    spans = sorted((*_span(owners[0]), name) for name, owners in groups.items())
    for (_, end, name), (begin, _, other) in pairwise(spans):
        if begin < end:
            raise ConfigError(
                f"{name} and {other} share a part of their memory, which cannot be packed: give "
                f"each its own memory, or tie them as one parameter"
            )


def _span(tensor: Tensor) -> tuple[int, int]:
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    end = reach + 1 if tensor.numel() else 0
    return tensor.data_ptr(), tensor.data_ptr() + end * tensor.element_size()


def _by_dtype(groups: Mapping[str, tuple[Tensor, ...]]) -> list[tuple[str, tuple[Tensor, ...]]]:
    order = list(dict.fromkeys(owners[0].dtype for owners in groups.values()))
    return sorted(groups.items(), key=lambda item: order.index(item[1][0].dtype))


def _runs(entries: Sequence[Entry]) -> list[tuple[Entry, ...]]:
    runs: list[list[Entry]] = []
    for entry in entries:
        if not runs or runs[-1][0].owners[0].dtype != entry.owners[0].dtype:
            runs.append([])
        runs[-1].append(entry)
    return [tuple(run) for run in runs]


def _check_place(tensors: Sequence[tuple[str, Tensor]]) -> None:
    devices = sorted({str(tensor.device) for _, tensor in tensors})
    if len(devices) > 1 or devices == ["meta"]:
        raise ConfigError(
            f"the model lies on {devices}, but weights are packed in one memory: move it to one "
            f"device before averaging"
        )


def _places(
    module: nn.Module, entries: Sequence[Entry]
) -> Iterator[tuple[Mapping[str, Tensor | None], str, Tensor]]:
    """Yield the dict, key and tensor of each packed tensor of the module."""
    packed = {id(owner) for entry in entries for owner in entry.owners}
    for part in module.modules():
        for holder in (part._parameters, part._buffers):
            for key, tensor in holder.items():
                if tensor is not None and id(tensor) in packed:
                    yield holder, key, tensor


def _check_same(entry: Entry, view: Tensor) -> None:
    now = entry.owners[0]
    if (now.dtype, now.device, now.shape) != (view.dtype, view.device, view.shape):
        raise ConfigError(
            f"{entry.name} was {view.dtype} {tuple(view.shape)} on {view.device} when it was "
            f"packed and is now {now.dtype} {tuple(now.shape)} on {now.device}: convert the model "
            f"before averaging begins"
        )
