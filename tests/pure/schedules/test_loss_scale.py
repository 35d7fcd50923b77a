"""The loss scale: halved on overflow, doubled after a while, the same from the same verdicts."""

from __future__ import annotations

import pytest

from ganglion.decide.schedules.loss_scale import LossScale


def scales(scale: LossScale, verdicts: list[bool], first: int = 0) -> list[float]:
    """Return the scale that each batch used, and that of the batch after the last."""
    found = []
    for batch, is_fine in enumerate(verdicts, start=first):
        found.append(scale.scale_of(batch))
        scale.record(batch, is_fine)
    return [*found, scale.scale_of(first + len(verdicts))]


def test_it_begins_as_axonn_does() -> None:
    scale = LossScale()
    assert scales(scale, [True] * 200) == [2.0**16] * 200 + [2.0**17]


def test_an_overflow_halves_it_and_fine_batches_double_it() -> None:
    scale = LossScale(initial=8, lowest=1, patience=3)
    verdicts = [True, False, True, True, True, True, True, True, True]
    assert scales(scale, verdicts) == [8, 8, 4, 4, 4, 8, 8, 8, 16, 16]


def test_an_overflow_begins_the_count_anew() -> None:
    scale = LossScale(initial=8, lowest=1, patience=3)
    assert scales(scale, [True, True, False, True, True, True]) == [8, 8, 8, 4, 4, 4, 8]


def test_it_has_bounds() -> None:
    scale = LossScale(initial=4, lowest=2, highest=8, patience=1)
    assert scales(scale, [False, False, False]) == [4, 2, 2, 2]
    assert scales(scale, [True, True, True], first=3) == [2, 4, 8, 8]


def test_a_late_verdict_changes_the_batch_after_the_next() -> None:
    scale = LossScale(delay=1, initial=8, lowest=1, patience=2)
    assert scales(scale, [True, True, True, False, True]) == [8, 8, 8, 16, 16, 8]


def test_a_batch_that_was_under_way_halves_it_only_once() -> None:
    """Batches 0 and 1 overflow at 8: the scale of 2 is 4 already, and says nothing yet."""
    scale = LossScale(delay=1, initial=8, lowest=1)
    assert scales(scale, [False, False, True, False]) == [8, 8, 4, 4, 4]
    scale.record(4, True)
    assert scale.scale_of(5) == 2


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("cut", [1, 3, 5, 8])
def test_it_goes_on_where_it_was(delay: int, cut: int) -> None:
    verdicts = [True, False, True, True, False, False, True, True, True, True]
    whole = scales(LossScale(delay=delay, patience=2), verdicts)
    first, second = (LossScale(delay=delay, patience=2) for _ in range(2))
    begun = scales(first, verdicts[:cut])[:-1]
    second.restart(cut, *first.state())
    assert begun + scales(second, verdicts[cut:], first=cut) == whole


def test_another_delay_goes_on_with_the_newest() -> None:
    saved = LossScale(initial=4, lowest=1)
    saved.record(0, False)
    late = LossScale(delay=1)
    late.restart(1, *saved.state())
    assert [late.scale_of(1), late.scale_of(2)] == [2, 2]
    late.record(1, False)
    at_once = LossScale()
    at_once.restart(2, *late.state())
    assert at_once.scale_of(2) == 2.0**10, "the lowest"


def test_a_scale_is_asked_for_in_time() -> None:
    scale = LossScale()
    with pytest.raises(AssertionError, match="batch 1 is not known"):
        scale.scale_of(1)
