"""The prediction beside the measurement: exact where the measured trace is a simulation itself."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from ganglion import Plan
from ganglion.cli import summary
from ganglion.cli.summary import print_comparison
from ganglion.decide.costs import StageTimes
from ganglion.decide.predict.comparison import choose_window, compare, measured_times, read_steps
from ganglion.decide.schedules.pipeline import planned_schedule, planned_stage_map
from ganglion.decide.simulator import simulate
from ganglion.errors import DataError
from ganglion.trace import COMPUTE, Event, event_to_json

SCHEDULES = ("gpipe", "one_f_one_b", "interleaved", "zero_bubble", "zero_bubble_v",
             "message_driven", "two_bw", "stash")  # fmt: skip
PLAN = Plan(pipe=2, microbatch_size=1, num_microbatches=6)


def times_of(plan: Plan) -> list[StageTimes]:
    """Return times that differ by stage."""
    return [
        StageTimes(
            forward_s=1 + 0.1 * stage,
            backward_s=1.5 - 0.1 * stage,
            weight_s=0.5 if planned_schedule(plan, 0).splits_backward else 0.0,
            update_s=0.25,
            latency_s=0.125,
            message_bytes=1000 + stage,
        )
        for stage in range(planned_stage_map(plan).num_stages)
    ]


def run_of(plan: Plan, num_steps: int) -> list[Event]:
    """Return the trace of a run: a simulation that plays the part of the machine."""
    simulation = simulate(
        lambda rank: planned_schedule(plan, rank),
        times_of(plan),
        [plan.num_microbatches] * num_steps,
    )
    return simulation.events()


def write_run(folder: Path, events: list[Event], begin: str = "") -> Path:
    (folder / "trace").mkdir(parents=True, exist_ok=True)
    for rank in {event.rank for event in events}:
        lines = [event_to_json(event) + "\n" for event in events if event.rank == rank]
        (folder / "trace" / f"rank{rank}{begin}.jsonl").write_text("".join(lines))
    return folder


def shown(folder: Path, plan: Plan, num_cores: int = 2) -> str:
    screen = io.StringIO()
    print_comparison(folder, plan, num_cores, Console(file=screen, width=100))
    return screen.getvalue()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_that_is_a_simulation_is_predicted_exactly(tmp_path: Path, schedule: str) -> None:
    plan = replace(PLAN, schedule=schedule)
    found = compare(write_run(tmp_path, run_of(plan, 12)), plan, num_cores=2)
    assert (found.first_step, found.last_step) == (4, 12)
    assert found.measured.step_s == pytest.approx(found.predicted.step_s)
    assert found.measured.busy_s == pytest.approx(found.predicted.busy_s)
    assert found.measured.bubbles == pytest.approx(found.predicted.bubbles)
    assert 0 < found.measured.bubble < 1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_first_steps_tell_the_costs(schedule: str) -> None:
    plan = replace(PLAN, schedule=schedule)
    found = measured_times(run_of(plan, 3), plan, planned_stage_map(plan))
    for one, true in zip(found, times_of(plan), strict=True):
        for name in ("forward_s", "backward_s", "weight_s", "update_s"):
            assert getattr(one, name) == pytest.approx(getattr(true, name))
    # Over the last boundary nothing goes on; in a V the turn stays on one rank and takes no time.
    for one in found[:-1]:
        assert one.latency_s == pytest.approx(0.125) or "v" in schedule
        assert one.message_bytes >= 1000


def slower_from(step: int, events: list[Event]) -> list[Event]:
    """Return the events of a machine that takes twice as long from a step on."""
    begin_s = min(event.start_s for event in events if event.step == step)

    def slower(at_s: float) -> float:
        return at_s if at_s <= begin_s else begin_s + 2 * (at_s - begin_s)

    return [e._replace(start_s=slower(e.start_s), end_s=slower(e.end_s)) for e in events]


def test_costs_are_medians_of_three_steps_with_the_first(tmp_path: Path) -> None:
    found = compare(write_run(tmp_path, slower_from(2, run_of(PLAN, 8))), PLAN, num_cores=2)
    for one, true in zip(found.times, times_of(PLAN), strict=True):
        assert one.forward_s == pytest.approx(true.forward_s)
        assert one.backward_s == pytest.approx(true.backward_s)


def test_a_slower_machine_after_the_third_step_shows(tmp_path: Path) -> None:
    found = compare(write_run(tmp_path, slower_from(3, run_of(PLAN, 8))), PLAN, num_cores=2)
    assert found.measured.step_s == pytest.approx(2 * found.predicted.step_s)
    assert found.measured.bubble == pytest.approx(found.predicted.bubble)


def test_the_figures_are_shown_and_written(tmp_path: Path) -> None:
    text = shown(write_run(tmp_path, run_of(PLAN, 8)), PLAN, num_cores=1)
    for part in ("steps 4 to 8, one_f_one_b", "measured", "predicted", "+0.0%", "pipe 1 idle"):
        assert part in text
    assert "2 ranks on 1 cores take turns" in text
    record = json.loads((tmp_path / "prediction.json").read_text())
    assert record["measured"]["step_s"] == pytest.approx(record["predicted"]["step_s"])
    assert len(record["measured"]["bubbles"]) == len(record["times"]) == 2
    assert "take turns" not in shown(tmp_path, PLAN)


def test_a_difference_is_a_share_of_what_was_predicted() -> None:
    assert summary._times(0.3, 0.2) == ("300 ms", "200 ms", "+50.0%")
    assert summary._times(0.3, 0.0)[2] == "+0.0%"  # there is nothing to compare with


def test_why_nothing_is_compared_is_one_line(tmp_path: Path) -> None:
    assert "the run has no trace; set trace.enabled = true" in shown(tmp_path, PLAN)
    text = shown(write_run(tmp_path, run_of(PLAN, 4)), PLAN)
    assert "no prediction to compare with: 4 steps are too few" in text
    assert text.count("\n") == 1
    assert not (tmp_path / "prediction.json").exists()


def test_the_longest_run_between_pauses_is_compared() -> None:
    def pause(step: int) -> Event:
        return Event(0, COMPUTE, "evaluate", 0.0, 0.0, step=step)

    events = run_of(PLAN, 12)
    window = choose_window([*events, pause(3), pause(10)], first=0)
    assert (window.filled, window.first, window.last) == (4, 5, 10)
    with pytest.raises(DataError, match="every step was followed by an evaluation"):
        choose_window([*events, *map(pause, range(12))], first=0)


def test_a_resumed_run_is_compared_by_itself(tmp_path: Path) -> None:
    write_run(tmp_path, run_of(PLAN, 12))
    later = [event._replace(step=event.step + 12) for event in run_of(PLAN, 6)]
    found = compare(write_run(tmp_path, later, "-from-12"), PLAN, num_cores=2)
    assert (found.first_step, found.last_step) == (16, 18)
    assert found.measured.step_s == pytest.approx(found.predicted.step_s)


def test_of_a_long_run_the_beginning_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ganglion.decide.predict.comparison.MAX_STEPS", 4)
    first, events = read_steps(write_run(tmp_path, run_of(PLAN, 30)))
    assert first == 0
    assert max(event.step for event in events) == 3 + 4
    found = compare(tmp_path, PLAN, num_cores=2)
    assert (found.first_step, found.last_step) == (4, 8)
    assert found.measured.step_s == pytest.approx(found.predicted.step_s)
