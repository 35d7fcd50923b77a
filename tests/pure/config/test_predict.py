"""`ganglion.predict`: the figures of the simulator and of the memory model, in one record."""

from __future__ import annotations

from pathlib import Path

import pytest

import ganglion
from ganglion.decide.config import RunFile, expected_shape, load_run_file, read_toml, resolve
from ganglion.decide.costs import CATEGORIES, find_cluster, read_cluster
from ganglion.decide.plan import Plan
from ganglion.decide.predict import (
    StepSetting,
    planned_times,
    predict_step,
    predicted_memory,
    state_rules,
)
from ganglion.errors import ConfigError, LayoutError

RUN = """
[model]
layers = 8
[parallel]
pipe = 4
[train]
global_batch_size = 64
microbatch_size = 2
"""
STAGES = """
name = "box"
num_nodes = 1
ranks_per_node = 4
[links.intra]
latency_s = 0.25
bandwidth_gbps = 1e9
[stages]
forward_s = 1.0
backward_s = 2.0
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "box.toml").write_text(STAGES)
    return tmp_path


def test_a_run_file_is_predicted_as_its_halves_are(folder: Path) -> None:
    found = ganglion.predict(folder / "run.toml", cluster="summit", nproc=8)
    run = load_run_file(read_toml(folder / "run.toml"))
    plan, summit = resolve(run, 8), find_cluster("summit")
    times = planned_times(plan, summit, run, "run.toml")
    step, events = predict_step(plan, times, summit, StepSetting())
    assert (found.plan, found.step, found.step_s) == (plan, step, step.step_s)
    assert 0 < found.idle_share == step.bubble < 1
    assert {event.kind for event in events} >= {"forward", "backward", "update"}
    held = predicted_memory(expected_shape(run), plan, state_rules(run))
    assert found.memory_by_rank is not None
    assert len(found.memory_by_rank) == plan.num_ranks
    for rank, sizes in enumerate(found.memory_by_rank):
        own = held[plan.mesh().coordinates(rank).pipe]
        assert sizes == {name: getattr(own, name) for name in CATEGORIES}
    assert found.fits


def test_a_model_that_is_too_large_does_not_fit(folder: Path) -> None:
    large = {"model.hidden": 65536, "model.heads": 64}
    found = ganglion.predict(str(folder / "run.toml"), cluster="summit", overrides=large)
    assert found.fits is False


def test_overrides_are_keys_of_the_run_file(folder: Path) -> None:
    changed = {"parallel.pipe": 2, "parallel.schedule": "gpipe", "parallel.overlap": False}
    found = ganglion.predict(folder / "run.toml", cluster="summit", overrides=changed)
    assert (found.plan.pipe, found.plan.schedule) == (2, "gpipe")
    with pytest.raises(ConfigError, match="overrides need the path of a run file"):
        ganglion.predict(RunFile(), cluster="summit", overrides=changed)


def test_a_memory_budget_is_kept(folder: Path) -> None:
    tight = {"memory.device_gib": 0.06}
    found = ganglion.predict(folder / "run.toml", cluster="summit", overrides=tight)
    assert found.fits
    assert found.memory is not None
    assert found.memory.budget_key == "device_gib"
    assert found.plan.recompute != "none" or found.plan.offload != "none"


def test_a_plan_has_times_but_no_memory(folder: Path) -> None:
    plan = Plan(pipe=4, num_microbatches=8)
    (folder / "plan.json").write_text(plan.to_json())
    box = read_cluster(folder / "box.toml")
    for source in (plan, folder / "plan.json"):
        found = ganglion.predict(source, cluster=box)
        assert found.step_s > 8 * 3
        assert (found.memory, found.memory_by_rank, found.fits) == (None, None, None)
    with pytest.raises(LayoutError, match=r"--nproc 3, but .*plan.json needs 4 processes"):
        ganglion.predict(folder / "plan.json", cluster=box, nproc=3)
    with pytest.raises(ConfigError, match=r"--parallel.pipe is a key of a run file, but .*plan"):
        ganglion.predict(folder / "plan.json", cluster=box, overrides={"parallel.pipe": 2})
    with pytest.raises(ConfigError, match="does not say how large the model is"):
        ganglion.predict(plan, cluster="laptop")


def test_code_of_the_users_own_needs_times(folder: Path) -> None:
    own = {"model.build": "package.module:build"}
    found = ganglion.predict(folder / "run.toml", cluster=folder / "box.toml", overrides=own)
    assert found.memory is None
    with pytest.raises(ConfigError, match=r"model.build is code of your own, whose cost"):
        ganglion.predict(folder / "run.toml", cluster="summit", overrides=own)
