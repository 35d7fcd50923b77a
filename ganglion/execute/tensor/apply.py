"""Replace the modules of ordinary blocks by split layers; names stay.

Every module that the cuts name is replaced by its split counterpart, which holds this rank's pieces
of its parameters. A linear layer without a cut takes and returns whole activations. Modules that
cannot be split are left whole; the report gives the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from ganglion.decide.topology import (
    WHOLE,
    Cut,
    DropoutCut,
    EmbeddingCut,
    LinearCut,
    NormCut,
    Placement,
    WidthCut,
)
from ganglion.errors import ConfigError
from ganglion.execute.comm import World
from ganglion.execute.tensor.grid import Grid, TensorSettings
from ganglion.execute.tensor.pieces import Cutter
from ganglion.execute.tensor.products import form_of, why_not_split
from ganglion.execute.tensor.replace import Replacer
from ganglion.execute.tensor.weights import Weights


@dataclass(frozen=True, slots=True)
class Entry:
    """One module, and how it was split or why not."""

    module: str
    kind: str
    how: str


@dataclass(slots=True)
class TensorReport:
    """The modules that were split and left whole, and the placements of parameters by name.

    `kept` lists the parameters of this rank whose blocks stay gathered along z until they change.
    """

    split: list[Entry] = field(default_factory=list)
    whole: list[Entry] = field(default_factory=list)
    placements: dict[str, Placement] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Return one line for each module."""
        rows = [f"split  {e.module} ({e.kind}): {e.how}" for e in self.split]
        rows += [f"whole  {e.module} ({e.kind}): {e.how}" for e in self.whole]
        rows += [f"kept   {name}: gathered once, until it changes" for name in self.kept]
        return "\n".join(rows)


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """Split blocks and their weights.

    Call `weights.finish_gradients(parameters)` after the backwards of a step, and
    `weights.on_change()` whenever the weights have changed.
    """

    blocks: dict[str, nn.Module]
    grid: Grid
    weights: Weights
    report: TensorReport


def apply_tensor_parallel(
    blocks: Mapping[str, nn.Module],
    world: World,
    cuts: Mapping[str, Cut],
    settings: TensorSettings | None = None,
) -> TensorParallel:
    """Split the blocks of a model over x, y and z, with `cuts` by the names of modules.

    Children of the given blocks are replaced in place; parameters keep their names. Each rank cuts
    its pieces from whole weights; nothing is sent.
    """
    grid = Grid(world, TensorSettings() if settings is None else settings)
    splitter = _Splitter(grid, cuts)
    done = {name: splitter.split(name, block) for name, block in blocks.items()}
    splitter.finish(done)
    return TensorParallel(done, grid, splitter.weights, splitter.report)


class _Splitter:
    """Replaces the modules of blocks."""

    def __init__(self, grid: Grid, cuts: Mapping[str, Cut]) -> None:
        self.weights = Weights(grid)
        self.report = TensorReport()
        self._grid = grid
        self._cuts = cuts
        self._used: set[str] = set()
        self._cutter = Cutter(grid)
        self._replacer = Replacer(grid, self.weights, self._cutter)
        self._seen: dict[int, tuple[nn.Module, nn.Module]] = {}  # a module may occur twice

    def split(self, name: str, module: nn.Module) -> nn.Module:
        """Return the split counterpart of a module, or the module with its children split."""
        if name in self._cuts:
            self._used.add(name)
        known = self._seen.get(id(module))
        if known is not None:
            return known[1]
        made = self._converted(name, module)
        self._seen[id(module)] = (module, made)
        if made is module:
            # Not named_children(): that leaves out the second name of a child.
            for child_name, child in module._modules.items():
                if child is not None:
                    setattr(module, child_name, self.split(f"{name}.{child_name}", child))
        return made

    def finish(self, blocks: Mapping[str, nn.Module]) -> None:
        """Complete the report, and decide which weights stay gathered.

        Refuse a cut of a module that is not there: it would be ignored.
        """
        unknown = sorted(set(self._cuts) - self._used)
        if unknown:
            raise ConfigError(
                f"a cut is given for {unknown[0]!r}, which is no module of the blocks, or lies "
                f"inside one that has a cut itself: check the name"
            )
        for name, tensor in _tensors(blocks):
            self.report.placements[name] = self._cutter.placement_of(tensor)
        self.weights.check_names()
        self.report.kept = self.weights.choose_kept(tensor for _, tensor in _tensors(blocks))

    def _converted(self, name: str, module: nn.Module) -> nn.Module:
        cut = self._cuts.get(name)
        if cut is None and form_of(module) is not None:
            cut = WHOLE
        if cut is None:
            own = [part for part, _ in module.named_parameters(recurse=False)]
            if own:
                why = why_not_split(module) or "no cut is known for it"
                held = f"{why}; every rank holds its {', '.join(own)}"
                self.report.whole.append(Entry(name, type(module).__name__, held))
            return module
        made = self._replacer.replaced(name, module, cut)
        made.train(module.training)
        self.report.split.append(Entry(name, type(module).__name__, self._description(cut, made)))
        return made

    def _description(self, cut: Cut, made: nn.Module) -> str:
        match cut:
            case LinearCut():
                given = ", gathered" if cut.gives_whole else ""
                taken = ", cut from whole ones" if cut.takes_whole else ""
                sides = f"inputs {self._over(cut.in_axis)}{taken}; outputs"
                return f"{sides} {self._over(cut.out_axis)}{given}; {self._storage(made)}"
            case EmbeddingCut():
                sides = f"rows {self._over(cut.row_axis)}; features"
                return f"{sides} {self._over(cut.feature_axis)}; {self._storage(made)}"
            case NormCut() | DropoutCut():
                return f"features {self._over(cut.axis)}"
            case WidthCut():
                names = (*cut.attributes, *(key for key, _ in cut.counts))
                return f"{', '.join(names)} {self._over(cut.axis)}"

    def _over(self, axis: str | None) -> str:
        return "whole" if axis is None else f"over {axis}={self._grid.size(axis)}"

    def _storage(self, made: nn.Module) -> str:
        """Return how the weight of a module is stored along z."""
        weight, z = made.weight, self._grid.mesh.z
        assert isinstance(weight, Tensor)
        is_split = any(shard.axis == "z" for shard in self._cutter.placement_of(weight).shards)
        if is_split or z == 1:
            return f"stored over z={z}"
        return f"stored whole along z={z}, which does not divide its {weight.shape[0]} rows"


def _tensors(blocks: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and buffer under each of its names."""
    for name, block in blocks.items():
        yield from block.named_parameters(prefix=name, remove_duplicate=False)
        yield from block.named_buffers(prefix=name, remove_duplicate=False)
