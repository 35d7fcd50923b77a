"""Tensor axes over real processes: a dozen layouts equal the serial model.

The matrix of all layouts runs as threads (tests/single/tensor/test_tensor_training.py).
"""

from __future__ import annotations

import dataclasses

import pytest

from ganglion import Plan
from ganglion.execute.comm import World, torch_world
from tests.support.harness import Ranks
from tests.support.pipelines import delayed
from tests.support.serial import TOLERANCE, assert_same_by_name
from tests.support.tensors import SETTINGS, Held, whole
from tests.support.training import Case, train_serial, train_split_at_once

CASE = Case(model="wide_gpt", max_grad_norm=0.5)
CELLS = [
    ({"x": 2}, "shm", "overlapped"),
    ({"y": 2}, "shm", "overlapped"),
    ({"z": 2}, "shm", "overlapped"),
    ({"z": 2}, "torch", "overlapped"),
    ({"z": 2}, "shm", "kept"),
    ({"x": 2, "y": 2}, "shm", "overlapped"),
    ({"x": 2, "z": 2}, "torch", "overlapped"),
    ({"y": 2, "z": 2}, "shm", "waiting"),
    ({"z": 2, "data": 2}, "shm", "overlapped"),
    ({"x": 2, "data": 2}, "torch", "overlapped"),
    ({"x": 2, "pipe": 2}, "shm", "overlapped"),
    ({"z": 2, "pipe": 2, "schedule": "message_driven"}, "shm", "overlapped"),
    ({"y": 2, "pipe": 2, "schedule": "two_bw"}, "shm", "overlapped"),
    ({"z": 2, "pipe": 2, "schedule": "two_bw"}, "torch", "kept"),
]


def train_on(world: World, plan: Plan, case: Case, transport: str) -> Held:
    own = torch_world(world.rank, plan.mesh(), timeout_s=30.0, transport=transport)
    return train_split_at_once(own, plan, case)


def _sized(fields: dict[str, object], case: Case) -> Plan:
    plan = Plan(**fields, num_microbatches=4 if fields.get("pipe") else 2)  # type: ignore[arg-type]
    size = case.global_batch_size // (plan.num_shares * plan.num_microbatches)
    return dataclasses.replace(plan, microbatch_size=size)


@pytest.mark.parametrize(("fields", "transport", "settings"), CELLS, ids=str)
def test_processes_equal_serial(
    ranks: Ranks, fields: dict[str, object], transport: str, settings: str
) -> None:
    check(ranks, fields, transport, dataclasses.replace(CASE, tensor=SETTINGS[settings]))


@pytest.mark.parametrize(
    ("fields", "transport"),
    [
        ({"x": 2, "z": 2}, "shm"),
        ({"y": 2, "pipe": 2}, "torch"),
        ({"z": 2, "pipe": 2, "schedule": "two_bw"}, "shm"),
    ],
    ids=str,
)
def test_muon_gathers_matrices_between_processes(
    ranks: Ranks, fields: dict[str, object], transport: str
) -> None:
    check(ranks, fields, transport, dataclasses.replace(CASE, optimizer="muon"))


def check(ranks: Ranks, fields: dict[str, object], transport: str, case: Case) -> None:
    plan = _sized(fields, case)
    wanted = delayed(case) if plan.schedule == "two_bw" else train_serial(case)
    held = ranks.run(plan.num_ranks, train_on, plan, case, transport)
    relative = TOLERANCE[case.dtype][0]
    for rank in held:
        assert rank.history.losses == pytest.approx(wanted.losses, rel=relative)
        assert rank.history.norms == pytest.approx(wanted.norms, rel=relative)
    assert_same_by_name(whole(held, [rank.history.weights for rank in held]), wanted.weights)
