"""Events and metrics survive their files, and recording is cheap to switch off."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from ganglion.trace import (
    COMM,
    COMPUTE,
    Event,
    MetricsFile,
    Recorder,
    StepMetrics,
    read_metrics,
    read_trace,
)


def metrics(step: int, loss: float = 1.0, val_loss: float | None = None) -> StepMetrics:
    return StepMetrics(
        step=step,
        loss=loss,
        grad_norm=2.0,
        tokens_per_s=3.0,
        step_s=0.5,
        lr=1e-3,
        peak_bytes=7,
        val_loss=val_loss,
    )


def test_events_survive_the_file(tmp_path: Path) -> None:
    times = iter([1.0, 2.0])
    recorder = Recorder(3, clock=lambda: next(times))
    recorder.offset_s = 10.0
    with recorder.span(COMPUTE, "forward", step=1, microbatch=0):
        pass
    recorder.add(COMM, "reduce", 5.0, 7.5, step=1, axis="data", num_bytes=64)
    expected = [
        Event(rank=3, lane=COMPUTE, kind="forward", start_s=11, end_s=12, step=1, microbatch=0),
        Event(
            rank=3, lane=COMM, kind="reduce", start_s=15, end_s=17.5, step=1, axis="data", bytes=64
        ),
    ]
    assert recorder.events() == expected
    assert expected[1].duration_s == 2.5
    with (tmp_path / "trace.jsonl").open("w") as file:
        recorder.drain_to(file)
    assert len(recorder) == 0
    assert read_trace(tmp_path / "trace.jsonl") == expected


def test_a_span_that_raises_is_recorded() -> None:
    recorder = Recorder(0)
    try:
        with recorder.span(COMPUTE, "forward"):
            raise ValueError
    except ValueError:
        pass
    assert [event.kind for event in recorder.events()] == ["forward"]


def test_disabled_recorder_keeps_nothing() -> None:
    recorder = Recorder(0, enabled=False)
    with recorder.span(COMPUTE, "forward"):
        pass
    assert recorder.events() == []


def test_metrics_survive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    written = [metrics(1), metrics(2, val_loss=0.5)]
    for record in written:
        file.write(record)
    file.close()
    assert read_metrics(path) == written
    assert "val_loss" not in path.read_text().splitlines()[0]


def test_non_finite_loss_is_valid_json(tmp_path: Path) -> None:
    assert '"loss": null' in metrics(1, loss=math.nan).to_json()
    path = tmp_path / "metrics.jsonl"
    path.write_text(metrics(1, loss=math.inf).to_json() + "\n")
    assert math.isnan(read_metrics(path)[0].loss)


def test_a_resumed_run_drops_the_lines_it_repeats(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    for step in (1, 2, 3):
        file.write(metrics(step))
    file.close()
    again = MetricsFile(path, 2)
    again.write(metrics(3, loss=9.0))
    again.close()
    assert [(r.step, r.loss) for r in read_metrics(path)] == [(1, 1.0), (2, 1.0), (3, 9.0)]


def test_a_half_written_last_line_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [metrics(step).to_json() for step in (1, 2, 3)]
    path.write_text("\n".join([*lines[:2], lines[2][:20]]))
    assert read_metrics(path) == [metrics(1), metrics(2)]
    again = MetricsFile(path, 2)
    again.write(metrics(3))
    again.close()
    assert path.read_text().splitlines() == lines
    path.write_text("\n".join([lines[0][:20], *lines[1:]]))
    with pytest.raises(json.JSONDecodeError):
        read_metrics(path)


def test_a_failed_rewrite_keeps_the_old_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(metrics(step).to_json() + "\n" for step in (1, 2)))
    before = path.read_text()

    def full_disk(record: StepMetrics) -> str:
        raise OSError("no space left")

    monkeypatch.setattr(StepMetrics, "to_json", full_disk)
    with pytest.raises(OSError, match="no space left"):
        MetricsFile(path, 2)
    assert path.read_text() == before
