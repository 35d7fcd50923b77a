"""Cut whole parameters and buffers into this rank's pieces."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ganglion.decide.topology import Placement, Shard
from ganglion.errors import LayoutError
from ganglion.execute.tensor.grid import Grid


@dataclass(frozen=True, slots=True)
class _Made:
    whole: Tensor  # kept alive: it is looked up by its id
    piece: Tensor
    placement: Placement
    name: str


class Cutter:
    """Cuts parameters, each once: modules that share a parameter share its piece."""

    def __init__(self, grid: Grid) -> None:
        """Cut along the axes of `grid`."""
        self._grid = grid
        self._made: dict[int, _Made] = {}  # by id of the whole
        self._placements: dict[int, Placement] = {}  # by id of the piece

    def weight(self, name: str, whole: nn.Parameter, *shards: Shard) -> nn.Parameter:
        """Return a piece of a weight, cut along z too in dim 0.

        If z does not divide its rows, every rank along z holds all of them.
        """
        rows = self._placement(name, whole, shards, ()).local_shape(self._grid.mesh)[0]
        if rows % self._grid.mesh.z:
            piece = self._piece(name, whole, shards, ("z", "data"))
        else:
            piece = self._piece(name, whole, (*shards, Shard(0, "z")), ("data",))
        assert isinstance(piece, nn.Parameter)
        return piece

    def vector(self, name: str, whole: nn.Parameter | None, *shards: Shard) -> nn.Parameter | None:
        """Return a piece of a parameter that ranks along z hold alike, with summed gradients."""
        if whole is None:
            return None
        piece = self._piece(name, whole, shards, ("z", "data"))
        assert isinstance(piece, nn.Parameter)
        return piece

    def buffer(self, name: str, whole: Tensor | None, *shards: Shard) -> Tensor | None:
        """Return a piece of a buffer."""
        return None if whole is None else self._piece(name, whole, shards, ("z", "data"))

    def placement_of(self, piece: Tensor) -> Placement:
        """Return the placement of a piece; a tensor that was not cut is whole on every rank."""
        found = self._placements.get(id(piece))
        if found is not None:
            return found
        # With z: its ranks saw other samples.
        return Placement(shape=tuple(piece.shape), replicated=("z", "data"))

    def _piece(
        self, name: str, whole: Tensor, shards: tuple[Shard, ...], replicated: tuple[str, ...]
    ) -> Tensor:
        placement = self._placement(name, whole, shards, replicated)
        known = self._made.get(id(whole))
        if known is not None:
            if known.placement != placement:
                raise LayoutError(
                    f"{name} is the same parameter as {known.name}, but their cuts would split it "
                    f"in different ways ({_cuts_text(placement)} and "
                    f"{_cuts_text(known.placement)}): give both modules cuts that agree, or untie "
                    f"them"
                )
            return known.piece
        piece = cut_out(whole.detach(), placement, self._grid)
        if isinstance(whole, nn.Parameter):
            piece = nn.Parameter(piece, requires_grad=whole.requires_grad)
        self._made[id(whole)] = _Made(whole, piece, placement, name)
        self._placements[id(piece)] = placement
        return piece

    def _placement(
        self, name: str, whole: Tensor, shards: tuple[Shard, ...], replicated: tuple[str, ...]
    ) -> Placement:
        """Return the placement of a piece, equal for equal cuts; refuse sizes that do not fit."""
        used = (shard for shard in shards if self._grid.mesh.size(shard.axis) > 1)
        placement = Placement(
            shape=tuple(whole.shape),
            shards=tuple(sorted(used, key=lambda shard: shard.dim)),
            replicated=replicated,
        )
        try:
            placement.local_shape(self._grid.mesh)
        except LayoutError as error:
            raise LayoutError(
                f"{name}: {error}, change the plan, or give the module a cut that leaves this dim "
                f"whole, such as LinearCut(None, None)"
            ) from error
        return placement


def _cuts_text(placement: Placement) -> str:
    cuts = [f"dim {shard.dim} over {shard.axis}" for shard in placement.shards]
    return ", ".join(cuts) or "whole"


def cut_out(whole: Tensor, placement: Placement, grid: Grid) -> Tensor:
    """Return a copy of this rank's piece of a whole tensor."""
    piece = torch.empty(placement.local_shape(grid.mesh), dtype=whole.dtype, device=whole.device)
    for box in placement.boxes(grid.mesh, grid.coordinates):
        piece[box.in_piece] = whole[box.in_whole]
    return piece
