"""Bytes as data: terms for each sample or microbatch, the axes that divide them, and when they are.

    {"bytes": 2097152, "over": "y"}               of each sample, features split over y
    {"fixed_bytes": 4194304, "when": "z=1"}       of a microbatch of any size, without axis z

Precisions differ in what is kept, so amounts are listed for each `Format`.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ganglion.decide.shapes.block import FLOAT, HALF, Layout
from ganglion.decide.topology import TENSOR_AXES, Mesh
from ganglion.errors import ConfigError

_COMPARE: Mapping[str, Callable[[int, int], bool]] = MappingProxyType(
    {"=": operator.eq, ">": operator.gt, "<": operator.lt}
)
_CONDITION = re.compile(r"([a-z]+)([=<>])([0-9]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One way to compute: bytes of an element of a product, and of a weight and of the stream.

    In bf16 (autocast) the stream between blocks stays fp32, and weights are copied.
    """

    name: str
    element_bytes: int
    weight_bytes: int

    @property
    def is_autocast(self) -> bool:
        """Whether products are computed in fewer bytes than weights are stored in."""
        return self.element_bytes < self.weight_bytes


FORMATS = (
    Format(name="fp32", element_bytes=FLOAT, weight_bytes=FLOAT),
    Format(name="bf16", element_bytes=HALF, weight_bytes=FLOAT),
    Format(name="master", element_bytes=HALF, weight_bytes=HALF),
)


def format_number(precision: str) -> int:
    """Return the place in FORMATS of a precision of the run file."""
    return ("fp32", "bf16").index(precision) if not precision.endswith("_master") else 2


@dataclass(frozen=True, slots=True)
class Condition:
    """A comparison of the size of an axis with a number: `y=1`, `x>1`, `x<8`."""

    axis: str
    sign: str
    size: int

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Return the condition of a text such as "x>1"; raise ConfigError for any other text."""
        match = _CONDITION.fullmatch(text)
        if match is None or match[1] not in TENSOR_AXES:
            raise ConfigError(
                f"{text!r} is no condition on an axis: write x, y or z, then =, > or <, then a "
                f'number, as in "x>1"'
            )
        return cls(match[1], match[2], int(match[3]))

    def __str__(self) -> str:
        return f"{self.axis}{self.sign}{self.size}"

    def holds(self, mesh: Mesh) -> bool:
        """Return whether a mesh meets it."""
        return _COMPARE[self.sign](mesh.size(self.axis), self.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """Bytes of each sample, or of a microbatch if `is_fixed`, divided over some axes."""

    num_bytes: int
    is_fixed: bool = False
    over: tuple[str, ...] = ()
    when: tuple[Condition, ...] = ()

    def on(self, layout: Layout) -> int:
        """Return the bytes of one microbatch on one rank."""
        if not all(condition.holds(layout.mesh) for condition in self.when):
            return 0
        share = self.num_bytes // math.prod(layout.mesh.size(axis) for axis in self.over)
        return share if self.is_fixed else share * layout.microbatch_size


Amount = tuple[Term, ...]


def each(num_bytes: int, over: str = "", when: str = "") -> Amount:
    """Return bytes of each sample; `over` and `when` list axes and conditions, as in "x y"."""
    return _amount(num_bytes, over, when, is_fixed=False)


def fixed(num_bytes: int, over: str = "", when: str = "") -> Amount:
    """Return bytes of a microbatch of any size; `over` and `when` as in `each`."""
    return _amount(num_bytes, over, when, is_fixed=True)


def _amount(num_bytes: int, over: str, when: str, *, is_fixed: bool) -> Amount:
    if num_bytes == 0:
        return ()
    conditions = tuple(map(Condition.parse, when.split()))
    axes = tuple(over.split())
    return (Term(num_bytes=num_bytes, is_fixed=is_fixed, over=axes, when=conditions),)


def total(amount: Amount, layout: Layout) -> int:
    """Return the bytes of an amount for one microbatch on one rank."""
    return sum(term.on(layout) for term in amount)
