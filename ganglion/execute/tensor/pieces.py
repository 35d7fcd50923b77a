"""From a whole parameter or buffer to this rank's piece of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ganglion.decide.topology import Placement, Shard
from ganglion.errors import LayoutError
from ganglion.execute.tensor.grid import Grid


@dataclass(frozen=True, slots=True)
class _Made:
    whole: Tensor  # kept alive, for it is known by its id
    piece: Tensor
    placement: Placement
    name: str


class Cutter:
    """Cuts parameters, each once: modules that share a whole parameter share its piece."""

    def __init__(self, grid: Grid) -> None:
        """Begin with nothing cut."""
        self._grid = grid
        self._made: dict[int, _Made] = {}  # by id of the whole
        self._placements: dict[int, Placement] = {}  # by id of the piece

    def weight(self, name: str, whole: nn.Parameter, *shards: Shard) -> nn.Parameter:
        """Return a piece of a weight that is stored in pieces along z too, by its dim 0.

        Rows that z does not divide are held by every rank along z.
        """
        rows = self._placement(name, whole, shards, ()).local_shape(self._grid.mesh)[0]
        if rows % self._grid.mesh.z:
            piece = self._piece(name, whole, shards, ("z", "data"))
        else:
            piece = self._piece(name, whole, (*shards, Shard(0, "z")), ("data",))
        assert isinstance(piece, nn.Parameter)
        return piece

    def vector(self, name: str, whole: nn.Parameter | None, *shards: Shard) -> nn.Parameter | None:
        """Return a piece of a parameter that ranks along z hold too: its gradients are summed."""
        if whole is None:
            return None
        piece = self._piece(name, whole, shards, ("z", "data"))
        assert isinstance(piece, nn.Parameter)
        return piece

    def buffer(self, name: str, whole: Tensor | None, *shards: Shard) -> Tensor | None:
        """Return a piece of a buffer."""
        return None if whole is None else self._piece(name, whole, shards, ("z", "data"))

    def placement_of(self, piece: Tensor) -> Placement:
        """Return where a piece belongs; what was never cut is whole on every rank."""
        found = self._placements.get(id(piece))
        if found is not None:
            return found
        # Ranks along z saw other samples.
        return Placement(shape=tuple(piece.shape), replicated=("z", "data"))

    def _piece(
        self, name: str, whole: Tensor, shards: tuple[Shard, ...], replicated: tuple[str, ...]
    ) -> Tensor:
        placement = self._placement(name, whole, shards, replicated)
        known = self._made.get(id(whole))
        if known is not None:
            return _shared(name, known, placement)
        piece = cut_out(whole.detach(), placement, self._grid)
        if isinstance(whole, nn.Parameter):
            piece = nn.Parameter(piece, requires_grad=whole.requires_grad)
        self._made[id(whole)] = _Made(whole, piece, placement, name)
        self._placements[id(piece)] = placement
        return piece

    def _placement(
        self, name: str, whole: Tensor, shards: tuple[Shard, ...], replicated: tuple[str, ...]
    ) -> Placement:
        """Return where a piece belongs, alike for cuts alike; refuse sizes that do not fit."""
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


def _shared(name: str, known: _Made, wanted: Placement) -> Tensor:
    if known.placement != wanted:
        raise LayoutError(
            f"{name} is the same parameter as {known.name}, but their cuts would split it in "
            f"different ways ({_told(wanted)} and {_told(known.placement)}): give both modules "
            f"cuts that agree, or untie them"
        )
    return known.piece


def _told(placement: Placement) -> str:
    cuts = [f"dim {shard.dim} over {shard.axis}" for shard in placement.shards]
    return ", ".join(cuts) or "whole"


def cut_out(whole: Tensor, placement: Placement, grid: Grid) -> Tensor:
    """Return this rank's piece of a whole tensor, in memory of its own."""
    piece = torch.empty(placement.local_shape(grid.mesh), dtype=whole.dtype, device=whole.device)
    for box in placement.boxes(grid.mesh, grid.coordinates):
        piece[box.in_piece] = whole[box.in_whole]
    return piece
