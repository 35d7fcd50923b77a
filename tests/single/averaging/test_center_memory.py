"""The memory of elastic averaging is what the cost model says: copies of the weights, counted."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ganglion import Plan
from ganglion.decide.costs.memory import StateRules, server_copies
from ganglion.decide.predict import predicted_memory, server_memory
from ganglion.decide.schedules.exchanges.served import EXCHANGE, PUSH
from ganglion.decide.topology import Mesh
from ganglion.execute.averaging.methods.packed import Packed
from ganglion.execute.averaging.served.rules import Additive, Elastic, Rule
from ganglion.execute.averaging.served.server import CenterServer
from ganglion.execute.averaging.served.shards import ShardedCenter
from ganglion.execute.comm import World, run_threads
from ganglion.execute.measure.memory import held_bytes
from ganglion.execute.train.averaged import AveragingSettings
from tests.support.training import SHAPES, Case, make_batches, make_run, share_of

CASE = Case(model="wide_gpt", num_steps=3, global_batch_size=12, averaging=AveragingSettings(tau=1))
DEADLINE_S = 20.0
SAMPLED_BYTES = 8 * 4096 * (1 + 3)  # by which a shared centre finds out what was lost
METHODS = {
    "sync_easgd": 2,
    "local_sgd": 2,
    "slow_momentum": 3,
    "diloco": 3,
    "original_easgd": 2,
    "async_easgd": 2,
    "async_measgd": 2,
    "async_sgd": 3,
    "async_msgd": 3,
    "hogwild_easgd": 1,
    "hogwild_sgd": 1,
}
SERVING = {"async_sgd": 2 + 3, "hogwild_easgd": 1, "hogwild_sgd": 1}
SYNCHRONOUS = ("sync_easgd", "local_sgd", "slow_momentum", "diloco")


def counted(world: World, plan: Plan) -> tuple[int, int]:
    """Return the bytes that averaging keeps on a rank, and those of a copy of its weights."""
    with make_run(world, plan, CASE) as run:
        list(run.steps(share_of(batch, world, plan) for batch in make_batches(CASE)))
        run.drain()
        held = held_bytes(run.tensors())
        (averaged,) = run._parts.averaged
        padded = averaged._packed.flat.nbytes
        run.world.barrier()
        return held["center"], padded


@pytest.mark.parametrize("axes", [{}, {"pipe": 2}], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_a_run_counts_what_the_model_predicts(method: str, axes: dict[str, int]) -> None:
    plan = Plan(data=3, averaging=method, microbatch_size=4, **axes)  # type: ignore[arg-type]
    mesh = plan.mesh()
    found = run_threads(mesh, lambda world: counted(world, plan), timeout_s=60.0)
    for rank, (held, padded) in enumerate(found):
        at = mesh.coordinates(rank)
        foretold = predicted_memory(SHAPES[CASE.model], plan, StateRules(), at.data)[at.pipe]
        copies = METHODS[method]
        if at.data == 0 and method not in SYNCHRONOUS:
            copies += SERVING.get(method, 3 + 3)
        assert foretold.center == copies * foretold.weights
        if at.data == 0 and method.startswith("hogwild"):
            held -= SAMPLED_BYTES
        # Headers of messages, and momentum that is not padded.
        assert held == pytest.approx(copies * padded, rel=0.02)


def served(rule: Rule, kind: str, num_workers: int, num_shards: int) -> list[int]:
    """Let every worker write once; return the copies of its part that each server keeps."""
    store, packed = dist.HashStore(), Packed(nn.Linear(64, 64))
    size = packed.numel // num_shards

    def body(world: World) -> int:
        if world.rank < num_shards:
            server = CenterServer(
                torch.zeros(size),
                rule if num_shards == 1 else type(rule)(),
                store,
                run_id="counted",
                num_workers=num_workers,
                shard=world.rank,
                timeout_s=DEADLINE_S,
            )
            server.serve()
            return round(held_bytes({"center": server.tensors()})["center"] / (4 * size))
        worker = world.rank - num_shards
        center = ShardedCenter(
            store,
            packed.flat,
            run_id="counted",
            worker=worker,
            num_shards=num_shards,
            timeout_s=DEADLINE_S,
        )
        center.join()
        center.ask(kind, step=0, rate=0.1)
        list(center.answers())
        center.leave()
        return 0

    return run_threads(Mesh(data=num_workers + num_shards), body, timeout_s=DEADLINE_S)[:num_shards]


@pytest.mark.parametrize(
    ("method", "rule", "kind"),
    [
        ("async_easgd", Elastic(), EXCHANGE),
        ("async_sgd", Additive(), PUSH),
        ("async_msgd", Additive(0.9), PUSH),
    ],
)
@pytest.mark.parametrize("num_workers", [1, 4])
def test_a_server_keeps_a_part_and_an_answer_for_each_worker(
    method: str, rule: Any, kind: str, num_workers: int
) -> None:
    plan = Plan(data=num_workers, averaging=method, servers=1)  # type: ignore[arg-type]
    assert served(rule, kind, num_workers, 1) == [server_copies(plan)]


def test_servers_share_the_centres_of_all_ranks_of_a_worker() -> None:
    plan = Plan(data=2, pipe=2, averaging="async_easgd", servers=2, num_microbatches=2)
    shape, options = SHAPES["gpt"], StateRules()
    workers = [predicted_memory(shape, plan, options, worker) for worker in (0, 1)]
    assert workers[0] == workers[1], "who has servers does not serve"
    assert all(rank.center == 2 * rank.weights for rank in workers[0])
    one = server_memory(shape, plan, options)
    whole = sum(rank.weights for rank in workers[0])
    assert one.center == (3 + 2) * whole // 2
    assert one.weights == one.gradients == 0
    alone = dataclasses.replace(plan, servers=1)
    assert server_memory(shape, alone, options).center == 2 * one.center
    assert served(Elastic(), EXCHANGE, 2, 2) == [server_copies(plan)] * 2
