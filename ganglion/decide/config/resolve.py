"""From a run file and a number of processes to a Plan, refusing what cannot fit.

All checks happen here, before anything is launched; each message names the user's own key, the
numbers and one remedy.
"""

from __future__ import annotations

import math

from ganglion.decide.config.averaging_checks import check_averaging
from ganglion.decide.config.precision_checks import check_precision
from ganglion.decide.config.schema import ModelSection, RunFile
from ganglion.decide.config.tensor_checks import check_tensor_axes
from ganglion.decide.plan import Plan
from ganglion.decide.schedules.pipeline import (
    BUILT_IN,
    Registry,
    canonical_schedule,
    check_planned,
    planned_schedule,
    planned_stage_map,
)
from ganglion.decide.shapes import ConvShape, GPTShape, MLPShape, ModelShape
from ganglion.errors import ConfigError, LayoutError


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
    )
    check_planned(plan)
    check_model(run.model, plan)
    check_tensor_axes(run, plan)
    check_error_feedback(run.optimizer.error_feedback, plan)
    check_averaging(run, plan)
    check_precision(run.optimizer.error_feedback, plan)
    check_steps(run)
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
    check_planned(plan)
    check_model(run.model, plan)
    check_tensor_axes(run, plan)
    check_error_feedback(run.optimizer.error_feedback, plan)
    check_averaging(run, plan)
    check_precision(run.optimizer.error_feedback, plan)
    check_steps(run)


def model_shape(
    model: ModelSection,
    *,
    num_outputs: int,
    input_shape: tuple[int, ...],
    tokens: bool | None = None,
) -> ModelShape:
    """Complete a model section with what only the data know: classes and input shape.

    `num_outputs` is the number of token ids or classes, 0 if the data do not say. `tokens` says
    whether samples are token ids; None leaves out the check that the model is made for them.
    """
    check_data(model, num_outputs=num_outputs, input_shape=input_shape, tokens=tokens)
    if model.kind == "gpt":
        return _gpt_shape(model, model.vocab_size or num_outputs, input_shape[0])
    if model.kind == "mlp":
        return MLPShape(
            num_inputs=math.prod(input_shape),
            num_outputs=num_outputs,
            num_layers=model.layers,
            hidden=model.hidden,
        )
    if len(input_shape) != 3:
        raise LayoutError(
            f'model.kind = "conv" needs images of shape (channels, height, width), but data.kind '
            f'gives samples of shape {input_shape}: set data.kind = "images"'
        )
    return ConvShape(
        image_size=input_shape[-1], num_channels=input_shape[0], num_outputs=num_outputs
    )


def check_data(
    model: ModelSection, *, num_outputs: int, input_shape: tuple[int, ...], tokens: bool | None
) -> None:
    """Refuse a built-in model that cannot be trained on the data."""
    if model.kind == "gpt" and tokens is False:
        raise LayoutError(
            f'model.kind = "gpt" needs token ids, but data.kind gives samples of shape '
            f'{input_shape} that are not: set data.kind = "text" or "synthetic", or model.kind = '
            f'"mlp"'
        )
    if model.kind != "gpt" and tokens:
        raise LayoutError(
            f'model.kind = "{model.kind}" needs numbers, but data.kind gives sequences of '
            f'{input_shape[0]} token ids: set model.kind = "gpt" or data.kind = "images"'
        )
    if model.kind == "gpt" and 0 < model.vocab_size < num_outputs:
        raise LayoutError(
            f"model.vocab_size = {model.vocab_size} is less than the {num_outputs} token ids of "
            f"data.kind: set model.vocab_size = 0 (as many as there are) or at least {num_outputs}"
        )
    if num_outputs < 1 and not (model.kind == "gpt" and model.vocab_size):
        raise LayoutError(
            f'model.kind = "{model.kind}" has as many outputs as the data have classes, but the '
            f'data set of data.kind = "dataset" has num_classes = {num_outputs}: give it an '
            f"attribute num_classes of at least 1"
        )


def num_blocks(model: ModelSection) -> int | None:
    """Return how many blocks a model will have, or None for a user's own."""
    if model.build:
        return None
    if model.kind == "gpt":
        return _gpt_shape(model, 1, 1).num_blocks
    if model.kind == "mlp":
        return model.layers
    return ConvShape(image_size=28, num_channels=1, num_outputs=10).num_blocks


def check_error_feedback(wanted: bool, plan: Plan, schedules: Registry = BUILT_IN) -> None:
    """Refuse error feedback unless every stage's gradients are late by exactly one update."""
    if not wanted:
        return
    late = [planned_schedule(plan, rank, schedules).staleness for rank in range(plan.pipe)]
    if set(late) == {1}:
        return
    why = "has none that are late" if not any(late) else f"has stages that are late by {late}"
    raise ConfigError(
        f"optimizer.error_feedback = true corrects gradients that are late by one update, but "
        f'parallel.schedule = "{plan.schedule}" {why}: set optimizer.error_feedback = false, or '
        f'parallel.schedule = "two_bw"'
    )


def check_model(model: ModelSection, plan: Plan) -> None:
    """Refuse a model that does not fit the plan's axes."""
    blocks = num_blocks(model)
    num_stages = planned_stage_map(plan).num_stages if plan.pipe > 1 else 1
    if blocks is not None and num_stages > blocks:
        chunks = num_stages // plan.pipe
        raise LayoutError(
            f"parallel.pipe = {plan.pipe} makes {num_stages} stages"
            + (f" ({chunks} a rank under {plan.schedule})" if chunks > 1 else "")
            + f", but the model has {blocks} blocks: use at most {blocks} stages or raise "
            f"model.layers"
        )
    if blocks is not None and plan.stage_boundaries and plan.stage_boundaries[-1] >= blocks:
        raise LayoutError(
            f"parallel.stage_boundaries = {list(plan.stage_boundaries)} cuts after the last of "
            f"{blocks} blocks: the last cut must be below {blocks}"
        )


def check_steps(run: RunFile) -> None:
    """Refuse step numbers that contradict each other."""
    if run.train.stop_at > run.train.steps:
        raise LayoutError(
            f"train.stop_at = {run.train.stop_at} lies beyond train.steps = {run.train.steps}: "
            f"lower it, or set 0 to run to the end"
        )


def _gpt_shape(model: ModelSection, vocab_size: int, seq_len: int) -> GPTShape:
    if not model.head_size and model.hidden % model.heads:
        raise LayoutError(
            f"model.hidden = {model.hidden} is not a multiple of model.heads = {model.heads}: "
            f"change one of them, or set model.head_size"
        )
    return GPTShape(
        vocab_size=vocab_size,
        seq_len=seq_len,
        num_layers=model.layers,
        hidden=model.hidden,
        num_heads=model.heads,
        num_kv_heads=model.kv_heads or model.heads,
        head_size=model.head_size or model.hidden // model.heads,
        mlp_hidden=model.mlp_hidden or 4 * model.hidden,
        positions=model.positions,
        tied_embedding=model.tied_embedding,
        bias=model.bias,
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
    """Say how to get another number of processes, whoever starts them."""
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
