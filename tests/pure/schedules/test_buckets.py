"""Buckets: every gradient in exactly one place, last layers first, sizes within the bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ganglion.decide.schedules.buckets import plan_buckets
from ganglion.errors import LayoutError

sizes_and_bounds = st.tuples(
    st.lists(st.integers(0, 50), max_size=30), st.integers(1, 120), st.integers(1, 60)
)


@given(sizes_and_bounds)
def test_each_parameter_has_one_place_in_reverse_order(case: tuple[list[int], int, int]) -> None:
    sizes, bound, last = case
    buckets = plan_buckets(sizes, bound, last_max_elements=last)
    assert [m for b in buckets for m in b.members] == list(range(len(sizes) - 1, -1, -1))
    for bucket in buckets:
        ends = [o + sizes[m] for m, o in zip(bucket.members, bucket.offsets, strict=True)]
        assert list(bucket.offsets) == [0, *ends[:-1]]
        assert bucket.num_elements == ends[-1]
        assert bucket.num_elements <= bound or len(bucket.members) == 1


def test_the_bucket_reduced_last_is_small() -> None:
    buckets = plan_buckets([4, 4, 4, 4, 4, 4], 12, last_max_elements=5)
    assert [b.members for b in buckets] == [(5, 4, 3), (2, 1), (0,)]


def test_picture_of_the_docstring() -> None:
    assert [b.members for b in plan_buckets([1] * 6, 2)] == [(5, 4), (3, 2), (1, 0)]


def test_empty_buckets_are_refused() -> None:
    with pytest.raises(LayoutError, match="a bucket of 0 elements"):
        plan_buckets([1], 0)
