"""Precisions in run files and plans: what is read, and what is refused before a launch."""

from __future__ import annotations

import pytest

from ganglion.decide.config import Override, check_plan, load_run_file, resolve
from ganglion.decide.config.checks import verdict_delay
from ganglion.decide.config.schema import RunFile
from ganglion.decide.plan import PRECISIONS, Plan
from ganglion.errors import ConfigError, NotBuiltError


def run_file(**settings: str) -> RunFile:
    named = {key.replace("__", "."): text for key, text in settings.items()}
    return load_run_file({}, [Override(key, text) for key, text in named.items()], "test")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_run_file_decides(precision: str) -> None:
    plan = resolve(run_file(train__precision=precision))
    assert plan.precision == precision
    assert plan.has_masters == precision.endswith("_master")
    assert not plan.compute_fp32
    assert Plan.from_json(plan.to_json()) == plan


def test_widening_is_part_of_the_plan() -> None:
    plan = resolve(run_file(train__precision="bf16_master", memory__compute_fp32="true"))
    assert plan.compute_fp32
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(("text", "value"), [("true", True), ("False", False)])
def test_words_of_a_plan(text: str, value: bool) -> None:
    words = ["precision=bf16_master", f"compute_fp32={text}"]
    plan = Plan.from_arguments(words, global_batch_size=4, microbatch_size=2)
    assert plan.compute_fp32 is value


def test_a_word_that_is_neither_true_nor_false() -> None:
    with pytest.raises(ConfigError, match="compute_fp32='yes' is not true or false"):
        Plan.from_arguments(["compute_fp32=yes"], global_batch_size=4, microbatch_size=2)


def test_widening_is_refused_without_masters() -> None:
    with pytest.raises(ConfigError, match=r"memory\.compute_fp32.*train\.precision"):
        resolve(run_file(memory__compute_fp32="true"))


def test_error_feedback_and_averaging_are_refused() -> None:
    late = {"parallel__pipe": "2", "parallel__schedule": "2bw", "optimizer__error_feedback": "true"}
    with pytest.raises(NotBuiltError, match=r"optimizer\.error_feedback.*bf16_master"):
        resolve(run_file(train__precision="bf16_master", **late))
    with pytest.raises(NotBuiltError, match=r'averaging\.method = "sync_easgd".*fp16_master'):
        resolve(run_file(train__precision="fp16_master", averaging__method="sync_easgd"), 2)


def test_a_plan_file_is_checked_too() -> None:
    file = run_file(train__global_batch_size="4", optimizer__error_feedback="true")
    plan = Plan(pipe=2, schedule="two_bw", num_microbatches=4, precision="bf16_master")
    with pytest.raises(NotBuiltError, match=r"optimizer\.error_feedback"):
        check_plan(file, plan, 2)


@pytest.mark.parametrize(
    ("schedule", "delay"), [("one_f_one_b", 0), ("interleaved", 0), ("two_bw", 1)]
)
def test_how_late_verdicts_are(schedule: str, delay: int) -> None:
    assert verdict_delay(Plan(pipe=2, schedule=schedule, num_microbatches=4)) == delay


def test_stages_that_update_one_by_one_cannot_skip_together() -> None:
    settings = {"parallel__pipe": "3", "parallel__schedule": "stash"}
    resolve(run_file(train__precision="bf16_master", **settings))
    with pytest.raises(ConfigError, match=r'fp16_master.*"stash".*late by \[0, 1, 2\]'):
        resolve(run_file(train__precision="fp16_master", **settings))
