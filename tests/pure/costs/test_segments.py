"""Segments that are computed again: the near-square-root rule, a length of one's own, or some."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ganglion.decide.costs.recompute import num_near_root, segments, written
from ganglion.decide.plan import Plan


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "length"), [(48, 6, 8), (48, 12, 4), (96, 24, 4), (96, 48, 2)]
)
def test_the_lengths_of_axonn(num_layers: int, num_stages: int, length: int) -> None:
    """Of 12, 24, 50 and 100 B (spec A.6): the divisor of N / G_inter closest to sqrt(N)."""
    here = num_layers // num_stages
    assert here // num_near_root(here, num_layers) == length
    divisors = [d for d in range(1, here + 1) if here % d == 0]
    assert length == min(divisors, key=lambda d: abs(d - math.sqrt(num_layers)))


@given(st.integers(1, 60), st.integers(0, 60))
def test_the_mean_length_is_the_closest_there_is(here: int, others: int) -> None:
    root = math.sqrt(here + others)
    found = here / num_near_root(here, here + others)
    assert abs(found - root) == min(abs(here / n - root) for n in range(1, here + 1))


@given(st.integers(0, 9), st.integers(1, 40), st.integers(0, 40), st.integers(0, 9))
def test_segments_cover_a_stage_in_order(start: int, here: int, after: int, every: int) -> None:
    stage = range(start, start + here)
    for plan in (Plan(recompute="sqrt"), Plan(recompute="full", recompute_every=every)):
        found = segments(plan, stage, start + here + after)
        assert [number for span in found for number in span] == list(stage)
        assert all(found)
        if plan.recompute == "full":
            assert all(len(span) == (every or 1) for span in found[:-1])
        else:
            lengths = [len(span) for span in found]
            assert max(lengths) - min(lengths) <= 1


def test_some_blocks_end_where_a_stage_ends() -> None:
    plan = Plan(recompute="blocks", recompute_blocks=("1", "3-6", "8"))
    assert segments(plan, range(0, 5), 10) == (range(1, 2), range(3, 5))
    assert segments(plan, range(5, 8), 10) == (range(5, 7),)
    assert segments(plan, range(9, 10), 10) == ()
    assert segments(Plan(), range(5), 5) == ()


def test_segments_are_written_as_a_plan_has_them() -> None:
    spans = (range(1, 2), range(3, 7))
    assert written(spans) == ("1", "3-6")
    assert Plan(recompute="blocks", recompute_blocks=written(spans)).recompute_spans() == spans
    plan = Plan(recompute="blocks", recompute_blocks=written(spans))
    assert Plan.from_json(plan.to_json()) == plan
    budget = Plan(recompute="budget", activation_mib=3)
    assert Plan.from_json(budget.to_json()) == budget
