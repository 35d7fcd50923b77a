"""From ordinary blocks to a parallel run: the steps, one after the other.

With tensor axes, known models are split as such; `cuts` tell how to split others, whose linear
layers else take and return whole activations; `tensor` switches overlaps. Blocks on the meta device
need `initial` weights: every rank makes its own piece; others begin as on rank 0. A plan with
`averaging` trains its replicas as workers; the settings of that name say how they exchange. A plan
with `offload` keeps optimizer state on a tier; those settings say where and in which buckets; those
of `activations` say where a plan with `offload_activations` puts them.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ganglion.decide.config import check_error_feedback, check_precision, verdict_delay
from ganglion.decide.plan import FP16_MASTER, Plan
from ganglion.decide.schedules import LossScale
from ganglion.decide.schedules.pipeline import BUILT_IN, Registry, check_planned, planned_schedule
from ganglion.decide.topology import AXES, Launch, ModelCuts, read_launch
from ganglion.errors import ConfigError
from ganglion.execute.averaging import own_address
from ganglion.execute.comm import World, open_world
from ganglion.execute.data import share_index
from ganglion.execute.device import pick_device
from ganglion.execute.gradients import GradientReducer
from ganglion.execute.measure import (
    Sample,
    agreed_costs,
    guessed_costs,
    keep_freed_memory,
    measured_costs,
    return_large_blocks,
)
from ganglion.execute.models import (
    Blocks,
    InitialWeights,
    LossFn,
    check_memory,
    named_blocks,
    named_buffers,
    named_parameters,
)
from ganglion.execute.pipeline import (
    BuildContext,
    LocalModel,
    RandomStream,
    Splitting,
    WidenedCall,
    build_pipeline,
    choose_kept,
    make_blocks_real,
    plain_call,
    share_pieces,
    split_blocks,
)
from ganglion.execute.tensor import TensorSettings
from ganglion.execute.train.async_workers import step_group, worker_executor
from ganglion.execute.train.averaged import Averaged, AveragingSettings, all_are_made, average
from ganglion.execute.train.offloaded_activations import ActivationSettings, offload_activations
from ganglion.execute.train.parts import RunParts
from ganglion.execute.train.replica import Replica, autocast
from ganglion.execute.train.replica_executor import ReplicaExecutor
from ganglion.execute.train.run import Run
from ganglion.execute.train.servers import store_of, workers_of
from ganglion.execute.update import (
    BatchEnd,
    GradientPolicy,
    LrFactor,
    OffloadSettings,
    OptimizerFactory,
    RateSetter,
    WideLoss,
    constant,
)
from ganglion.trace import Recorder
from ganglion.units import MIB


def parallelize(
    blocks: Blocks,
    loss_fn: LossFn,
    optimizer_factory: OptimizerFactory,
    plan: Plan,
    *,
    max_grad_norm: float = 0.0,
    error_feedback: bool = False,
    lr_factor: LrFactor = constant,
    seed: int = 0,
    world: World | None = None,
    device: torch.device | None = None,
    recorder: Recorder | None = None,
    overlap: bool = True,
    bucket_mib: float = 25.0,
    timeout_s: float = 300.0,
    sample: Sample | None = None,
    schedules: Registry = BUILT_IN,
    cuts: ModelCuts | None = None,
    tensor: TensorSettings | None = None,
    initial: InitialWeights | None = None,
    averaging: AveragingSettings | None = None,
    offload: OffloadSettings | None = None,
    activations: ActivationSettings | None = None,
    keep_freed: bool = True,
) -> Run:
    """Return a run that trains `blocks`, in order, under `plan`.

    Call it on every process, alone or under torchrun or srun; without a `world`, the others are met
    through the launcher's environment. `loss_fn(output, target)` returns the mean loss of a
    microbatch. `optimizer_factory` gets (name, parameter) pairs of the placed model; the rate of
    update `step` is the optimizer's own times `lr_factor(step)`. `error_feedback` corrects updates
    from late gradients (schedule two_bw). `schedules` knows the plan's schedule by name. With a
    `sample`, one microbatch, the stages of a pipeline are cut by measured times; without, by their
    weights. The top of this file tells of `cuts`, `tensor`, `initial`, `averaging`, `offload` and
    `activations`. With `keep_freed` host memory that was freed stays with the process, which is
    quicker.
    """
    plan = _checked(plan, schedules, error_feedback)
    launch = read_launch(os.environ)
    world = _meet(launch, plan, timeout_s) if world is None else world
    device = pick_device(launch.local_rank) if device is None else device
    placed = _placed(named_blocks(blocks), device, initial)
    recorder = _recorder(world, recorder)
    averages = _Averages(
        plan, world, _reachable(averaging or AveragingSettings(), launch, plan, timeout_s)
    )
    context = BuildContext(
        blocks=placed,
        loss_fn=loss_fn,
        optimizer_factory=optimizer_factory,
        plan=plan,
        schedules=schedules,
        world=world,
        device=device,
        recorder=recorder,
        stream=_stream(seed, world, plan),
        autocast=lambda: autocast(plan.precision, device),
        bucket_bytes=int(bucket_mib * MIB),
        max_grad_norm=max_grad_norm,
        error_feedback=error_feedback,
        timeout_s=timeout_s,
        initial=_agreed(initial, world),
        average=averages,
        policy=GradientPolicy(max_grad_norm),
        call=plain_call,
        offload=offload or OffloadSettings(),
        activations=offload_activations(
            plan, activations or ActivationSettings(), device, timeout_s
        ),
    )
    _same_start(context)
    context = dataclasses.replace(context, costs=_costs(context, sample))
    context, splitting = split_blocks(context, cuts, tensor or TensorSettings())
    _tune_heap(plan, keep_freed)
    context, scaling = _in_precision(context, splitting)
    return _build(context, splitting, scaling, averages, lr_factor, overlap, seed)


def _checked(plan: Plan, schedules: Registry, error_feedback: bool) -> Plan:
    """Return the plan with its schedule's own name; refuse what cannot run."""
    plan.require_built()
    if plan.recompute == "budget":
        raise ConfigError(
            'a plan with recompute = "budget" is not decided yet: `ganglion train` decides it from '
            'a run file; give recompute = "blocks" and recompute_blocks = ("1", "3-4"), say'
        )
    plan = dataclasses.replace(plan, schedule=schedules.canonical(plan.schedule))
    check_planned(plan, schedules)
    check_error_feedback(error_feedback, plan, schedules)
    check_precision(error_feedback, plan, schedules)
    return plan


def _meet(launch: Launch, plan: Plan, timeout_s: float) -> World:
    """Return the world of the processes of a launch; its servers, if any, stay outside."""
    among, alone = workers_of(launch, plan), plan.servers > 0
    return open_world(among, plan.mesh(), timeout_s=timeout_s, meets_alone=alone)


def _reachable(
    settings: AveragingSettings, launch: Launch, plan: Plan, timeout_s: float
) -> AveragingSettings:
    """Return the settings with where workers and servers find each other, unless they know."""
    if settings.store is not None:
        return dataclasses.replace(settings, timeout_s=timeout_s)
    return dataclasses.replace(
        settings,
        store=store_of(launch, plan, timeout_s),
        listen_on=own_address(launch),
        timeout_s=timeout_s,
    )


class _Averages:
    """Averages parts of a model with those of other workers, and lists what was `made`."""

    def __init__(self, plan: Plan, world: World, settings: AveragingSettings) -> None:
        self._plan, self._world, self.settings = plan, world, settings
        self.made: list[Averaged] = []

    def __call__(
        self, tensors: Mapping[str, Tensor], optimizers: Sequence[Optimizer], position: int
    ) -> Averaged | None:
        found = average(tensors, optimizers, self._plan, self._world, self.settings, position)
        self.made += [] if found is None else [found]
        return found


def _tune_heap(plan: Plan, keep_freed: bool) -> None:
    """Keep freed host memory warm, unless memory is what the run is short of."""
    if keep_freed and plan.offload == "none":
        keep_freed_memory()
    else:
        return_large_blocks()


def _in_precision(
    context: BuildContext, splitting: Splitting
) -> tuple[BuildContext, LossScale | None]:
    """Return the context as the plan's precision computes, and the scale of its loss."""
    plan, scaling, call = context.plan, None, context.call
    if not plan.has_masters:
        return context, None
    if plan.precision == FP16_MASTER:
        scaling = LossScale(delay=verdict_delay(plan, context.schedules))
    if plan.compute_fp32:
        # Layers with stored weights widen them themselves, once they are gathered.
        call = WidenedCall() if splitting.weights is None else WidenedCall(splitting.weights.holds)
    policy = GradientPolicy(context.max_grad_norm, scaling)
    loss_fn = WideLoss(context.loss_fn)
    return dataclasses.replace(context, policy=policy, call=call, loss_fn=loss_fn), scaling


def _costs(context: BuildContext, sample: Sample | None) -> list[float]:
    """Return what each block costs: measured, if that is asked for and matters.

    Whole blocks are measured, for split ones meet other ranks inside.
    """
    blocks, plan = context.blocks, context.plan
    if sample is None or plan.pipe == 1 or plan.stage_boundaries:
        return guessed_costs(blocks)
    inputs, targets = sample[0].to(context.device), sample[1].to(context.device)
    measured = measured_costs(blocks, context.loss_fn, (inputs, targets), context.autocast)
    return agreed_costs(context.world, measured)


def _recorder(world: World, recorder: Recorder | None) -> Recorder:
    """Return where the run is recorded: nowhere, unless a recorder is given."""
    recorder = Recorder(world.rank, enabled=False) if recorder is None else recorder
    world.record_in(recorder)
    return recorder


def _stream(seed: int, world: World, plan: Plan) -> RandomStream:
    """Return the random numbers of this rank's microbatches, counted over the global batch."""
    return RandomStream(seed, share_index(world.coordinates, world.mesh) * plan.num_microbatches)


def _build(
    context: BuildContext,
    splitting: Splitting,
    scaling: LossScale | None,
    averages: _Averages,
    lr_factor: LrFactor,
    overlap: bool,
    seed: int,
) -> Run:
    """Join the parts that the plan calls for."""
    plan, rate = context.plan, RateSetter(lr_factor)
    context = dataclasses.replace(context, among=step_group(context.world, plan))
    # One stage that flushes is plain training; one that does not has a delay of its own.
    whole = plan.pipe == 1 and planned_schedule(plan, 0, context.schedules).flushes
    local = (
        _replica(context, splitting, rate, overlap)
        if whole
        else build_pipeline(context, splitting, rate)  # its reductions always overlap
    )
    rate.take(local.optimizers)
    all_are_made(plan, context.world, averages.settings)
    return Run(
        RunParts(
            plan=local.plan,
            world=context.world,
            device=context.device,
            parameters=local.parameters,
            buffers=named_buffers({name: context.blocks[name] for name in local.block_names}),
            executor=worker_executor(local.executor, context.world, plan),
            updates=local.updates,
            feedback=local.feedback,
            recorder=context.recorder,
            seed=seed,
            placements=splitting.placements,
            tensor_report=splitting.report,
            averaged=averages.made,
            scaling=scaling,
        )
    )


def _replica(
    context: BuildContext, splitting: Splitting, rate: RateSetter, overlap: bool
) -> LocalModel:
    """Return the executor of a whole model on this rank."""
    make_blocks_real(context, splitting, context.blocks)
    parameters = named_parameters(context.blocks)
    _check_trainable(parameters)
    stored = context.updates.store(context.blocks.values(), parameters)
    share_pieces(context, splitting, parameters, wholly=True)
    choose_kept(context, splitting, context.blocks)
    reducer = GradientReducer(
        parameters,
        splitting.reach,
        context.recorder,
        bucket_bytes=context.bucket_bytes,
        overlap=overlap,
        late=splitting.weights,
    )
    update = context.updates.make(stored, reducer.buckets)
    plan, device, recorder = context.plan, context.device, context.recorder
    tensors = {**parameters, **named_buffers(context.blocks)}
    averaged = context.average(tensors, update.optimizers, 0)
    replica = Replica(
        context.blocks,
        context.loss_fn,
        plan,
        device,
        reducer,
        recorder,
        context.stream,
        splitting,
        context.call,
        context.activations,
    )
    executor = ReplicaExecutor(
        context.world,
        replica,
        reducer,
        update,
        recorder,
        end=BatchEnd(context.policy, rate.set),
        device=device,
        norm_group=splitting.norm_group,
        averaged=averaged,
        among=context.among,
    )
    return LocalModel(
        executor=executor,
        parameters=parameters,
        updates=[update],
        block_names=tuple(context.blocks),
        plan=plan,
    )


def _placed(
    blocks: Mapping[str, nn.Module], device: torch.device, initial: InitialWeights | None
) -> dict[str, nn.Module]:
    """Return the blocks on the device; those without memory get it once they are split."""
    check_memory(blocks, initial)
    if initial is not None:
        return dict(blocks)
    return {name: block.to(device) for name, block in blocks.items()}


def _agreed(initial: InitialWeights | None, world: World) -> InitialWeights | None:
    """Let all ranks draw with the seed of the first: one may have drawn its own."""
    if initial is None:
        return None
    return dataclasses.replace(initial, seed=int(world.broadcast_text(str(initial.seed))))


def _same_start(context: BuildContext) -> None:
    """Give every rank the weights of the first, unless each makes its own piece of them."""
    if context.initial is not None:
        return
    tensors = {**named_parameters(context.blocks), **named_buffers(context.blocks)}
    for tensor in tensors.values():
        for axis in AXES:
            context.world.group(axis).broadcast(tensor.detach()).wait()


def _check_trainable(parameters: Mapping[str, nn.Parameter]) -> None:
    if not any(p.requires_grad for p in parameters.values()):
        raise ConfigError("the blocks have no trainable parameter; check requires_grad")
