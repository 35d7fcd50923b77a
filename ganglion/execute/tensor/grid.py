"""The grid: the groups of one rank along x, y and z, and the settings of its layers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ganglion.decide.plan import Plan
from ganglion.decide.topology import Coordinates, Mesh
from ganglion.errors import ConfigError, LayoutError
from ganglion.execute.comm import Group, World, labelled
from ganglion.execute.tensor.tuning import Tuner
from ganglion.units import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSettings:
    """Overlap of communication with computation, and memory for less traffic.

    Only `halves` and `tune` change the arithmetic.

    `overlap_all_reduce`: of an input gradient, under the matmul of the weight gradient (OAR), and
    of a half under the other.
    `overlap_reduce_scatter`: of a weight gradient, until the end of backward (ORS).
    `overlap_all_gather`: of the next weight, under the layer before it (OAG).
    `keep_gathered`: gather a weight once and keep it until it changes, and sum weight gradients
    over z once a step: more memory, less traffic. `keep_names` does so for the weights of some
    modules, `keep_bytes` for those, from the first on, whose blocks fit into that many bytes.
    `halves`: cut the rows of a layer in two, so that the all-reduce of one half, forward and
    backward, runs under the matmul of the other. This changes the order of sums.
    `share_pieces`: ranks along z with common memory keep a weight's pieces side by side there, so
    that no gather is needed.
    `tune`: a folder; the matmuls of linear layers are timed once in three ways, and the fastest way
    of each is kept there and used. This changes roundings.
    """

    overlap_all_reduce: bool = True
    overlap_reduce_scatter: bool = True
    overlap_all_gather: bool = True
    keep_gathered: bool = False
    keep_names: tuple[str, ...] = ()
    keep_bytes: int = 0
    halves: bool = False
    share_pieces: bool = True
    tune: str | None = None

    def __post_init__(self) -> None:
        """Refuse more than one of the settings for kept weights."""
        if self.keep_gathered + bool(self.keep_names) + (self.keep_bytes > 0) > 1:
            raise ConfigError(
                f"keep_gathered = {self.keep_gathered}, keep_names = {self.keep_names} and "
                f"keep_bytes = {self.keep_bytes} each say what is kept: set one of them"
            )

    @classmethod
    def of(cls, plan: Plan) -> TensorSettings:
        """Return the settings of a plan."""
        return cls(
            overlap_all_reduce=plan.overlap,
            overlap_reduce_scatter=plan.overlap,
            overlap_all_gather=plan.overlap,
            keep_gathered=plan.keep_gathered,
            keep_bytes=int(plan.keep_gathered_mib * MIB),
            share_pieces=plan.share_pieces,
        )


WITHOUT_OVERLAP = TensorSettings(
    overlap_all_reduce=False, overlap_reduce_scatter=False, overlap_all_gather=False
)


class Grid:
    """The position and the groups of one rank along x, y and z."""

    def __init__(self, world: World, settings: TensorSettings) -> None:
        """Create the groups; collective over the world."""
        self.mesh: Mesh = world.mesh
        self.coordinates: Coordinates = world.coordinates
        self.settings = settings
        self._along = {axis: world.group(axis) for axis in ("x", "y")}
        # Two groups of the same ranks: a gather must not queue behind a reduce-scatter.
        self.gathers = world.group("z")
        self.scatters = world.group("z", use="scatter")
        self.tuner: Tuner | None = None
        if settings.tune is not None:
            # Ranks that hold the same stage multiply the same shapes in the same order.
            group = world.group("data", "x", "y", "z", use="tune")
            self.tuner = Tuner(Path(settings.tune), group)

    def group(self, axis: str | None, label: str = "") -> Group | None:
        """Return the group along an axis, None if that is one rank; the trace shows the label."""
        if axis is None or self._along[axis].size == 1:
            return None
        return labelled(self._along[axis], label)

    def size(self, axis: str | None) -> int:
        """Return the number of pieces along an axis."""
        return 1 if axis is None else self.mesh.size(axis)

    def index(self, axis: str | None) -> int:
        """Return the number of this rank's piece."""
        return 0 if axis is None else self.coordinates.along(axis)

    def share(self, total: int, axis: str | None, what: str) -> range:
        """Return this rank's range of `total` entries; refuse one that the axis does not divide."""
        size = self.size(axis)
        if total % size:
            raise LayoutError(
                f"{what} = {total} cannot be split over {axis} = {size}: choose a multiple of "
                f"{size}, or another parallel.{axis}"
            )
        each = total // size
        return range(each * self.index(axis), each * (self.index(axis) + 1))
