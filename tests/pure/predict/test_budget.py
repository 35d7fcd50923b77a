"""A memory budget takes the cheapest settings that fit, keeps to the user's, or refuses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from ganglion.decide.config import RunFile, expected_shape, load_run_file, resolve
from ganglion.decide.plan import Plan
from ganglion.decide.predict import Fit, fit_budget, predicted_memory, state_rules
from ganglion.decide.predict.budget import RESERVE
from ganglion.errors import ConfigError, NotBuiltError
from ganglion.units import GIB

TABLES: dict[str, Any] = {
    "model": {"layers": 8, "hidden": 512, "heads": 8, "vocab_size": 4096},
    "data": {"seq_len": 512},
    "train": {"global_batch_size": 8, "microbatch_size": 4},
}


def run_of(device_gib: float, memory: Mapping[str, Any] | None = None, **tables: Any) -> RunFile:
    keys = {"device_gib": device_gib, **(memory or {})}
    return load_run_file({**TABLES, **tables, "memory": keys})


def fit(run: RunFile) -> Fit:
    return fit_budget(run, lambda file: resolve(file, None))


def peak_of(run: RunFile, plan: Plan) -> int:
    held = predicted_memory(expected_shape(run), plan, state_rules(run))
    return max(memory.total for memory in held)


def peak_with(**memory: Any) -> int:
    run = run_of(0.0, memory)
    return peak_of(run, resolve(run))


def budget_for(peak_bytes: int) -> float:
    return peak_bytes / (1 - RESERVE) / GIB + 1e-6


def test_nothing_is_changed_where_everything_fits() -> None:
    found = fit(run_of(64))
    assert found.chosen == {}
    assert found.plan == resolve(found.run)
    assert found.peak_bytes == peak_with()


def test_the_first_that_fits_is_taken_in_the_order_of_cost() -> None:
    whole, again, below = peak_with(), peak_with(recompute="full"), peak_with(offload="disk")
    assert again < whole, "or this test tells nothing"
    assert fit(run_of(budget_for(whole))).chosen == {}
    assert fit(run_of(budget_for(whole - 1) - 2e-6)).chosen == {"recompute": "full"}
    assert fit(run_of(budget_for(again))).chosen == {"recompute": "full"}
    lower = fit(run_of(budget_for(again) - 1e-4)).chosen
    assert lower["offload"] == "disk"
    assert below < whole


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
def test_what_was_chosen_fits_and_is_in_plan_and_run_file(share: float) -> None:
    run = run_of(peak_with() * share / GIB)
    found = fit(run)
    assert found.peak_bytes == peak_of(found.run, found.plan)
    assert found.peak_bytes <= run.memory.device_gib * GIB * (1 - RESERVE)
    for key, value in found.chosen.items():
        assert getattr(found.run.memory, key) == value
    assert found.plan.recompute == found.run.memory.recompute
    assert found.plan.offload == found.run.memory.offload
    again = resolve(load_run_file(found.run.model_dump()))
    assert again == found.plan


def test_what_the_user_set_is_never_changed() -> None:
    device_gib = budget_for(peak_with(offload="disk"))
    assert fit(run_of(device_gib)).chosen == {"recompute": "full"}
    found = fit(run_of(device_gib, {"recompute": "none"}))
    assert found.chosen["offload"] == "disk" and found.plan.recompute == "none"
    kept = dict.fromkeys(("recompute", "offload", "offload_activations"), "none")
    with pytest.raises(ConfigError, match=r"memory.device_gib = .* is too little"):
        fit(run_of(device_gib, kept))


def test_a_bucket_size_of_the_user_stays() -> None:
    low = budget_for(peak_with(offload="disk", bucket_size=2048))
    assert fit(run_of(low, {"bucket_size": 2048, "recompute": "none"})).chosen == {
        "offload": "disk"
    }


def test_the_smallest_budget_that_would_do_is_told_and_does() -> None:
    with pytest.raises(ConfigError) as refused:
        fit(run_of(0.01))
    text = str(refused.value)
    told = float(text.split("set memory.device_gib = ")[1].split(",")[0])
    assert fit(run_of(told)).peak_bytes <= told * GIB
    with pytest.raises(ConfigError):
        fit(run_of(math.floor(told * 1000 - 1.5) / 1000))


def test_stages_are_cut_as_predicted() -> None:
    found = fit(run_of(64, parallel={"pipe": 2, "schedule": "2bw"}))
    assert len(found.plan.stage_boundaries) == 1
    free = resolve(found.run)
    assert peak_of(found.run, free) == found.peak_bytes


def test_a_cut_of_the_user_stays() -> None:
    found = fit(run_of(64, parallel={"pipe": 2, "stage_boundaries": [3]}))
    assert found.plan.stage_boundaries == (3,)


def test_what_cannot_be_is_passed_over() -> None:
    def refusing(run: RunFile) -> Plan:
        if run.memory.offload != "none":
            raise NotBuiltError("no offload with this")
        return resolve(run)

    run = run_of(0.01)
    with pytest.raises(ConfigError, match=r'even with memory.recompute = "full"'):
        fit_budget(run, refusing)


def test_a_model_of_ones_own_is_refused() -> None:
    run = load_run_file({"model": {"build": "a:b"}, "memory": {"device_gib": 1.0}})
    with pytest.raises(ConfigError, match=r"model.build is code of your own"):
        fit(run)


def test_a_wrong_setting_of_the_user_is_told_as_such() -> None:
    run = run_of(64, train={"global_batch_size": 7, "microbatch_size": 4})
    with pytest.raises(ConfigError, match="global_batch_size"):
        fit(run)
