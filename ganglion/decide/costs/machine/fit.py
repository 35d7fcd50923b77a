"""Fit the numbers of a cluster file to measured times.

A measured time is taken for a sum of terms. Each term is an amount, which the cost model knows,
times a number of seconds, which is sought:

    product of matrices      flop, memory bytes
    forward, backward        flop, memory bytes, activation bytes, calls of blocks, of the engine
    update                   bytes of weights and state, one update
    message                  one latency, bytes
    collective               one call, steps of a ring, bytes

The amounts are those of the cost model itself: it is asked for the time on a machine where one term
alone takes time, a second for each unit. So a fit and a prediction cannot differ in their formulas.

The numbers are not negative and make the relative errors small: least absolute errors, by least
squares with weights that fall with the error of the round before. A time during which the machine
did something else then counts little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from ganglion.decide.costs.cluster import BYTES_PER_GBIT, Compute, Link
from ganglion.errors import DataError

FLOP, MEMORY_BYTE, ACTIVATION_BYTE = "flop", "memory_byte", "activation_byte"
BLOCK, ACTION, UPDATE, UPDATE_BYTE = "block", "action", "update", "update_byte"
LATENCY, BYTE = "latency", "byte"
CALL, STEP, RING_BYTE = "call", "step", "ring_byte"
BUCKET = "all-reduce of a bucket"  # the kind of time that gradients take

_ROUNDS = 30
_SMALLEST = 1e-3  # errors below this share of a time weigh alike
_UNIT_GBPS = 1 / BYTES_PER_GBIT  # a byte a second
_NONE = Compute(
    fp32_tflops=math.inf,
    bf16_tflops=math.inf,
    efficiency=1.0,
    memory_gib=1.0,
    memory_bandwidth_gbps=math.inf,
    activation_gbps=math.inf,
    update_gbps=math.inf,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One measured time: its kind, what it was of, and its amounts by term."""

    kind: str
    label: str
    seconds: float
    terms: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class FitError:
    """The relative errors of a fit over the times of one kind."""

    kind: str
    num_timings: int
    median: float
    worst: float
    worst_label: str


@dataclass(frozen=True, slots=True)
class Fit:
    """Seconds for a unit of each term."""

    seconds: Mapping[str, float]

    def time_s(self, timing: Timing) -> float:
        """Return what the fit gives for a measured time."""
        return sum(self.seconds[name] * amount for name, amount in timing.terms.items())

    def error(self, timing: Timing) -> float:
        """Return (fitted - measured) / measured."""
        return self.time_s(timing) / timing.seconds - 1

    def errors(self, timings: Iterable[Timing]) -> list[FitError]:
        """Return the errors of each kind of time, in the order of the kinds."""
        by_kind: dict[str, list[tuple[float, str]]] = {}
        for timing in timings:
            entry = (abs(self.error(timing)), timing.label)
            by_kind.setdefault(timing.kind, []).append(entry)
        return [
            FitError(
                kind=kind,
                num_timings=len(found),
                median=median([error for error, _ in found]),
                worst=max(found)[0],
                worst_label=max(found)[1],
            )
            for kind, found in by_kind.items()
        ]


def compute_terms(seconds_on: Callable[[Compute], float]) -> dict[str, float]:
    """Return the amounts by term of a time that the cost model computes from [compute]."""
    machines = {
        FLOP: _with(fp32_tflops=1e-12, bf16_tflops=1e-12),
        MEMORY_BYTE: _with(memory_bandwidth_gbps=_UNIT_GBPS),
        ACTIVATION_BYTE: _with(activation_gbps=_UNIT_GBPS),
        BLOCK: _with(block_s=1.0),
        ACTION: _with(action_s=1.0),
        UPDATE: _with(update_s=1.0),
        UPDATE_BYTE: _with(update_gbps=_UNIT_GBPS),
    }
    amounts = {term: seconds_on(compute) for term, compute in machines.items()}
    return {term: amount for term, amount in amounts.items() if amount > 0}


def _with(**changes: float) -> Compute:
    values = {name: getattr(_NONE, name) for name in Compute.__dataclass_fields__}
    return Compute(**{**values, **changes})


# --- the fit -------------------------------------------------------------------------------------


def fit_times(timings: Sequence[Timing], what: str) -> Fit:
    """Return the seconds of every term that the times have; `what` names them in errors.

    Raise DataError for fewer times than unknown numbers and one more: nothing could be said about
    the error of such a fit.
    """
    names = tuple(dict.fromkeys(name for timing in timings for name in timing.terms))
    if len(timings) <= len(names) or not names:
        raise DataError(
            f"{len(timings)} measured times of {what} cannot fix {len(names)} numbers "
            f"({', '.join(names)}): at least {len(names) + 1} of different sizes are needed"
        )
    wrong = [one for one in timings if not 0 < one.seconds < math.inf]
    if wrong:
        raise DataError(
            f"the measured time of {what} {wrong[0].label} is {wrong[0].seconds} s, which no fit "
            f"can use: measure it again"
        )
    rows = [[one.terms.get(name, 0.0) / one.seconds for name in names] for one in timings]
    return Fit(dict(zip(names, _robust(rows), strict=True)))


def _robust(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return non-negative x that makes sum |row . x - 1| small."""
    scales = [max(row[i] for row in rows) for i in range(len(rows[0]))]
    scaled = [[value / scale for value, scale in zip(row, scales, strict=True)] for row in rows]
    weights = [1.0] * len(rows)
    found = [0.0] * len(scales)
    for _ in range(_ROUNDS):
        found = _non_negative(scaled, weights)
        errors = [abs(_dot(row, found) - 1) for row in scaled]
        weights = [1 / max(error, _SMALLEST) for error in errors]
    return [value / scale for value, scale in zip(found, scales, strict=True)]


def _non_negative(rows: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float]:
    """Return the best of the least squares over every choice of terms that are not 0.

    There are seven terms at most, so 127 choices.
    """
    size = len(rows[0])
    pairs = list(zip(rows, weights, strict=True))
    gram = [[sum(w * r[i] * r[j] for r, w in pairs) for j in range(size)] for i in range(size)]
    right = [sum(w * r[i] for r, w in pairs) for i in range(size)]
    best, best_loss = [0.0] * size, math.inf
    for count in range(1, size + 1):
        for chosen in combinations(range(size), count):
            values = _solve(
                [[gram[i][j] for j in chosen] for i in chosen], [right[i] for i in chosen]
            )
            if values is None or min(values) < 0:
                continue
            found = [0.0] * size
            for place, value in zip(chosen, values, strict=True):
                found[place] = value
            # |A x - 1|^2 up to a constant
            loss = _dot(found, [_dot(row, found) for row in gram]) - 2 * _dot(right, found)
            if loss < best_loss:
                best, best_loss = found, loss
    return best


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Return x with matrix x = right, by elimination; None if there is no one solution."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for place in range(size):
        pivot = max(range(place, size), key=lambda row: abs(rows[row][place]))
        rows[place], rows[pivot] = rows[pivot], rows[place]
        if abs(rows[place][place]) < 1e-12 * max(abs(matrix[place][place]), 1e-300):
            return None
        for row in range(size):
            if row != place:
                factor = rows[row][place] / rows[place][place]
                rows[row] = [a - factor * b for a, b in zip(rows[row], rows[place], strict=True)]
    return [row[size] / row[place] for place, row in enumerate(rows)]


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


# --- what the file says --------------------------------------------------------------------------


def rounded(value: float) -> float:
    """Return a number with four digits: a fit knows no more."""
    return float(f"{value:.4g}")


def compute_from(
    fit: Fit, *, fp32_flops: float, bf16_flops: float, memory_gib: float, jitter: float = 0.0
) -> Compute:
    """Return the [compute] of a fit, with the best rates that were measured as the peaks.

    A term that took no time gets a rate so high that it takes none.
    """
    seconds = fit.seconds
    if not seconds.get(FLOP):
        raise DataError(
            "the measured times do not rise with their flop, so that no rate can be fitted: "
            "measure larger products"
        )
    rate = 1 / seconds[FLOP]
    peak = max(fp32_flops, rate)
    memory_gbps = _gbps(seconds.get(MEMORY_BYTE))
    return Compute(
        fp32_tflops=rounded(peak / 1e12),
        bf16_tflops=rounded(bf16_flops / 1e12),
        efficiency=min(1.0, rounded(rate / peak)),
        memory_gib=rounded(memory_gib),
        memory_bandwidth_gbps=memory_gbps,
        activation_gbps=_gbps(seconds.get(ACTIVATION_BYTE)),
        update_gbps=_gbps(seconds.get(UPDATE_BYTE)),
        jitter=jitter,
        block_s=rounded(seconds.get(BLOCK, 0.0)),
        update_s=rounded(seconds.get(UPDATE, 0.0)),
        action_s=rounded(seconds.get(ACTION, 0.0)),
    )


_FREE_GBPS = 1e6


def _gbps(byte_s: float | None) -> float | None:
    """Return the rate of a term; None if no time had it."""
    if byte_s is None:
        return None
    return rounded(min(_FREE_GBPS, 1 / byte_s / BYTES_PER_GBIT)) if byte_s else _FREE_GBPS


def link_from(
    messages: Fit, rings: Fit | None, buckets: Fit | None = None, *, shared: bool
) -> Link:
    """Return a link from the fits of messages, collectives and buckets, of those there were."""
    bandwidth_gbps = _gbps(messages.seconds[BYTE])
    assert bandwidth_gbps is not None, "messages have bytes"
    return Link(
        latency_s=rounded(messages.seconds[LATENCY]),
        bandwidth_gbps=bandwidth_gbps,
        collective_gbps=None if rings is None else _gbps(rings.seconds[RING_BYTE]),
        bucket_gbps=None if buckets is None else _gbps(buckets.seconds[RING_BYTE]),
        collective_latency_s=None if rings is None else rounded(rings.seconds[STEP]),
        collective_s=0.0 if rings is None else rounded(rings.seconds[CALL]),
        shared=shared,
    )
