"""The JSON half of a checkpoint: it comes back equal, and what JSON would bend is refused."""

from __future__ import annotations

import json

import pytest
import torch

from ganglion.decide.plan import Plan
from ganglion.errors import CheckpointError
from ganglion.execute.checkpoint import SavedState

STATE = SavedState(
    step=12,
    plan=Plan(data=2, microbatch_size=4),
    optimizer={"groups": [{"kind": "AdamW", "settings": {"lr": 1e-3, "betas": [0.9, 0.95]}}]},
    extra={"sampler": {"position": 7, "seed": 2**40}, "loss": 0.1 + 0.2, "note": None, "on": True},
)


def test_round_trip_is_exact() -> None:
    assert SavedState.from_json(STATE.to_json(), "state.json") == STATE


@pytest.mark.parametrize("loss", [float("inf"), float("-inf"), 5e-324])
def test_odd_floats_come_back(loss: float) -> None:
    state = SavedState(step=0, plan=Plan(), extra={"loss": loss})
    assert SavedState.from_json(state.to_json(), "state.json") == state


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"a": {"b": [1, torch.ones(1)]}}, r"extra\.a\.b\[1\] is a Tensor, which JSON cannot hold"),
        ({"a": b"x"}, r"extra\.a is a bytes"),
        ({"a": {1, 2}}, r"extra\.a is a set"),
        ({"a": {1: "x"}}, r"extra\.a has the key 1, but JSON keys are text"),
    ],
)
def test_what_json_cannot_give_back_is_refused(extra: dict[str, object], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        SavedState(step=0, plan=Plan(), extra=extra).to_json()  # type: ignore[arg-type]


def edited(**changes: object) -> str:
    return json.dumps({**json.loads(STATE.to_json()), **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"here\.json is not JSON"),
        ("[]", r"here\.json has format None, but this version reads format 1"),
        (edited(format=2), r"here\.json has format 2, but this version reads format 1"),
        (edited(more=1), r"here\.json has the fields \[.*'more'.*\], not"),
        (edited(step="12"), r"here\.json: step must be of type int, not '12'"),
        (edited(step=True), r"here\.json: step must be of type int, not True"),
        (edited(extra=[]), r"here\.json: extra must be of type dict"),
        (edited(plan={"format": 1, "data": 0}), r"axis data has size 0"),
        (edited(plan={"format": 1, "dta": 1}), r"the plan in here\.json has the unknown field"),
    ],
)
def test_a_wrong_file_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        SavedState.from_json(text, "here.json")
