"""Offloaded training equals resident training bit by bit, in every kind of layout."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from ganglion import Plan
from ganglion.execute.comm import World, run_threads
from ganglion.trace import HOST, Event, Recorder
from tests.support.covering import by_name, cells
from tests.support.serial import History, assert_same_by_name, copies
from tests.support.training import Case, make_batches, make_run, share_of

pytestmark = pytest.mark.timeout(120)

LAYOUTS = {
    "alone": Plan(num_microbatches=2),
    "data": Plan(data=2),
    "gpipe": Plan(pipe=2, num_microbatches=2, schedule="gpipe"),
    "one_f_one_b": Plan(pipe=2, data=2, num_microbatches=2),
    "interleaved": Plan(pipe=2, num_microbatches=2, schedule="interleaved"),
    "message_driven": Plan(pipe=2, num_microbatches=2, schedule="message_driven"),
    "two_bw": Plan(pipe=2, num_microbatches=2, schedule="two_bw"),
    "stash": Plan(pipe=2, num_microbatches=2, schedule="stash"),
    "x": Plan(x=2),
    "z": Plan(z=2),
    "x z pipe": Plan(x=2, z=2, pipe=2, num_microbatches=2, schedule="two_bw"),
}
PRECISIONS = ("fp32", "bf16_master", "fp16_master")


def sized(plan: Plan, case: Case) -> Plan:
    """Return the plan with the microbatches of the case."""
    shares = plan.num_microbatches * plan.data * plan.z
    return dataclasses.replace(plan, microbatch_size=case.global_batch_size // shares)


def trained(world: World, plan: Plan, case: Case) -> History:
    """Train all batches in one go, and return what happened; the run is closed."""
    run, history = make_run(world, plan, case), History()
    for result in run.steps(share_of(batch, world, plan) for batch in make_batches(case)):
        history.losses.append(result.loss)
        history.norms.append(result.grad_norm)
    history.weights = copies(run.model_tensors())
    run.close()
    return history


def assert_offloaded_equals_resident(plan: Plan, case: Case, folder: Path, tier: str) -> None:
    moved = dataclasses.replace(plan, offload=tier)
    moved_case = dataclasses.replace(case, offload_dir=folder, bucket_size=2048)
    expected = run_threads(plan.mesh(), lambda world: trained(world, plan, case))
    found = run_threads(plan.mesh(), lambda world: trained(world, moved, moved_case))
    for one, other in zip(found, expected, strict=True):
        assert one.losses == other.losses
        assert one.norms == other.norms
        assert_same_by_name(one.weights, other.weights, exactly=True)
    assert not list(folder.iterdir())


def is_built(layout: str, precision: str) -> bool:
    """Say what is not refused: a bad step cannot be skipped where stages update one by one."""
    return (layout, precision) != ("stash", "fp16_master")


@cells(layout=by_name(LAYOUTS), precision=PRECISIONS, only=is_built)
def test_every_layout(layout: str, precision: str, tmp_path: Path) -> None:
    clips = layout not in ("stash", "data")
    case = Case(
        model="wide_tied" if layout in ("interleaved", "two_bw") else "wide_mlp",
        dtype=torch.float32,
        num_steps=3,
        max_grad_norm=0.5 if clips else 0.0,
        bucket_mib=0.02,
    )
    plan = dataclasses.replace(sized(LAYOUTS[layout], case), precision=precision)
    assert_offloaded_equals_resident(plan, case, tmp_path, "disk")


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
def test_twenty_steps_of_two_replicas(optimizer: str, max_grad_norm: float, tmp_path: Path) -> None:
    case = Case(
        model="wide_mlp",
        optimizer=optimizer,
        dtype=torch.float32,
        num_steps=20,
        max_grad_norm=max_grad_norm,
        bucket_mib=0.02,
    )
    assert_offloaded_equals_resident(sized(LAYOUTS["data"], case), case, tmp_path, "disk")


def test_error_feedback_and_averaging(tmp_path: Path) -> None:
    late = Case(dtype=torch.float32, num_steps=6, error_feedback=True)
    assert_offloaded_equals_resident(sized(LAYOUTS["two_bw"], late), late, tmp_path, "disk")
    case = Case(dtype=torch.float32, num_steps=6)
    plan = sized(Plan(data=2, averaging="local_sgd"), case)
    assert_offloaded_equals_resident(plan, case, tmp_path, "disk")


@pytest.mark.parametrize("layout", ["data", "two_bw"])
def test_the_host_tier(layout: str, tmp_path: Path) -> None:
    case = Case(dtype=torch.float32)
    assert_offloaded_equals_resident(sized(LAYOUTS[layout], case), case, tmp_path, "host")


def test_moves_are_traced(tmp_path: Path) -> None:
    case = Case(dtype=torch.float32, model="wide_mlp", offload_dir=tmp_path, bucket_size=2048)
    plan = sized(Plan(offload="disk"), case)

    def traced(world: World) -> list[Event]:
        recorder = Recorder(0)
        with make_run(world, plan, case, recorder=recorder) as run:
            list(run.steps(share_of(batch, world, plan) for batch in make_batches(case)))
        return recorder.events()

    events = [e for e in run_threads(plan.mesh(), traced)[0] if e.lane == HOST]
    moved = {kind: [e for e in events if e.kind == kind] for kind in ("read", "write")}
    assert {event.step for event in moved["write"]} == {0, 1, 2}
    assert {event.step for event in moved["read"]} == {1, 2}  # no state before the first step
    for kind, steps in (("write", 3), ("read", 2)):
        total = sum(event.bytes for event in moved[kind])
        assert total % steps == 0 and total > 0
    assert sum(e.bytes for e in moved["write"]) * 2 == sum(e.bytes for e in moved["read"]) * 3
