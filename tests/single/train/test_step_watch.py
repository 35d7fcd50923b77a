"""The length of a step: from the end of one to the end of the next, without the pauses."""

from __future__ import annotations

import pytest

from ganglion.execute.train.loop import StepWatch


class Clock:
    """A clock that stands where it was put."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def lengths(reports: list[tuple[float, float, float]]) -> list[float]:
    """Return the lengths of steps, each (end, moment of the report, end of the pause after it)."""
    clock = Clock()
    watch, found = StepWatch(clock), []
    for finished_s, reported_s, resumed_s in reports:
        clock.now_s = reported_s
        found.append(watch.step_s(finished_s))
        clock.now_s = resumed_s
        watch.pause_over()
    return found


def test_pauses_belong_to_no_step() -> None:
    reports = [(101.0, 101.0, 101.5), (103.5, 103.5, 110.0), (111.0, 111.0, 111.0)]
    assert lengths(reports) == pytest.approx([1.0, 2.0, 1.0])


def test_steps_that_a_drain_ended_together_have_their_own_lengths() -> None:
    """Both ended before the first was reported; the pauses after them count for the third."""
    reports = [(102.0, 103.0, 104.0), (103.0, 104.0, 109.0), (111.0, 111.0, 111.0)]
    assert lengths(reports) == pytest.approx([2.0, 1.0, 2.0])
