"""Predicted against measured: differences are split without remainder and named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ganglion.cli.trace import trace_command
from ganglion.errors import ConfigError, DataError
from ganglion.trace.diff import Place, TraceDiff, _span, count_steps, diff_traces
from ganglion.trace.event import COMM, COMPUTE, HOST, NONE, Event
from ganglion.trace.files import write_trace

replace = Event._replace


def step_of(
    step: int, start_s: float, *, forward_s: float = 1.0, message_s: float = 1.0, late_s: float = 0
) -> list[Event]:
    """Return a step of two stages: forward, message, forward on stage 1, update, 10 s in all."""
    sent = start_s + forward_s + late_s
    arrived = sent + message_s
    flow = {"flow": step, "bytes": 10, "microbatch": 0}
    events = [
        Event(rank=0, lane=COMPUTE, kind="forward", start_s=start_s, end_s=start_s + forward_s),
        Event(rank=0, lane=COMM, kind="send_forward", start_s=sent, end_s=arrived, **flow),
        Event(rank=1, lane=COMM, kind="receive_forward", start_s=sent, end_s=arrived, **flow),
        Event(rank=1, lane=COMPUTE, kind="forward", start_s=arrived, end_s=arrived + 2),
        Event(rank=0, lane=HOST, kind="update", start_s=arrived, end_s=start_s + 10),
        Event(rank=1, lane=COMPUTE, kind="update", start_s=arrived + 2, end_s=start_s + 10),
    ]
    return [event._replace(step=step, stage=event.rank) for event in events]


def by_place(diff: TraceDiff) -> dict[str, tuple[float, float, float, float, str]]:
    return {
        str(one.place): (
            one.difference.span_s,
            one.difference.compute_s,
            one.difference.link_s,
            one.difference.waiting_s,
            one.largest_cause,
        )
        for one in diff.places
    }


def test_a_trace_does_not_differ_from_itself() -> None:
    diff = diff_traces(step_of(0, 0), step_of(0, 0))
    assert {one.residual_s for one in diff.kinds} == {0}
    assert {found[:4] for found in by_place(diff).values()} == {(0, 0, 0, 0)}


def test_a_computation_without_a_step_belongs_to_the_next_update() -> None:
    forward = Event(rank=0, lane=COMPUTE, kind="forward", start_s=0, end_s=1)
    message = Event(rank=0, lane=COMM, kind="send_forward", start_s=2, end_s=3, step=4)
    update = Event(rank=0, lane=COMPUTE, kind="update", start_s=9, end_s=10, step=5)
    assert _span([forward, message, update]) == [(0, 10)]


def test_one_step_is_laid_over_many_whatever_lies_between_them() -> None:
    measured = step_of(3, 100) + step_of(4, 200) + step_of(5, 1000)
    diff = diff_traces(step_of(0, 0), measured)
    assert (diff.predicted_steps, diff.measured_steps) == (1, 3)
    assert {one.residual_s for one in diff.kinds} == {0}
    assert {(one.predicted.count, one.measured.count) for one in diff.kinds} == {(1, 1)}
    assert {found[:4] for found in by_place(diff).values()} == {(0, 0, 0, 0)}


def test_computations_that_do_not_tell_their_step_belong_to_the_next_update() -> None:
    told = step_of(0, 0) + step_of(1, 100)
    untold = [e if e.kind == "update" else replace(e, step=NONE) for e in told]
    assert {found[:4] for found in by_place(diff_traces(untold, told)).values()} == {(0, 0, 0, 0)}
    tail = replace(_extra(0, 200, 201), step=NONE)
    assert by_place(diff_traces(told, [*untold, tail]))["stage 0"][:4] == (0.5, 0.5, 0, 0)


def test_a_slow_link_is_named() -> None:
    diff = diff_traces(step_of(0, 0), step_of(0, 0, message_s=3))
    # Stage 1 begins with its receive at 1 s and ends at 10 s, as before.
    assert by_place(diff)["stage 1"] == (0, -2, 2, 0, "compute")
    longer = [e if e.kind != "update" else replace(e, end_s=12) for e in step_of(0, 0, message_s=3)]
    assert by_place(diff_traces(step_of(0, 0), longer))["stage 1"] == (2, 0, 2, 0, "link")


def test_slow_computation_and_waiting_are_named() -> None:
    slow = diff_traces(step_of(0, 0), [*step_of(0, 0), _extra(0, 10, 14)])
    assert by_place(slow)["stage 0"] == (4, 4, 0, 0, "compute")
    idle = diff_traces(step_of(0, 0), [*step_of(0, 0), _extra(0, 13, 14)])
    assert by_place(idle)["stage 0"] == (4, 1, 0, 3, "waiting")
    late = diff_traces(step_of(0, 0), step_of(0, 0, late_s=0.5))
    assert by_place(late)["stage 0"] == (0, -0.5, 0, 0.5, "compute")


def _extra(rank: int, start_s: float, end_s: float) -> Event:
    more = {"rank": rank, "stage": rank, "step": 0}
    return Event(lane=COMPUTE, kind="evaluate", start_s=start_s, end_s=end_s, **more)


def test_an_update_is_work_on_any_lane() -> None:
    moved = [
        event._replace(lane=COMPUTE) if event.kind == "update" else event for event in step_of(0, 0)
    ]
    assert by_place(diff_traces(step_of(0, 0), moved))["stage 0"][:4] == (0, 0, 0, 0)


def test_the_parts_add_up() -> None:
    measured = [*step_of(0, 0, forward_s=1.5, message_s=2.25, late_s=0.25), _extra(1, 17, 18)]
    for one in diff_traces(step_of(0, 0), measured).places:
        for spent in (one.predicted, one.measured, one.difference):
            assert spent.compute_s + spent.link_s + spent.waiting_s == spent.span_s
        assert min(one.measured.compute_s, one.measured.link_s, one.measured.waiting_s) >= 0


def test_kinds_are_compared_by_stage() -> None:
    diff = diff_traces(step_of(0, 0), step_of(0, 0, forward_s=3) + step_of(1, 10, forward_s=4))
    (forward,) = [k for k in diff.kinds if (k.kind, k.place) == ("forward", Place(0))]
    assert (forward.predicted.median_s, forward.measured.median_s) == (1, 3.5)
    assert (forward.predicted.total_s, forward.measured.total_s) == (1, 3.5)
    assert forward.residual_s == 2.5


def test_replicas_of_a_stage_are_averaged() -> None:
    second = [
        event._replace(rank=event.rank + 2, flow=event.flow if event.flow == NONE else 99)
        for event in step_of(0, 0, forward_s=3)
    ]
    diff = diff_traces(step_of(0, 0), step_of(0, 0) + second)
    (forward,) = [k for k in diff.kinds if (k.kind, k.place) == ("forward", Place(0))]
    assert (forward.measured.count, forward.measured.total_s) == (1, 2)
    assert [str(one.place) for one in diff.places] == ["stage 0", "stage 1"]


def test_what_only_one_trace_has_shows_as_missing() -> None:
    diff = diff_traces(step_of(0, 0), [*step_of(0, 0), _extra(0, 10, 11)])
    (extra,) = [one for one in diff.kinds if one.kind == "evaluate"]
    assert (extra.predicted.count, extra.measured.count, extra.residual_s) == (0, 1, 1)


def unstaged(events: list[Event]) -> list[Event]:
    return [event._replace(stage=NONE) for event in events]


def test_without_stages_ranks_are_compared() -> None:
    measured = unstaged(step_of(0, 0, forward_s=2))
    for predicted in (step_of(0, 0), unstaged(step_of(0, 0))):
        diff = diff_traces(predicted, measured)
        assert [str(one.place) for one in diff.places] == ["rank 0", "rank 1"]
        assert {str(one.place) for one in diff.kinds} == {"rank 0", "rank 1"}


def test_a_stage_waits_while_its_rank_works_for_another() -> None:
    def forward(stage: int, start_s: float) -> Event:
        more = {"rank": 0, "stage": stage, "step": 0}
        return Event(lane=COMPUTE, kind="forward", start_s=start_s, end_s=start_s + 1, **more)

    predicted = [forward(0, 0), forward(0, 1), forward(4, 2)]
    measured = [forward(0, 0), forward(4, 1), forward(0, 2)]
    assert by_place(diff_traces(predicted, measured))["stage 0"] == (1, 0, 0, 1, "waiting")


def test_a_message_counts_for_its_stage_and_from_its_beginning() -> None:
    def spent(stage: int, events: list[Event]) -> tuple[float, float]:
        (one,) = [p for p in diff_traces(events, events).places if p.place == Place(stage)]
        return one.measured.span_s, one.measured.link_s

    noticed = [
        replace(e, start_s=1.75) if e.kind == "receive_forward" else e for e in step_of(0, 0)
    ]
    assert spent(1, step_of(0, 0)) == (9, 1)
    assert spent(1, noticed) == (8.25, 0.25)
    other_chunk = replace(step_of(0, 0)[3], stage=4, start_s=0, end_s=0.5)
    assert spent(4, [*step_of(0, 0), other_chunk, replace(other_chunk, start_s=11, end_s=12)]) == (
        12,
        0,
    )


def test_steps_are_counted_by_updates_or_given() -> None:
    assert count_steps(step_of(0, 0) + step_of(7, 10)) == 2
    assert count_steps([e for e in step_of(0, 0) + step_of(7, 10) if e.kind != "update"]) == 2
    assert count_steps([replace(e, step=NONE) for e in step_of(0, 0)]) == 1
    one = step_of(0, 0)
    assert diff_traces(one, one, measured_steps=2).kinds[0].measured.count == 0.5
    with pytest.raises(ConfigError, match="0 steps"):
        diff_traces(one, one, predicted_steps=0)


def test_traces_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(DataError, match="no events"):
        diff_traces(step_of(0, 0), [])
    others = [event._replace(stage=event.stage + 5) for event in step_of(0, 0)]
    with pytest.raises(DataError, match=r"predicted has stage 0, stage 1, .* stage 5, stage 6"):
        diff_traces(step_of(0, 0), others)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    write_trace(step_of(0, 0), tmp_path / "predicted.jsonl")
    write_trace(step_of(0, 0, message_s=3), tmp_path / "measured.jsonl")
    return tmp_path / "predicted.jsonl", tmp_path / "measured.jsonl"


def test_the_command_prints_tables(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    trace_command(files[0], against=None, output=None, as_json=False)
    printed = capsys.readouterr().out
    assert printed.isascii()
    for words in ("span 10 s", "bubble", "0 -> 1", "critical path: 2 events, 10 s"):
        assert words in printed
    assert "collectives" not in printed  # there are none
    trace_command(files[0], against=files[1], output=None, as_json=False)
    printed = capsys.readouterr().out
    assert printed.isascii()
    for words in ("1 predicted and 1 measured", "stage 1", "mostly", "compute"):
        assert words in printed


def test_the_command_prints_json(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace_command(files[0], against=files[1], output=tmp_path / "a.svg", as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["statistics"]["span_s"] == 10
    assert found["critical_path"]["links"][0]["event"]["kind"] == "forward"
    assert found["diff"]["places"][1]["largest_cause"] == "compute"
    assert (tmp_path / "a.svg").exists()
    trace_command(files[0], against=None, output=None, as_json=True)
    assert "diff" not in json.loads(capsys.readouterr().out)


def test_the_command_refuses_a_format_before_it_reads(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="end it in"):
        trace_command(tmp_path / "no", against=None, output=tmp_path / "a.gif", as_json=False)
