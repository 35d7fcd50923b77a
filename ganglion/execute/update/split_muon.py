"""Muon over pieces: a matrix is put together for its update, and each rank keeps its part.

Muon orthogonalizes a whole matrix, so its pieces cannot be updated one by one:

    piece of gradient -> piece of momentum -> piece of direction --all-gather--> whole direction
    piece of weight <--cut-- torch's Muon on the whole <------------------------------'

Momentum stays in pieces like the weight; it is a checkpoint's as any other. Every rank of the
tensor group orthogonalizes every matrix, while the next one is gathered. Beside its pieces a rank
holds about six matrices for that, of the largest ones, until the update is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ganglion.decide.topology import Mesh, Placement
from ganglion.execute.comm import Group, Handle
from ganglion.execute.update.optimizers import NamedParameters, OptimizerFactory

MOMENTUM = "momentum_buffer"  # as in torch's Muon


@dataclass(frozen=True, slots=True)
class SplitMatrices:
    """Where matrices are: the ranks of a tensor group, and what piece each of them holds."""

    group: Group
    mesh: Mesh
    placements: Mapping[str, Placement]

    def gather(self, piece: Tensor) -> tuple[Handle, Tensor]:
        """Begin to collect the pieces of all ranks."""
        pieces = piece.new_empty(self.group.size, *piece.shape)
        return self.group.all_gather(pieces.flatten(0, 1), piece.contiguous()), pieces

    def joined(self, name: str, pieces: Tensor) -> Tensor:
        """Return a whole matrix; pieces that several ranks hold are equal."""
        whole = pieces.new_empty(self.placements[name].shape)
        for rank, piece in zip(self.group.ranks, pieces, strict=True):
            self._copy(name, rank, whole=whole, piece=piece, to_whole=True)
        return whole

    def put(self, name: str, piece: Tensor, whole: Tensor) -> None:
        """Copy this rank's piece into its place."""
        self._copy(name, self._rank, whole=whole, piece=piece, to_whole=True)

    def take(self, name: str, piece: Tensor, whole: Tensor) -> None:
        """Fill this rank's piece from its place."""
        self._copy(name, self._rank, whole=whole, piece=piece, to_whole=False)

    @property
    def _rank(self) -> int:
        return self.group.ranks[self.group.index]

    def _copy(self, name: str, rank: int, *, whole: Tensor, piece: Tensor, to_whole: bool) -> None:
        boxes = self.placements[name].boxes(self.mesh, self.mesh.coordinates(rank))
        for box in boxes:
            here, there = whole[box.in_whole], piece[box.in_piece]
            here.copy_(there) if to_whole else there.copy_(here)


def over_pieces(factory: OptimizerFactory, matrices: SplitMatrices) -> OptimizerFactory:
    """Return the same factory, but Muon of split matrices puts them together.

    Hooks that the factory registered are called around the steps of what it becomes.
    """

    def build(named: NamedParameters) -> Sequence[Optimizer]:
        made = factory(named)
        optimizers = [made] if isinstance(made, Optimizer) else made
        return [_over_pieces(each, named, matrices) for each in optimizers]

    return build


def _over_pieces(
    optimizer: Optimizer, named: NamedParameters, matrices: SplitMatrices
) -> Optimizer:
    kind = getattr(torch.optim, "Muon", None)  # newer than the oldest torch this package accepts
    if kind is None or not isinstance(optimizer, kind):
        return optimizer
    names = {id(parameter): name for name, parameter in named}
    groups = [
        {**group, "params": [(names[id(p)], p) for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    made = Muon(groups, optimizer.defaults, matrices)
    # Shared, not copied: a handle that the factory got still removes its hook.
    made._optimizer_step_pre_hooks = optimizer._optimizer_step_pre_hooks
    made._optimizer_step_post_hooks = optimizer._optimizer_step_post_hooks
    return made


class Muon(Optimizer):
    """torch's Muon over pieces; its name is what checkpoints know the state of either by."""

    def __init__(
        self, groups: list[dict[str, Any]], defaults: dict[str, Any], matrices: SplitMatrices
    ) -> None:
        """Update named pieces of `matrices`, with the groups and settings of torch's Muon."""
        for group in groups:
            group.pop("param_names", None)  # they come with the parameters
        super().__init__(groups, defaults)
        self._matrices = matrices

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every piece that has a gradient."""
        assert closure is None, "gradients are summed over ranks before a step, never inside it"
        updates = [
            _Update(self._matrices, group, name, parameter)
            for group in self.param_groups
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
            if parameter.grad is not None
        ]
        for update, following in pairwise([None, *updates, None]):
            if following is not None:
                following.begin(self._momentum(following.piece))
            if update is not None:
                update.finish()

    def _momentum(self, piece: Tensor) -> Tensor:
        state = self.state[piece]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(piece)
        found: Tensor = state[MOMENTUM]
        return found


class _Update:
    """The update of one matrix: begun, then finished."""

    def __init__(
        self, matrices: SplitMatrices, group: dict[str, Any], name: str, piece: nn.Parameter
    ) -> None:
        self.piece = piece
        self._matrices = matrices
        self._group = group
        self._name = name
        self._gathering: tuple[Handle, Tensor] | None = None

    def begin(self, momentum: Tensor) -> None:
        """Move the momentum, and begin to gather where it points."""
        decay, gradient = self._group["momentum"], self.piece.grad
        assert gradient is not None
        momentum.lerp_(gradient, 1 - decay)
        direction = gradient.lerp(momentum, decay) if self._group["nesterov"] else momentum
        self._gathering = self._matrices.gather(direction)

    def finish(self) -> None:
        """Let torch's Muon update the whole, of which only this rank's piece has its weights."""
        assert self._gathering is not None
        handle, pieces = self._gathering
        self._gathering = None
        handle.wait()
        whole = nn.Parameter(pieces.new_zeros(self._matrices.placements[self._name].shape))
        whole.grad = self._matrices.joined(self._name, pieces)
        self._matrices.put(self._name, self.piece, whole)
        settings = {key: self._group[key] for key in _SETTINGS}
        torch.optim.Muon([whole], momentum=0.0, nesterov=False, **settings).step()  # type: ignore[no-untyped-call]
        self._matrices.take(self._name, self.piece, whole)


_SETTINGS = ("lr", "weight_decay", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
