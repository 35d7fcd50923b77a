"""Split the blocks of a run over x, y and z, and record how for the rest of the run."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from ganglion.decide.topology import TENSOR_AXES, Mesh, ModelCuts, Placement
from ganglion.execute.comm import Group, World, labelled, plain_group
from ganglion.execute.gradients import Reach
from ganglion.execute.models import (
    LossFn,
    cross_entropy,
    make_real,
    named_buffers,
    named_parameters,
    tensor_cuts,
)
from ganglion.execute.pipeline.context import BuildContext
from ganglion.execute.pipeline.cutting import serial_names
from ganglion.execute.tensor import (
    TensorReport,
    TensorSettings,
    Weights,
    apply_tensor_parallel,
    gather,
    split_cross_entropy,
)
from ganglion.execute.update import SplitMatrices, over_pieces

logger = logging.getLogger(__name__)


def is_split(mesh: Mesh) -> bool:
    """Return whether a mesh has tensor axes."""
    return any(mesh.size(axis) > 1 for axis in TENSOR_AXES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Splitting:
    """How the blocks of a run are split over x, y and z; the defaults mean not at all.

    `reach` says over which ranks each gradient is summed; `norm_group` has the ranks whose parts
    of the gradient norm belong together; `whole_output` gathers what the last block returns.
    """

    reach: Reach | Mapping[str, Reach]
    placements: Mapping[str, Placement] = field(default_factory=dict)
    weights: Weights | None = None
    report: TensorReport | None = None
    norm_group: Group | None = None
    whole_output: Callable[[Tensor], Tensor] = lambda output: output


def unsplit(world: World, summed_axes: tuple[str, ...]) -> Splitting:
    """Return the splitting without tensor axes: gradients are summed over replicas, if at all."""
    return Splitting(reach=Reach(plain_group(world.group(*summed_axes))))


def split_blocks(
    context: BuildContext, cuts: ModelCuts | None, settings: TensorSettings
) -> tuple[BuildContext, Splitting]:
    """Return the context with split blocks and their loss; the given blocks are used up."""
    world = context.world
    if not is_split(world.mesh):
        return context, unsplit(world, context.plan.summed_axes)
    cuts = tensor_cuts(context.blocks) if cuts is None else cuts
    names = (*named_parameters(context.blocks), *named_buffers(context.blocks))
    split = apply_tensor_parallel(context.blocks, world, cuts.modules, settings)
    group = split.grid.group(cuts.output_axis, "output")
    # Of its own: what an update exchanges must not queue behind gathers of layers.
    together = world.group(*TENSOR_AXES, use="updates")
    placements = {name: split.report.placements[name] for name in names}
    splitting = Splitting(
        reach=_reaches(placements, world, context.plan.summed_axes),
        placements=placements,
        weights=split.weights,
        report=split.report,
        norm_group=plain_group(together),
        whole_output=lambda output: gather(output, group, cuts.output_dim),
    )
    loss_fn = _split_loss(context.loss_fn, group, cuts.output_dim)
    matrices = SplitMatrices(labelled(together, "muon"), world.mesh, placements)
    factory = over_pieces(context.updates.optimizer_factory, matrices)
    updates = dataclasses.replace(context.updates, optimizer_factory=factory)
    made = dataclasses.replace(context, blocks=split.blocks, loss_fn=loss_fn, updates=updates)
    return made, splitting


def choose_kept(context: BuildContext, splitting: Splitting, block_names: Iterable[str]) -> None:
    """Decide what stays gathered of the named blocks, those that this rank computes.

    Their weights must be stored in the precision of the plan: it decides how many fit.
    """
    if splitting.weights is None or splitting.report is None:
        return
    held = serial_names(context.blocks, tuple(block_names))
    splitting.report.kept = splitting.weights.choose_kept(held.values())
    if context.world.rank == 0:
        logger.info("tensor parallelism:\n%s", splitting.report)


def share_pieces(
    context: BuildContext,
    splitting: Splitting,
    parameters: Mapping[str, nn.Parameter],
    *,
    wholly: bool,
) -> None:
    """Put stored weights where ranks along z can read each other's without a copy between.

    Workers that are averaged pack their weights into memory of their own.
    """
    if splitting.weights is not None and not context.plan.averages:
        splitting.weights.share(parameters.values(), wholly=wholly)


def make_blocks_real(
    context: BuildContext, splitting: Splitting, block_names: Iterable[str]
) -> None:
    """Give the named blocks memory and initial weights, if they were built without."""
    if context.initial is None:
        return
    names = tuple(block_names)
    tensors: dict[str, Tensor] = dict(serial_names(context.blocks, names))
    for name in names:
        tensors |= context.blocks[name].named_buffers(prefix=name)
    make_real(tensors, context.initial, splitting.placements, context.world, context.device)


def _reaches(
    placements: Mapping[str, Placement], world: World, summed_axes: tuple[str, ...]
) -> dict[str, Reach]:
    """Return over which ranks each gradient is summed: copies of it along `summed_axes`.

    All groups are made first, in one order: stages have different parameters, and every rank must
    take part in making every group.
    """
    wanted: tuple[tuple[str, ...], ...] = (("data",), ("data", "z"))
    # Of their own: when a sum starts depends on messages, while layers gather in a fixed order.
    groups = {
        axes: plain_group(world.group(*({*axes} & {*summed_axes}), use="gradients"))
        for axes in wanted
    }
    return {
        name: Reach(groups[tuple(sorted(place.replicated))], place.num_copies(world.mesh))
        for name, place in placements.items()
    }


def _split_loss(loss_fn: LossFn, group: Group | None, dim: int) -> LossFn:
    """Return a loss of split outputs: our own without gathering them, any other on the whole."""
    if group is None:
        return loss_fn
    if loss_fn is cross_entropy and dim == -1:
        return lambda output, target: split_cross_entropy(output, target, group)
    return lambda output, target: loss_fn(gather(output, group, dim), target)
