"""One rank of `ganglion verify`: trains as `ganglion train` does, but in fp64, and saves."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import torch
from torch import Tensor

from ganglion.cli.environment import cache_folder, cores_per_rank, log_to_file, log_to_screen
from ganglion.cli.folder import read_folder
from ganglion.cli.launch.rank_server import accept_signals
from ganglion.decide.config import CHECKPOINTS, LOGS, RunFile
from ganglion.decide.plan import Plan
from ganglion.decide.topology import Launch, read_launch
from ganglion.execute.checkpoint import TrainingNumbers
from ganglion.execute.comm import World, open_world
from ganglion.execute.device import pick_device
from ganglion.execute.models import loss_function, named_parameters
from ganglion.execute.train import open_source, outline_blocks, parallelize_file

logger = logging.getLogger(__name__)

DTYPE = torch.float64


def train_in_double(folder: Path, launch: Launch) -> None:
    """Train the run of a prepared folder; write its weights and numbers into the folder."""
    file, plan = read_folder(folder)
    log_to_file(folder / LOGS / f"rank{launch.rank}.log")
    torch.set_num_threads(file.train.threads or cores_per_rank(launch.local_num_ranks))
    logger.info("rank %d of %d, plan %s", launch.rank, launch.num_ranks, plan)
    world = open_world(
        launch, plan.mesh(), timeout_s=file.train.timeout_s, transport=file.parallel.transport
    )
    numbers = _train(file, plan, world, launch, folder)
    if launch.rank == 0:
        numbers.write(folder)


def _train(
    file: RunFile, plan: Plan, world: World, launch: Launch, folder: Path
) -> TrainingNumbers:
    source = open_source(file, cache_folder())
    blocks, initial = outline_blocks(file, plan, source.num_classes, source.input_shape)
    blocks = {name: block.to(DTYPE) for name, block in blocks.items()}
    names = list(named_parameters(blocks))
    loss_fn, device = loss_function(file.model.loss), pick_device(launch.local_rank)
    parts = (blocks, initial, loss_fn, None, folder)
    with parallelize_file(file, plan, world, device, *parts) as run:
        batches = ((_wide(x), _wide(y)) for x, y in run.batches(source.train))
        results = list(run.steps(batches, until=file.train.stop_at))
        run.save(folder / CHECKPOINTS, keep=1)
    return TrainingNumbers([r.loss for r in results], [r.grad_norm for r in results], names)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(DTYPE) if tensor.is_floating_point() else tensor


def main(folder: str, log_level: str, _resume: str) -> None:
    """Train as a rank that `ganglion verify` started."""
    accept_signals()
    log_to_screen(log_level, sys.stdout)
    train_in_double(Path(folder), read_launch(os.environ))
