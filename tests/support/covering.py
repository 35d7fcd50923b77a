"""Large tables of cases: a few cells in which every two values meet, and the others when asked.

    @cells(plan=LAYOUTS, model=["gpt", "tied"], overlap=[True, False])
    def test_every_layout(plan: Plan, model: str, overlap: bool) -> None: ...

A fault shows where one value is wrong or where two do not go together; it seldom needs three. So
`make test` runs a covering part of the product, and `make test-all` the rest, which is marked slow.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, product
from typing import Any

import pytest

from ganglion.decide.topology.mesh import AXES

Factors = Mapping[str, Hashable]


def covering(cells: Sequence[Factors]) -> list[int]:
    """Return the numbers of cells that hold every pair of values which two factors have in any.

    The cell with most pairs that are missing comes next, and of equals the first: the same each
    time. A cell without a factor that others have holds None of it.
    """
    names = sorted({name for cell in cells for name in cell})
    values = [[(name, cell.get(name)) for name in names] for cell in cells]
    pairs = [set(combinations_with_replacement(held, 2)) for held in values]
    missing, chosen = set[object]().union(*pairs), list[int]()
    while missing:
        chosen.append(max(range(len(cells)), key=lambda number: len(pairs[number] & missing)))
        missing -= pairs[chosen[-1]]
    return sorted(_needed(chosen, pairs))


def _needed(chosen: list[int], pairs: Sequence[set[Any]]) -> list[int]:
    """Leave out cells whose pairs are all in cells that were chosen after them."""
    counts = Counter(pair for number in chosen for pair in pairs[number])
    needed = []
    for number in chosen:
        if min(counts[pair] for pair in pairs[number]) > 1:
            counts.subtract(pairs[number])
        else:
            needed.append(number)
    return needed


@dataclass(frozen=True)
class Values:
    """Values of a column that are named or unfolded into factors in a way of their own."""

    values: Iterable[Any]
    name: Callable[[Any], str] | None = None
    unfold: Callable[[Any], Factors] | None = None


def by_name(table: Mapping[str, Any]) -> Values:
    """Return the names of a table as values that count as the records they stand for."""
    return Values(table, unfold=lambda name: unfolded(table[name]))


Column = Iterable[Any] | Values


def cells(
    together: Mapping[str, Column] | None = None,
    /,
    *,
    only: Callable[..., bool] | None = None,
    **columns: Column,
) -> pytest.MarkDecorator:
    """Parametrize a test by the product of columns; cells that `covering` does not choose are slow.

    Arguments whose values go together share a column: `{"schedule, pipe": [("gpipe", 2), ...]}`.
    `only`, called with the arguments of a cell by name, returns whether the table has the cell.
    """
    columns = {**(together or {}), **columns}
    names = [name for key in columns for name in _names(key)]
    rows = [_joined(parts) for parts in product(*(_cells(*item) for item in columns.items()))]
    if only is not None:
        rows = [row for row in rows if only(**dict(zip(names, row.values, strict=True)))]
    chosen = set(covering([row.factors for row in rows]))
    return pytest.mark.parametrize(
        names, [row.param(is_slow=number not in chosen) for number, row in enumerate(rows)]
    )


def named(value: Any) -> str:
    """Name a value for the id of a test: a layout by its axes, a function by its name."""
    fields = _fields(value)
    if fields is None:
        name = str(getattr(value, "__name__", value))
        assert " at 0x" not in name, f"each process would name {name} otherwise: use Values(name=)"
        return name
    if fields.keys() >= set(AXES):
        fields = {axis: fields[axis] for axis in AXES if fields[axis] > 1}
    return "-".join(f"{key}{part}" for key, part in fields.items()) or "one"


def unfolded(value: Any) -> Factors:
    """Return the factors of a record or a mapping, and of those in it; {} for any other value.

    Of a layout it counts which axes are split, and whether one has more than two ranks, not each
    size of each axis: else a table of layouts would stay nearly whole.
    """
    fields = _fields(value)
    if fields is None:
        return {}
    sizes = {axis: fields[axis] for axis in AXES if fields.get(axis, 1) > 1}
    found: dict[str, Hashable] = dict.fromkeys(sizes, True)
    found["is wide"] = any(size > 2 for size in sizes.values())
    for key, part in fields.items():
        if key not in AXES:
            found.update(_under(key, unfolded(part) or {"": _hashable(part)}))
    return found


@dataclass(frozen=True)
class _Cell:
    """A cell of a table, or its part in one column."""

    values: tuple[Any, ...]
    name: str
    factors: Factors

    def param(self, *, is_slow: bool) -> Any:
        marks = [pytest.mark.slow] if is_slow else []
        return pytest.param(*self.values, id=self.name, marks=marks)


def _names(key: str) -> list[str]:
    return [name.strip() for name in key.split(",")]


def _cells(key: str, column: Column) -> list[_Cell]:
    column = column if isinstance(column, Values) else Values(column)
    names = _names(key)
    rows = ((value,) for value in column.values) if len(names) == 1 else column.values
    return [_joined(_cell(*pair, column) for pair in zip(names, row, strict=True)) for row in rows]


def _cell(argument: str, value: Any, column: Values) -> _Cell:
    name = (column.name or named)(value)
    factors = (column.unfold or unfolded)(value) or {"": name}
    return _Cell((value,), name, _under(argument, factors))


def _joined(parts: Iterable[_Cell]) -> _Cell:
    parts = list(parts)
    factors = {name: value for part in parts for name, value in part.factors.items()}
    values = tuple(value for part in parts for value in part.values)
    return _Cell(values, "-".join(part.name for part in parts), factors)


def _fields(value: Any) -> Mapping[Any, Any] | None:
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def _under(name: Any, factors: Factors) -> Factors:
    return {f"{name} {key}".strip(): part for key, part in factors.items()}


def _hashable(value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return str(value)
    return value  # type: ignore[no-any-return]
