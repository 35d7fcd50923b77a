"""From a run file and a number of processes to a Plan, with every check.

All checks happen here, before anything is launched; each message names the user's own key, the
numbers and one remedy.
"""

from __future__ import annotations

from ganglion.decide.config.checks import (
    check_averaging,
    check_error_feedback,
    check_precision,
    check_steps,
)
from ganglion.decide.config.model import check_description, num_blocks
from ganglion.decide.config.schema import ModelSection, RunFile
from ganglion.decide.config.tensor_checks import check_tensor_axes
from ganglion.decide.plan import Plan
from ganglion.decide.schedules.pipeline import (
    canonical_schedule,
    check_planned,
    planned_stage_map,
)
from ganglion.errors import LayoutError


def resolve(run: RunFile, num_processes: int | None = None) -> Plan:
    """Return the plan of a run file; without a number of processes, one replica is meant."""
    data = _data_size(run, num_processes)
    shares = data * run.parallel.z
    plan = Plan(
        data=data,
        pipe=run.parallel.pipe,
        x=run.parallel.x,
        y=run.parallel.y,
        z=run.parallel.z,
        rank_order=tuple(run.parallel.rank_order),
        schedule=canonical_schedule(run.parallel.schedule),
        limit=run.parallel.limit,
        extra=run.parallel.extra,
        chunks=run.parallel.chunks,
        priority=run.parallel.priority,
        microbatch_size=run.train.microbatch_size,
        num_microbatches=_num_microbatches(run, shares),
        stage_boundaries=tuple(run.parallel.stage_boundaries),
        recompute=run.memory.recompute,
        recompute_every=run.memory.recompute_every,
        recompute_blocks=tuple(run.memory.recompute_blocks),
        activation_mib=run.memory.activation_mib,
        offload_activations=run.memory.offload_activations,
        precision=run.train.precision,
        compute_fp32=run.memory.compute_fp32,
        offload=run.memory.offload,
        averaging=run.averaging.method,
        servers=run.averaging.servers,
        overlap=run.parallel.overlap,
        keep_gathered=run.parallel.keep_gathered,
        keep_gathered_mib=run.parallel.keep_gathered_mib,
        share_pieces=run.parallel.share_pieces,
        bucket_mib=run.parallel.bucket_mib,
        bucket_size=run.memory.bucket_size,
    )
    _check(run, plan)
    return plan


def check_plan(run: RunFile, plan: Plan, num_processes: int | None) -> None:
    """Refuse a plan given as a file that does not fit its run file or the processes."""
    if num_processes is not None and num_processes != plan.num_ranks:
        raise LayoutError(
            f"the plan needs {plan.num_ranks} processes, but {num_processes} were started: "
            f"{_start(plan.num_ranks)}"
        )
    if plan.global_batch_size != run.train.global_batch_size:
        raise LayoutError(
            f"the plan's global batch is {plan.microbatch_size} x {plan.num_microbatches} x "
            f"{plan.num_shares} = {plan.global_batch_size} samples, but "
            f"train.global_batch_size = {run.train.global_batch_size}: set it to "
            f"{plan.global_batch_size}"
        )
    _check(run, plan)


def _check(run: RunFile, plan: Plan) -> None:
    """Refuse settings that do not go with the plan or with each other."""
    check_planned(plan)
    check_description(run)
    _check_model(run.model, plan)
    check_tensor_axes(run, plan)
    check_error_feedback(run.optimizer.error_feedback, plan)
    check_averaging(run, plan)
    check_precision(run.optimizer.error_feedback, plan)
    check_steps(run)


def _check_model(model: ModelSection, plan: Plan) -> None:
    """Refuse a model that does not fit the plan's axes."""
    blocks = num_blocks(model)
    num_stages = planned_stage_map(plan).num_stages if plan.pipe > 1 else 1
    if blocks is not None and num_stages > blocks:
        chunks = num_stages // plan.pipe
        raise LayoutError(
            f"parallel.pipe = {plan.pipe} makes {num_stages} stages"
            + (f" ({chunks} a rank under {plan.schedule})" if chunks > 1 else "")
            + f", but the model has {blocks} blocks: use at most {blocks} stages"
            + ("" if model.description else " or raise model.layers")
        )
    if blocks is not None and plan.stage_boundaries and plan.stage_boundaries[-1] >= blocks:
        raise LayoutError(
            f"parallel.stage_boundaries = {list(plan.stage_boundaries)} cuts after the last of "
            f"{blocks} blocks: the last cut must be below {blocks}"
        )


def _data_size(run: RunFile, num_processes: int | None) -> int:
    parallel, servers = run.parallel, run.averaging.servers
    others = parallel.pipe * parallel.x * parallel.y * parallel.z
    if parallel.data == "auto":
        workers = others if num_processes is None else num_processes - servers
        if workers < others or workers % others:
            raise LayoutError(
                f"{num_processes} processes cannot hold parallel.pipe * x * y * z = {others} "
                f"ranks a replica: {_start(_next_multiple(workers, others) + servers)}"
            )
        return workers // others
    needed = parallel.data * others + servers
    if num_processes is not None and needed != num_processes:
        raise LayoutError(
            f"parallel.data * pipe * x * y * z + averaging.servers = {parallel.data} * {others} + "
            f"{servers} = {needed} processes, but {num_processes} were started: "
            f'{_start(needed)}, or set parallel.data = "auto"'
        )
    return parallel.data


def _start(count: int) -> str:
    """Return how to get another number of processes, under any launcher."""
    return f"start {count} (--nproc, torchrun --nproc-per-node or srun --ntasks {count})"


def _next_multiple(number: int, base: int) -> int:
    return max(1, -(-number // base)) * base


def _num_microbatches(run: RunFile, shares: int) -> int:
    batch, micro = run.train.global_batch_size, run.train.microbatch_size
    if shares < 1 or batch % (micro * shares):
        raise LayoutError(
            f"train.global_batch_size = {batch} is not a multiple of train.microbatch_size * "
            f"data * z = {micro} * {shares} = {micro * shares}: set train.global_batch_size = "
            f"{_next_multiple(batch, max(1, micro * shares))}"
        )
    return batch // (micro * shares)
