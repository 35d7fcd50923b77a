"""Weights stored in pieces along z: gathered for use, their gradients summed and cut.

    piece --all-gather z--> block --matmul--> ...            forward, and again in backward
    piece of gradient <--reduce-scatter z-- gradient of the block

With overlap the gather of the next weight runs while this one is used, and the sums of gradients
run until `finish_gradients`; the arithmetic is the same. A weight that is kept is gathered once
until it changes, and its gradients are summed over z once a step.
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
    """All stored weights of this rank."""

    def __init__(self, grid: Grid) -> None:
        """Hold no weight yet."""
        self._grid = grid
        self._order = GatherOrder()
        self._stored: dict[int, StoredWeight] = {}  # by id of the parameter
        self._numbered: list[StoredWeight] = []
        self._is_settled = False

    def store(
        self, parameter: nn.Parameter, *, name: str = "", is_split: bool = True, label: str = ""
    ) -> StoredWeight:
        """Return the weight of a parameter; layers that share it share the weight.

        `is_split`: ranks along z have different pieces of it. The trace shows the label.
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
        """Choose which of these parameters stay gathered; return their names.

        Ranks of a group hold blocks of the same sizes in the same order, so they choose the same.
        """
        found = dict.fromkeys(self._stored.get(id(parameter)) for parameter in parameters)
        used = [weight for weight in found if weight is not None and weight.is_split]
        sizes = [weight.num_bytes for weight in used]
        fits = kept_within(sizes, self._grid.settings.keep_bytes)
        for weight, does_fit in zip(used, fits, strict=True):
            weight.keeps = does_fit or self._is_named(weight)
        return [weight.names[0] for weight in used if weight.keeps]

    def share(self, parameters: Iterable[Tensor], *, wholly: bool) -> None:
        """Move the pieces of these parameters into shared memory, to save copies.

        If `wholly`, ranks along z that share memory have the pieces side by side there and gather
        nothing: `done_reading` must then be called before each update. Else a gather copies a piece
        once. The memory of each parameter is replaced: no other reference to it may exist yet.
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
        """Return when no rank reads shared pieces any more, so that they may change."""
        if any(weight.is_common for weight in self._numbered):
            self._grid.gathers.barrier()

    def check_names(self) -> None:
        """Refuse an entry of keep_names that matches no weight: it would be ignored."""
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
        """Return whether a parameter is one of these, which layers gather and cast themselves."""
        return id(parameter) in self._stored

    def on_use(self, weight: StoredWeight, phase: str) -> None:
        """Start to gather the weight that will be used next."""
        following = self._order.on_use(Use(phase, weight.number))
        if following is not None and self._grid.settings.overlap_all_gather:
            self._numbered[following].begin_gather()

    def begin(self, parameter: Tensor) -> None:
        """Start the sum of a parameter's gradient, after its last backward of a step."""
        if id(parameter) in self._stored:
            self._stored[id(parameter)].begin_sum()

    def finish(self, parameter: Tensor) -> None:
        """Return when the gradient of a parameter is complete."""
        if id(parameter) in self._stored:
            self._stored[id(parameter)].finish_sum()

    def finish_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Return when the gradients of these parameters are complete; others may still grow."""
        known = [self._stored[id(p)] for p in parameters if id(p) in self._stored]
        for weight in known:
            weight.begin_sum()
        for weight in known:
            weight.finish_sum()

    def on_change(self) -> None:
        """Drop gathered blocks, because the weights have changed."""
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
        self.keeps = False  # the block until it changes, and the sum of its gradients
        self._settings = grid.settings
        self._gathers = labelled(grid.gathers, label)
        self._scatters = labelled(grid.scatters, label)
        self._all = all_
        self.is_split = is_split and grid.gathers.size > 1
        self._common: Tensor | None = None  # the block, if ranks along z share its memory
        self._gathering: tuple[Handle, Tensor] | None = None
        self._block: Tensor | None = None  # kept between uses
        self._sum: Tensor | None = None  # of gradients of the block, kept between backwards
        self._target: Tensor | None = None  # the gradient to add it to
        self._pending: _Sum | None = None

    @property
    def is_common(self) -> bool:
        """Whether ranks along z share the memory of the block."""
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
        """Move the piece into common memory, or into memory from which gathers copy once."""
        if not self.is_split:
            return
        piece = self.parameter.detach()
        if wholly and self._settings.share_pieces and piece.device.type == "cpu":
            self._common = self._gathers.allocate_common(math.prod(self.shape), piece.dtype)
        if self._common is None:
            shared = empty_for(self._gathers, piece.numel(), piece)
        else:
            # A storage of its own, of this rank's part only.
            parts = self._common.view(torch.uint8).numpy().reshape(self._gathers.size, -1)
            shared = torch.from_numpy(parts[self._gathers.index]).view(piece.dtype)
        self.parameter.data = shared.view_as(piece).copy_(piece)

    def begin_gather(self) -> None:
        """Start to gather the block, unless that is done or in progress."""
        if self._block is not None or self._gathering is not None:
            return
        piece = self.parameter.detach()
        block = torch.empty(self.shape, dtype=piece.dtype, device=piece.device)
        self._gathering = (self._gathers.all_gather(block, piece), block)

    def forget(self) -> None:
        """Drop the gathered block, also one in progress."""
        if self._gathering is not None:
            self._gathering[0].wait()
        self._gathering = self._block = None

    def gradient(self, of_block: Tensor) -> Tensor | None:
        """Add the gradient of the block; return that of the parameter, or None if it comes later.

        With or without overlap it is added by `finish_sum`, in the same order.
        """
        if not self.is_split:
            return of_block
        of_block = of_block.to(self.parameter.dtype)
        if self.keeps:
            if self.parameter.grad is not self._target:  # of another batch, or the first
                self.begin_sum()
                self._target = self.parameter.grad
            self._sum = of_block if self._sum is None else self._sum.add_(of_block)
            return None
        self.finish_sum()  # of the microbatch before
        self._pending = self._start_sum(of_block, self.parameter.grad)
        if not self._settings.overlap_reduce_scatter:
            self._pending.handle.wait()
        return None

    def begin_sum(self) -> None:
        """Start the sum over z of the kept gradients."""
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
    """A started reduce-scatter, which reads `of_block` until it ends.

    `target` is the parameter's gradient at the start: in a pipeline that never flushes, the next
    batch has another.
    """

    handle: Handle
    piece: Tensor
    of_block: Tensor
    target: Tensor | None


def _is_inside(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def phase_now() -> str:
    """Return FORWARD, or RECOMPUTE for a forward that runs inside a backward."""
    inside = torch._C._current_graph_task_id() != -1
    return RECOMPUTE if inside else FORWARD
