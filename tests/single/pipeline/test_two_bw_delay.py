"""Two_bw equals a serial loop with its delay written out, with and without error feedback."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ganglion import Plan, RunSettings, parallelize
from ganglion.cli.train import warn_of_late_gradients
from ganglion.decide.config import Override, check_plan, load_run_file, resolve
from ganglion.errors import ConfigError
from ganglion.execute.comm import Faults, run_threads
from ganglion.execute.models import cross_entropy
from ganglion.execute.update import ErrorFeedback, WeightVersions
from tests.support.covering import Values, cells
from tests.support.pipelines import (
    CASE,
    assert_equals_delayed,
    delayed,
    merged,
    plan_for,
    train_at_once,
)
from tests.support.serial import TOLERANCE
from tests.support.training import FACTORIES, OPTIMIZERS, Case, make_model

DELAYED = dataclasses.replace(CASE, num_steps=6)
FED_BACK = dataclasses.replace(DELAYED, error_feedback=True)


@cells(
    optimizer=FACTORIES,
    pipe=[2, 3, 4],
    more=["d", "d+1", "2d"],
    error_feedback=Values([False, True], name=lambda on: "error_feedback" if on else "plain"),
    recompute=["none", "full"],
)
def test_equals_the_delay_written_out(
    optimizer: str, pipe: int, more: str, error_feedback: bool, recompute: str
) -> None:
    m = {"d": pipe, "d+1": pipe + 1, "2d": 2 * pipe}[more]
    case = dataclasses.replace(
        DELAYED, optimizer=optimizer, global_batch_size=2 * m, error_feedback=error_feedback
    )
    assert_equals_delayed(plan_for(case, "two_bw", pipe, 1, m, recompute=recompute), case)


@pytest.mark.parametrize("optimizer", FACTORIES)
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.3])
def test_feedback_with_replicas_and_clipping(optimizer: str, max_grad_norm: float) -> None:
    case = dataclasses.replace(FED_BACK, optimizer=optimizer, max_grad_norm=max_grad_norm)
    assert_equals_delayed(plan_for(case, "two_bw", 2, 2, 4), case)


@pytest.mark.parametrize("optimizer", FACTORIES)
def test_feedback_with_tied_embeddings(optimizer: str) -> None:
    """Both stages that hold the weights must agree to the last bit: `merged` compares them."""
    case = dataclasses.replace(FED_BACK, model="tied", optimizer=optimizer, max_grad_norm=0.3)
    assert_equals_delayed(plan_for(case, "two_bw", 2, 1, 4), case)


def test_feedback_of_a_single_stage() -> None:
    assert_equals_delayed(plan_for(FED_BACK, "two_bw", 1, 1, 4), FED_BACK)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_feedback_when_messages_are_late(dtype: torch.dtype) -> None:
    case = dataclasses.replace(FED_BACK, dtype=dtype, optimizer="sgd")
    faults = Faults(seed=1, delay_s=0.003, reorder=True)
    assert_equals_delayed(plan_for(case, "two_bw", 3, 1, 4), case, faults)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_feedback_changes_the_weights(optimizer: str) -> None:
    """The comparisons above could not fail if it did nothing on both sides."""
    case = dataclasses.replace(FED_BACK, optimizer=optimizer)
    plan = plan_for(case, "two_bw", 2, 1, 4)
    found = merged(run_threads(plan.mesh(), lambda world: train_at_once(world, plan, case)), plan)
    plain = delayed(dataclasses.replace(case, error_feedback=False))
    assert found.losses[:2] == pytest.approx(plain.losses[:2], rel=TOLERANCE[case.dtype][0])
    assert abs(found.losses[2] - plain.losses[2]) > 1e-6, "batch 2 is the first to see an update"


def test_feedback_by_hand() -> None:
    """Updates of 1, 4 and 2 move the weights by 2, 7 and 0; of zero then, by -2."""
    weight = torch.nn.Parameter(torch.zeros(3))
    versions = WeightVersions({"weight": weight}, 2)
    feedback = ErrorFeedback(versions)
    moved = []
    for update in (1.0, 4.0, 2.0, 0.0):
        versions.begin_update()
        versions.optimized["weight"].data += update
        feedback.correct()
        versions.end_update()
        versions.select(versions.newest)
        moved.append(weight[0].item())
        assert torch.equal(feedback.previous["weight"], torch.full((3,), update))
    assert moved == [2.0, 9.0, 9.0, 7.0]


@pytest.mark.parametrize(
    ("schedule", "pipe", "words"),
    [
        ("one_f_one_b", 2, "none that are late"),
        ("message_driven", 2, "none that are late"),
        ("gpipe", 1, "none that are late"),
        ("stash", 3, r"late by \[2, 1, 0\]"),
    ],
)
def test_feedback_is_refused_without_a_delay_of_one(schedule: str, pipe: int, words: str) -> None:
    plan = Plan(pipe=pipe, schedule=schedule, num_microbatches=4)
    blocks = make_model(Case())
    with pytest.raises(ConfigError, match=f"optimizer.error_feedback.*{schedule}.*{words}"):
        parallelize(
            blocks, cross_entropy, OPTIMIZERS["sgd"], plan, RunSettings(error_feedback=True)
        )


def test_feedback_is_refused_beside_a_plan_file_too() -> None:
    wishes = {"optimizer.error_feedback": "true", "train.global_batch_size": "4"}
    file = load_run_file({}, [Override(key, text) for key, text in wishes.items()], "test")
    check_plan(file, Plan(pipe=2, schedule="2bw", num_microbatches=4), 2)
    with pytest.raises(ConfigError, match=r"optimizer\.error_feedback"):
        check_plan(file, Plan(pipe=2, num_microbatches=4), 2)


@pytest.mark.parametrize(
    ("changes", "is_warned"),
    [
        ({}, True),
        ({"optimizer.error_feedback": "true"}, False),
        ({"optimizer.name": "sgd"}, False),
        ({"optimizer.name": "muon"}, False),
        ({"parallel.schedule": "1f1b"}, False),
    ],
)
def test_adamw_with_late_gradients_is_warned_of(
    changes: dict[str, str], is_warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """What rank 0 of a launch says."""
    wishes = {"parallel.pipe": "2", "parallel.schedule": "2bw", **changes}
    file = load_run_file({}, [Override(key, text) for key, text in wishes.items()], "test")
    warn_of_late_gradients(file, resolve(file))
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == is_warned
    if is_warned:
        assert printed.err.startswith('warning: parallel.schedule = "two_bw" makes every gradient')
        assert printed.err.endswith("optimizer.error_feedback = true can win a part of it back\n")
