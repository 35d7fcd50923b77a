"""From ordinary blocks to a parallel run: the steps, one after the other."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ganglion.comm import World, open_world, plain_group
from ganglion.errors import ConfigError
from ganglion.gradients import GradientReducer
from ganglion.models import Blocks, LossFn, named_blocks, named_buffers, named_parameters
from ganglion.plan import Plan
from ganglion.topology import read_launch
from ganglion.trace import Recorder
from ganglion.train.device import pick_device
from ganglion.train.host_memory import keep_freed_memory
from ganglion.train.learning_rate import LrFactor, constant
from ganglion.train.optimizers import OptimizerFactory, build_optimizers
from ganglion.train.parts import RunParts
from ganglion.train.replica import Replica
from ganglion.train.run import Run
from ganglion.units import MIB


def parallelize(
    blocks: Blocks,
    loss_fn: LossFn,
    optimizer_factory: OptimizerFactory,
    plan: Plan,
    *,
    max_grad_norm: float = 0.0,
    lr_factor: LrFactor = constant,
    seed: int = 0,
    world: World | None = None,
    device: torch.device | None = None,
    recorder: Recorder | None = None,
    overlap: bool = True,
    bucket_mib: float = 25.0,
    timeout_s: float = 300.0,
) -> Run:
    """Return a run that trains `blocks`, in order, under `plan`.

    Call it on every process, alone or under torchrun or srun. `loss_fn(output, target)` returns
    the mean loss of a microbatch. `optimizer_factory` gets (name, parameter) pairs after the model
    has been placed. The learning rate of update `step` is the optimizer's own times
    `lr_factor(step)`. Without a `world`, the other processes are met through the launcher's
    environment.
    """
    plan.require_built()
    launch = read_launch(os.environ)
    world = open_world(launch, plan.mesh(), timeout_s=timeout_s) if world is None else world
    device = pick_device(launch.local_rank) if device is None else device
    recorder = Recorder(world.rank, enabled=False) if recorder is None else recorder
    world.record_in(recorder)
    keep_freed_memory()
    named = {name: block.to(device) for name, block in named_blocks(blocks).items()}
    parameters, buffers = named_parameters(named), named_buffers(named)
    _same_start({**parameters, **buffers}, world)
    reducer = GradientReducer(
        parameters,
        plain_group(world.group("data")),
        recorder,
        bucket_bytes=int(bucket_mib * MIB),
        overlap=overlap,
    )
    parts = RunParts(
        plan=plan,
        world=world,
        device=device,
        parameters=parameters,
        buffers=buffers,
        replica=Replica(named, loss_fn, plan, device, reducer, recorder),
        reducer=reducer,
        optimizers=build_optimizers(optimizer_factory, _trainable(parameters)),
        recorder=recorder,
        max_grad_norm=max_grad_norm,
        lr_factor=lr_factor,
        seed=seed,
    )
    return Run(parts)


def _same_start(tensors: Mapping[str, Tensor], world: World) -> None:
    """Give every replica the weights of the first one, however each was initialised."""
    group = world.group("data")
    for tensor in tensors.values():
        group.broadcast(tensor.detach()).wait()


def _trainable(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    trainable = {name: p for name, p in parameters.items() if p.requires_grad}
    if not trainable:
        raise ConfigError("the blocks have no trainable parameter; check requires_grad")
    return trainable
