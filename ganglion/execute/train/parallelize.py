"""From ordinary blocks to a parallel run: place, split, choose the precision, build, run."""

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
from ganglion.decide.schedules.pipeline import check_planned, planned_schedule
from ganglion.decide.topology import AXES, Launch, read_launch
from ganglion.errors import ConfigError
from ganglion.execute.averaging import own_address
from ganglion.execute.comm import World, open_world
from ganglion.execute.data import share_index
from ganglion.execute.device import pick_device
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
from ganglion.execute.offload import ActivationOffload, open_activation_tier
from ganglion.execute.pipeline import (
    BuildContext,
    LocalModel,
    RandomStream,
    Splitting,
    WidenedCall,
    build_pipeline,
    plain_call,
    split_blocks,
)
from ganglion.execute.tensor import TensorSettings
from ganglion.execute.train.async_workers import step_group, store_of, worker_executor, workers_of
from ganglion.execute.train.averaged import Averaged, AveragingSettings, all_are_made, average
from ganglion.execute.train.parts import RunParts
from ganglion.execute.train.replica_executor import build_replica
from ganglion.execute.train.run import Run
from ganglion.execute.train.settings import ActivationSettings, RunSettings
from ganglion.execute.update import (
    GradientPolicy,
    OptimizerFactory,
    RateSetter,
    UpdateFactory,
    WideLoss,
    autocast,
)
from ganglion.trace import Recorder
from ganglion.units import MIB


def parallelize(
    blocks: Blocks,
    loss_fn: LossFn,
    optimizer_factory: OptimizerFactory,
    plan: Plan,
    settings: RunSettings = RunSettings(),
    *,
    world: World | None = None,
    device: torch.device | None = None,
    recorder: Recorder | None = None,
) -> Run:
    """Return a run that trains `blocks`, in order, under `plan`.

    Call it on every process, alone or under torchrun or srun; without a `world`, the others are met
    through the launcher's environment. `loss_fn(output, target)` returns the mean loss of a
    microbatch. `optimizer_factory` gets (name, parameter) pairs of the placed model.
    """
    plan = _checked(plan, settings)
    launch = read_launch(os.environ)
    world = _meet(launch, plan, settings.timeout_s) if world is None else world
    device = pick_device(launch.local_rank) if device is None else device
    placed = _placed(named_blocks(blocks), device, settings.initial)
    recorder = _recorder(world, recorder)
    averages = _Averages(plan, world, _reachable(settings, launch, plan))
    context = BuildContext(
        blocks=placed,
        loss_fn=loss_fn,
        plan=plan,
        schedules=settings.schedules,
        world=world,
        device=device,
        recorder=recorder,
        stream=_stream(settings.seed, world, plan),
        autocast=lambda: autocast(plan.precision, device),
        bucket_bytes=int(plan.bucket_mib * MIB),
        max_grad_norm=settings.max_grad_norm,
        error_feedback=settings.error_feedback,
        timeout_s=settings.timeout_s,
        initial=_agreed(settings.initial, world),
        average=averages,
        policy=GradientPolicy(settings.max_grad_norm),
        call=plain_call,
        updates=UpdateFactory(
            plan=plan,
            optimizer_factory=optimizer_factory,
            offload_dir=settings.offload_dir,
            device=device,
            recorder=recorder,
            timeout_s=settings.timeout_s,
        ),
        activations=_activations(plan, settings, device),
    )
    _same_start(context)
    context = dataclasses.replace(context, costs=_costs(context, settings.sample))
    tensor = settings.tensor or TensorSettings.of(plan)
    context, splitting = split_blocks(context, settings.cuts, tensor)
    _tune_heap(plan, settings.keep_freed)
    context, scaling = _in_precision(context, splitting)
    rate = RateSetter(settings.lr_factor)
    local = _build(context, splitting, rate)
    all_are_made(plan, world, averages.settings)
    return _joined(context, splitting, local, averages, scaling, settings.seed)


def _checked(plan: Plan, settings: RunSettings) -> Plan:
    """Return the plan with its schedule's own name; refuse what cannot run."""
    schedules, error_feedback = settings.schedules, settings.error_feedback
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


def _reachable(settings: RunSettings, launch: Launch, plan: Plan) -> AveragingSettings:
    """Return the averaging settings, with the store and address of servers filled in."""
    asked, timeout_s = settings.averaging or AveragingSettings(), settings.timeout_s
    if asked.store is not None:
        return dataclasses.replace(asked, timeout_s=timeout_s)
    return dataclasses.replace(
        asked,
        store=store_of(launch, plan, timeout_s),
        listen_on=own_address(launch),
        timeout_s=timeout_s,
    )


def _activations(
    plan: Plan, settings: RunSettings, device: torch.device
) -> ActivationOffload | None:
    """Return what moves the activations of this rank; None if they stay."""
    if plan.offload_activations == "none":
        return None
    asked = settings.activations or ActivationSettings()
    tier = open_activation_tier(plan.offload_activations, asked.folder, device, settings.timeout_s)
    return ActivationOffload(tier, min_bytes=asked.min_bytes)


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


def _build(context: BuildContext, splitting: Splitting, rate: RateSetter) -> LocalModel:
    """Return this rank's part of the model: a whole replica, or stages of a pipeline."""
    plan = context.plan
    context = dataclasses.replace(context, among=step_group(context.world, plan))
    # One stage that flushes is plain training; one that does not has a delay of its own.
    if plan.pipe == 1 and planned_schedule(plan, 0, context.schedules).flushes:
        local = build_replica(context, splitting, rate)
    else:
        local = build_pipeline(context, splitting, rate)  # its reductions always overlap
    rate.take([optimizer for update in local.updates for optimizer in update.optimizers])
    return local


def _joined(
    context: BuildContext,
    splitting: Splitting,
    local: LocalModel,
    averages: _Averages,
    scaling: LossScale | None,
    seed: int,
) -> Run:
    """Return the run of the model that this rank holds."""
    return Run(
        RunParts(
            plan=local.plan,
            world=context.world,
            device=context.device,
            parameters=local.parameters,
            buffers=named_buffers({name: context.blocks[name] for name in local.block_names}),
            executor=worker_executor(local.executor, context.world, context.plan),
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
