"""Part `torchft` of the averaging benchmark: local SGD and DiLoCo against those of torchft.

Two real processes, each a replica group of its own to torchft, whose quorum server runs in the
first. The same batches, inner optimizer and falling rate as in part `ddp`; without torchft the part
has no rows, and its note says why.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.averaging.real import (
    NUM_RANKS,
    TIMEOUT_S,
    DdpTask,
    RealRow,
    Trial,
    build_trial,
    trial_rows,
)
from benchmarks.averaging.training import Images
from benchmarks.harness import Contestant, Figures
from ganglion.execute.averaging import ElasticAverage, diloco, local_sgd
from ganglion.execute.comm import World

TAU = 10
PAIRS = {"local_sgd_10": "torchft_local_sgd_10", "diloco_10": "torchft_diloco_10"}


def missing() -> str:
    """Return why torchft cannot be used; nothing if it can."""
    try:
        importlib.import_module("torchft.local_sgd")
    except ImportError as error:
        return f"torchft is left out: {error}"
    return ""


def ours(outer: Callable[[], Any], trial: Trial, held_out: Images, world: World) -> Figures:
    """Train with an outer optimizer of ours, and look at the centre."""
    average = ElasticAverage(trial.model, trial.optimizer, outer=outer(), tau=TAU, world=world)
    with average:
        taken = trial.train(trial.model)
    with average.center_weights():
        accuracy = trial.accuracy(held_out)
    average.close()
    return {**taken, "accuracy": accuracy}


def theirs(is_diloco: bool, trial: Trial, held_out: Images, world: World) -> Figures:
    """Train with torchft; after the last exchange all workers are at the mean, or the centre."""
    from torchft.local_sgd import DiLoCo, LocalSGD

    with _manager(trial, world) as manager:
        if is_diloco:
            outer = torch.optim.SGD(trial.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
            around: Any = DiLoCo(manager, [trial.model], trial.optimizer, outer, sync_every=TAU)
        else:
            around = LocalSGD(manager, trial.model, trial.optimizer, sync_every=TAU)
        with around:
            taken = trial.train(trial.model)
        return {**taken, "accuracy": trial.accuracy(held_out)}


@contextmanager
def _manager(trial: Trial, world: World) -> Iterator[Any]:
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer

    lighthouse = None
    if world.rank == 0:
        lighthouse = LighthouseServer(bind="[::]:0", min_replicas=NUM_RANKS)
    address = world.broadcast_text("" if lighthouse is None else lighthouse.address())
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    timeout = timedelta(seconds=TIMEOUT_S)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        min_replica_size=NUM_RANKS,
        load_state_dict=trial.model.load_state_dict,
        state_dict=trial.model.state_dict,
        use_async_quorum=False,
        timeout=timeout,
        quorum_timeout=timeout,
        replica_id=f"worker{world.rank}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        hostname="localhost",
        lighthouse_addr=address,
        init_sync=False,  # all begin with the same weights
    )
    try:
        yield manager
    finally:
        world.barrier()
        manager.shutdown(wait=False)
        if lighthouse is not None:
            lighthouse.shutdown()


CONTESTANTS = [
    Contestant(
        "local_sgd_10",
        NUM_RANKS,
        partial(build_trial, partial(ours, local_sgd)),
        ratio_to="torchft_local_sgd_10",
    ),
    Contestant("torchft_local_sgd_10", NUM_RANKS, partial(build_trial, partial(theirs, False))),
    Contestant(
        "diloco_10",
        NUM_RANKS,
        partial(build_trial, partial(ours, diloco)),
        ratio_to="torchft_diloco_10",
    ),
    Contestant("torchft_diloco_10", NUM_RANKS, partial(build_trial, partial(theirs, True))),
]


def torchft_rows(task: DdpTask, rounds: int) -> list[RealRow]:
    """Measure samples a second, and accuracy after as many samples; nothing without torchft."""
    return [] if missing() else trial_rows("torchft", CONTESTANTS, task, rounds)
