"""The covering part of a table has every pair of values, is small and is the same each time."""

from __future__ import annotations

import functools
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ganglion.decide.plan import Plan
from tests.support.covering import Factors, Values, by_name, cells, covering, named, unfolded

LAYOUTS = [
    Plan(x=x, y=y, z=z) for x, y, z in product((1, 2, 4, 8), repeat=3) if x * y * z in (2, 4, 8)
]


def pairs(cells: list[Factors]) -> set[object]:
    return {pair for cell in cells for pair in combinations(sorted(cell.items()), 2)}


def params(mark: pytest.MarkDecorator) -> tuple[list[str], list[Any]]:
    """Return the names of cells that run always, and all cells."""
    rows = mark.args[1]
    return [row.id for row in rows if not row.marks], rows


rows = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.booleans(), st.integers(0, 4)))


@given(rows)
def test_every_pair_of_any_table_is_in_a_chosen_cell(rows: list[tuple[int, ...]]) -> None:
    table = [dict(zip("abcd", row, strict=True)) for row in rows]
    chosen = covering(table)
    assert pairs([table[number] for number in chosen]) == pairs(table)
    assert chosen == sorted(set(chosen)) == covering(table)


def test_a_product_of_ten_switches_needs_about_a_dozen_cells() -> None:
    table = [dict(enumerate(row)) for row in product([False, True], repeat=10)]
    assert len(covering([{str(key): value for key, value in row.items()} for row in table])) <= 12


def test_a_column_alone_stays_whole() -> None:
    assert covering([{"model": name} for name in "abc"]) == [0, 1, 2]
    assert covering([]) == []


def test_what_a_cell_lacks_is_a_value_too() -> None:
    assert covering([{"a": 1}, {"a": 1, "b": 2}]) == [0, 1]


def test_the_rest_of_a_table_is_slow() -> None:
    always, rows = params(cells(plan=LAYOUTS, model=["gpt", "tied"], overlap=[True, False]))
    assert len(rows) == len(LAYOUTS) * 4
    assert len(always) < 16
    assert all(row.marks in ([], [pytest.mark.slow]) for row in rows)
    assert any("4" in name for name in always)


def test_cells_are_named_by_their_values() -> None:
    table = cells(plan=[Plan(x=2, z=4), Plan()], fit=[named], dtype=[None], on=[True])
    assert params(table)[0] == ["x2-z4-named-None-True", "one-named-None-True"]


def test_arguments_that_go_together_share_a_column() -> None:
    table = cells({"schedule, pipe": [("gpipe", 2), ("zb", 3)]}, data=[1, 2])
    assert table.args[0] == ["schedule", "pipe", "data"]
    assert [row.values for row in table.args[1]] == [
        ("gpipe", 2, 1),
        ("gpipe", 2, 2),
        ("zb", 3, 1),
        ("zb", 3, 2),
    ]


def test_a_table_may_leave_cells_out() -> None:
    table = cells(a=[1, 2], b=[1, 2], only=lambda a, b: a != b)
    assert [row.values for row in table.args[1]] == [(1, 2), (2, 1)]


def test_values_with_a_name_and_factors_of_their_own() -> None:
    sizes = Values(range(8), name=lambda n: f"n{n}", unfold=lambda n: {"odd": n % 2})
    always, rows = params(cells(n=sizes, on=[True, False]))
    assert always == ["n0-True", "n0-False", "n1-True", "n1-False"]
    assert len(rows) == 16


def test_names_stand_for_records() -> None:
    table = {"flat": Plan(x=2), "deep": Plan(pipe=2), "both": Plan(x=2, pipe=2)}
    always, rows = params(cells(layout=by_name(table), model=["gpt", "tied"]))
    assert [row.values[0] for row in rows[::2]] == ["flat", "deep", "both"]
    assert len(always) < len(rows)


def test_a_layout_counts_its_split_axes_and_whether_one_is_wide() -> None:
    factors = unfolded(Plan(x=2, z=4, recompute="full"))
    assert (factors["x"], factors["z"], factors["is wide"]) == (True, True, True)
    assert factors["recompute"] == "full"
    assert "y" not in factors
    assert unfolded({"pipe": 2, "on": [1]}) == {"pipe": True, "on": "[1]", "is wide": False}
    inside = unfolded({"model": "gpt", "plan": Plan(pipe=2)})
    assert (inside["model"], inside["plan pipe"], inside["plan schedule"]) == (
        "gpt",
        True,
        "one_f_one_b",
    )


def test_a_name_that_differs_between_processes_is_refused() -> None:
    with pytest.raises(AssertionError, match="use Values"):
        cells(make=[functools.partial(test_a_name_that_differs_between_processes_is_refused)])
