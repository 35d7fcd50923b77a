"""Weights stored in pieces along z: gathered for use, their gradients summed and cut again.

    piece --all-gather z--> block --matmul--> ...            forward, and again in backward
    piece of gradient <--reduce-scatter z-- gradient of the block

With overlap the gather of the next weight is under way while this one is used, and the sums of
gradients run on until `finish_gradients`. Both are the same arithmetic as with waits. A weight that
is kept is gathered once until it changes, and its gradients are summed over z once a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ganglion.decide.schedules.buckets import FORWARD, RECOMPUTE, GatherOrder, Use, kept_within
from ganglion.errors import ConfigError
from ganglion.execute.comm import Handle, empty_for, labelled
from ganglion.execute.tensor.grid import Grid


class Weights:
    """All weights of this rank that layers multiply with."""

    def __init__(self, grid: Grid) -> None:
        """Begin without any."""
        self._grid = grid
        self._order = GatherOrder()
        self._stored: dict[int, StoredWeight] = {}  # by id of the parameter
        self._numbered: list[StoredWeight] = []
        self._is_settled = False

    def store(
        self, parameter: nn.Parameter, *, name: str = "", is_split: bool = True, label: str = ""
    ) -> StoredWeight:
        """Return the weight of a parameter; layers that share it share the weight.

        It `is_split` if ranks along z have different pieces of it; the trace has the label.
        """
        found = self._stored.get(id(parameter))
        if found is None:
            number = len(self._numbered)
            found = StoredWeight(parameter, number, self._grid, self, is_split, label)
            self._stored[id(parameter)] = found
            self._numbered.append(found)
        found.names.append(name)
        return found

    def choose_kept(self, parameters: Iterable[Tensor]) -> list[str]:
        """Decide which weights stay gathered, of the parameters that this rank uses; return names.

        Ranks of a group hold blocks of the same sizes in the same order, so they decide alike.
        """
        found = dict.fromkeys(self._stored.get(id(parameter)) for parameter in parameters)
        used = [weight for weight in found if weight is not None and weight.is_split]
        sizes = [weight.num_bytes for weight in used]
        fits = kept_within(sizes, self._grid.settings.keep_bytes)
        for weight, does_fit in zip(used, fits, strict=True):
            weight.keeps = does_fit or self._is_named(weight)
        return [weight.names[0] for weight in used if weight.keeps]

    def share(self, parameters: Iterable[Tensor], *, wholly: bool) -> None:
        """Move the pieces of these into memory that is copied less often, or never.

        If `wholly`, ranks along z that share memory have the pieces side by side there, and nobody
        gathers: `done_reading` must then be called before each update. Else a gather copies a piece
        once. Nobody may hold the memory of a parameter yet: it is another one afterwards.
        """
        for parameter in parameters:
            if id(parameter) in self._stored:
                self._stored[id(parameter)].share(wholly)

    def settle(self) -> None:
        """Return when the shared pieces of all ranks are final, until they change."""
        if not self._is_settled:
            self._grid.gathers.barrier()
            self._is_settled = True

    def done_reading(self) -> None:
        """Return when no rank reads shared pieces any more: they may change."""
        if any(weight.is_common for weight in self._numbered):
            self._grid.gathers.barrier()

    def check_names(self) -> None:
        """Refuse a name to keep that no weight has: it would be ignored."""
        known = [name for weight in self._numbered for name in weight.names]
        for wanted in self._grid.settings.keep_names:
            if not any(_is_inside(name, wanted) for name in known):
                raise ConfigError(
                    f"keep_names has {wanted!r}, which is no weight of a split layer, and no "
                    f"module with one: name some of {', '.join(known)}"
                )

    def _is_named(self, weight: StoredWeight) -> bool:
        settings = self._grid.settings
        wanted = ((name, each) for name in weight.names for each in settings.keep_names)
        return settings.keep_gathered or any(_is_inside(*pair) for pair in wanted)

    def holds(self, parameter: Tensor) -> bool:
        """Say whether a parameter is one of these, which layers gather and cast themselves."""
        return id(parameter) in self._stored

    def on_use(self, weight: StoredWeight, phase: str) -> None:
        """Begin to gather what will be used next."""
        following = self._order.on_use(Use(phase, weight.number))
        if following is not None and self._grid.settings.overlap_all_gather:
            self._numbered[following].begin_gather()

    def begin(self, parameter: Tensor) -> None:
        """Say that a step's last backward is done with a parameter, which may be none of these."""
        if id(parameter) in self._stored:
            self._stored[id(parameter)].begin_sum()

    def finish(self, parameter: Tensor) -> None:
        """Return when the gradient of a parameter is in place."""
        if id(parameter) in self._stored:
            self._stored[id(parameter)].finish_sum()

    def finish_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Return when the gradients of these are in place, and no others: those may grow still."""
        known = [self._stored[id(p)] for p in parameters if id(p) in self._stored]
        for weight in known:
            weight.begin_sum()
        for weight in known:
            weight.finish_sum()

    def on_change(self) -> None:
        """Forget what was gathered: the weights are others now."""
        self._is_settled = False
        self._order.on_change()
        for weight in self._numbered:
            weight.forget()


class StoredWeight:
    """One weight, of which this rank stores a piece."""

    def __init__(
        self,
        parameter: nn.Parameter,
        number: int,
        grid: Grid,
        all_: Weights,
        is_split: bool,
        label: str,
    ) -> None:
        """Store `parameter`, a piece along dim 0 of the block that is multiplied with."""
        self.parameter = parameter
        self.number = number
        self.names: list[str] = []  # several, if layers share it
        self.keeps = False  # its block until it changes, and the sum of its gradients
        self._settings = grid.settings
        self._gathers = labelled(grid.gathers, label)
        self._scatters = labelled(grid.scatters, label)
        self._all = all_
        self.is_split = is_split and grid.gathers.size > 1
        self._common: Tensor | None = None  # the block, if all ranks along z have its memory
        self._gathering: tuple[Handle, Tensor] | None = None
        self._block: Tensor | None = None  # kept between uses
        self._sum: Tensor | None = None  # of gradients of the block, kept between backwards
        self._target: Tensor | None = None  # where that sum belongs
        self._pending: _Sum | None = None

    @property
    def is_common(self) -> bool:
        """Whether all ranks have their pieces in one memory."""
        return self._common is not None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole block."""
        rows, *rest = self.parameter.shape
        return (rows * (self._gathers.size if self.is_split else 1), *rest)

    @property
    def num_bytes(self) -> int:
        """Of the whole block."""
        return math.prod(self.shape) * self.parameter.element_size()

    def block(self, phase: str) -> Tensor:
        """Return the whole block, to be read until the next call."""
        if not self.is_split:
            return self.parameter.detach()
        if self._common is not None:
            self._all.settle()
            return self._common.view(self.shape)
        block = self._block
        if block is None:
            self.begin_gather()
            assert self._gathering is not None
            handle, block = self._gathering
            self._gathering = None
            handle.wait()
            if self.keeps:
                self._block = block
        self._all.on_use(self, phase)
        return block

    def share(self, wholly: bool) -> None:
        """Move the piece into memory common with other ranks, else such that gathers copy once."""
        if not self.is_split:
            return
        piece = self.parameter.detach()
        if wholly and self._settings.share_pieces and piece.device.type == "cpu":
            self._common = self._gathers.allocate_common(math.prod(self.shape), piece.dtype)
        if self._common is None:
            shared = empty_for(self._gathers, piece.numel(), piece)
        else:
            shared = _part(self._common, self._gathers.index, self._gathers.size)
        self.parameter.data = shared.view_as(piece).copy_(piece)

    def begin_gather(self) -> None:
        """Begin to gather the block, unless that is done or under way."""
        if self._block is not None or self._gathering is not None:
            return
        piece = self.parameter.detach()
        block = torch.empty(self.shape, dtype=piece.dtype, device=piece.device)
        self._gathering = (self._gathers.all_gather(block, piece), block)

    def forget(self) -> None:
        """Drop what was gathered, also what is still under way."""
        if self._gathering is not None:
            self._gathering[0].wait()
        self._gathering = self._block = None

    def gradient(self, of_block: Tensor) -> Tensor | None:
        """Take the gradient of the block; return that of the parameter, or None if it comes later.

        Whether one waits for its sum or not, it is added by `finish_sum`, in the same order.
        """
        if not self.is_split:
            return of_block
        of_block = of_block.to(self.parameter.dtype)
        if self.keeps:
            self._keep(of_block)
            return None
        self.finish_sum()  # of the microbatch before: it had all the time since
        self._pending = self._start_sum(of_block, self.parameter.grad)
        if not self._settings.overlap_reduce_scatter:
            self._pending.handle.wait()
        return None

    def _keep(self, of_block: Tensor) -> None:
        if self.parameter.grad is not self._target:  # of another batch, or the first
            self.begin_sum()
            self._target = self.parameter.grad
        self._sum = of_block if self._sum is None else self._sum.add_(of_block)

    def begin_sum(self) -> None:
        """Start what was kept to be summed once."""
        if self._sum is not None:
            self.finish_sum()
            self._pending = self._start_sum(self._sum, self._target)
            self._sum = None

    def finish_sum(self) -> None:
        """Add the sum that was started, if any, to the parameter's gradient."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending.handle.wait()
        if pending.target is not None:
            pending.target.add_(pending.piece)
        else:
            self.parameter.grad = pending.piece

    def _start_sum(self, of_block: Tensor, target: Tensor | None) -> _Sum:
        of_block = of_block.contiguous()
        piece = torch.empty_like(self.parameter, requires_grad=False)
        handle = self._scatters.reduce_scatter(piece, of_block)
        return _Sum(handle, piece, of_block, target)


@dataclass(frozen=True, slots=True)
class _Sum:
    """A started reduce-scatter, which reads `of_block` until its end.

    `target` is the parameter's gradient of that moment: in a pipeline that never flushes, the next
    batch has another.
    """

    handle: Handle
    piece: Tensor
    of_block: Tensor
    target: Tensor | None


def _part(common: Tensor, index: int, size: int) -> Tensor:
    """Return one of some equal parts of memory as a storage of its own: what a rank holds."""
    parts = common.view(torch.uint8).numpy().reshape(size, -1)
    return torch.from_numpy(parts[index]).view(common.dtype)


def _is_inside(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def phase_now() -> str:
    """Return FORWARD, or RECOMPUTE for a forward that runs inside a backward."""
    inside = torch._C._current_graph_task_id() != -1
    return RECOMPUTE if inside else FORWARD
