"""How long the stages of a run take on a cluster, from the costs of a built-in model's blocks."""

from __future__ import annotations

from pathlib import Path

from ganglion.decide.config import RunFile
from ganglion.decide.costs import Cluster, StageTimes, held_blocks, layer_times, stage_times
from ganglion.decide.plan import Plan
from ganglion.decide.predict.expected import expected_shape
from ganglion.decide.schedules.pipeline import planned_stage_map
from ganglion.decide.shapes import blocks_of, layers_of
from ganglion.decide.simulator import TensorOverlap, with_collectives
from ganglion.errors import ConfigError
from ganglion.units import MIB


def model_times(run: RunFile, plan: Plan, cluster: Cluster, file: Path) -> list[StageTimes]:
    """Return times from the model's own costs, with what split layers wait for."""
    stage_map = planned_stage_map(plan)
    held = [stage_map.stages_of(rank) for rank in range(plan.pipe)]
    if run.model.build or run.data.kind == "dataset":
        key = "model.build" if run.model.build else 'data.kind = "dataset"'
        raise ConfigError(
            f"{file}: {key} is code of your own, whose cost cannot be known before it runs: write "
            f"its times as [stages] into the cluster file"
        )
    shape = expected_shape(run)
    blocks = blocks_of(shape, plan.microbatch_size)
    times = stage_times(blocks, plan, cluster, held)
    if plan.x * plan.y * plan.z == 1:
        return times
    layers, overlap = layers_of(shape, plan.microbatch_size), _overlap(run, plan)
    return [
        with_collectives(
            one,
            layer_times([layers[number] for number in mine], plan, cluster, pipe),
            plan.num_microbatches,
            overlap,
            # Of a plan that computes some blocks again, all are taken to be gathered again.
            recompute=plan.recompute != "none",
        )
        for pipe, (one, mine) in enumerate(zip(times, held_blocks(blocks, plan, held), strict=True))
    ]


def _overlap(run: RunFile, plan: Plan) -> TensorOverlap:
    parallel = run.parallel
    return TensorOverlap(
        all_reduce=parallel.overlap,
        reduce_scatter=parallel.overlap,
        all_gather=parallel.overlap,
        keep_gathered=parallel.keep_gathered,
        keep_bytes=int(parallel.keep_gathered_mib * MIB),
        late_sums=plan.pipe > 1,
    )
