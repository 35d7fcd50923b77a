"""Measurements of one worker: exchanges, movement of the centre, and the time of a loop."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ganglion.execute.averaging.methods.packed import Packed

BREAKDOWN = ("param_dev_dev", "data_host_dev", "param_host_dev", "fwd_bwd", "upd_dev", "upd_host")
"""The six parts of a step's time that the paper reports (You, Buluc, Demmel 2017, table 3)."""

_BLOCK = 1 << 16  # elements: differences of so many stay in the cache of a core
_DEVICE_BLOCK = 1 << 24  # on devices, few launches count more


@dataclass(frozen=True, slots=True)
class ExchangeMetrics:
    """The exchanges of one worker so far; times are of the wall clock."""

    num_workers: int = 1
    num_steps: int = 0
    num_exchanges: int = 0
    num_discarded: int = 0  # exchanges that were given up, or refused because too stale
    sent_bytes: int = 0
    wait_s: float = 0.0  # spent blocked, waiting for an exchange
    comm_s: float = 0.0  # from the start of each exchange to its end, hidden or not
    exposed_s: float = 0.0  # the part of comm_s that compute did not hide
    staleness: Counter[int] = field(default_factory=Counter)  # centre versions missed -> times
    consensus: float = 0.0  # |w - c| / |c|, as this worker sees it
    force: float = 0.0  # norm of the elastic force of the last exchange
    step_norm: float = 0.0  # and of the optimizer's step beside it, by a sample of the weights
    center_move: float = 0.0  # |c' - c|: how far the last exchange moved the centre
    center_speed: float = 0.0  # the same as a share of |c|
    age_s: float = 0.0  # age of the centre that the last exchange replaced
    concurrency: int = 1  # most exchanges that were computed from the same centre
    num_retries: int = 0  # connections that broke and were made again
    max_queue: int = 0  # most requests that ever waited at the server
    lost_update: float = 0.0  # |applied forces - change of the centre|, without locks
    seconds: Mapping[str, float] = field(default_factory=dict)  # by the names of BREAKDOWN

    @property
    def staleness_max(self) -> int:
        """Most versions that an exchange had missed."""
        return max(self.staleness, default=0)

    @property
    def staleness_p99(self) -> int:
        """Most versions that 99 of 100 exchanges had missed."""
        most = 0.99 * self.staleness.total()
        num_seen = 0
        for missed, times in sorted(self.staleness.items()):
            num_seen += times
            if num_seen >= most:
                return missed
        return 0


class Motion:
    """How far an exchange moved the centre, and the optimizer the worker in the step beside it.

    The centre's way is exact; the worker's is estimated from a sample, because no copy of all
    weights is kept. Both stay on the device until `seen` is called.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen_s = clock()
        self._age_s = 0.0
        self._moved: Tensor | float = 0.0
        self._before: Tensor | None = None
        self._step: Tensor | None = None
        self._scale = 1.0

    def note(self, moved: Tensor | float) -> None:
        """Record an exchange that moved the centre by this distance."""
        now_s = self._clock()
        self._age_s, self._seen_s = now_s - self._seen_s, now_s
        self._moved = moved

    def begin_step(self, packed: Packed) -> None:
        """Sample the weights before a step that has an exchange."""
        self._before = packed.sample()
        self._scale = math.sqrt(packed.numel / len(self._before))

    def end_step(self, packed: Packed) -> None:
        """Sample the weights after the step and before the force is applied."""
        if self._before is not None:
            self._step, self._before = packed.sample() - self._before, None

    def seen(self, metrics: ExchangeMetrics, center_norm: float) -> ExchangeMetrics:
        """Return `metrics` with the movement, relative to a centre of that norm."""
        moved = float(self._moved)
        step = 0.0 if self._step is None else float(torch.linalg.vector_norm(self._step))
        return replace(
            metrics,
            age_s=self._age_s,
            center_move=moved,
            center_speed=moved / center_norm if center_norm else 0.0,
            step_norm=step * self._scale,
        )


def distance(one: Tensor, other: Tensor) -> Tensor:
    """Return |one - other| in one pass, without memory of their size and without a device sync."""
    size = _BLOCK if one.device.type == "cpu" else _DEVICE_BLOCK
    parts = [slice(begin, begin + size) for begin in range(0, one.numel(), size)]
    norms = [torch.linalg.vector_norm(one[part] - other[part]) for part in parts]
    whole: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return whole


class Stopwatch:
    """The time of a loop by the names of BREAKDOWN, measured from the hooks alone.

    step ends      forward begins          step begins    step ends
    |--- data_host_dev ---|---- fwd_bwd ----|-- upd_dev ---|

    The time that a worker waits for exchanges is part of upd_dev and is reported apart.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._last_s = clock()
        self._in_pass = False
        self._spent = {"data_host_dev": 0.0, "fwd_bwd": 0.0, "upd_dev": 0.0}

    def resume(self) -> None:
        """Count from now on: the time since the last mark belongs to no step."""
        self._last_s = self._clock()
        self._in_pass = False

    def begin_pass(self) -> None:
        """Mark the first forward of a step; later ones are part of the same pass."""
        if not self._in_pass:
            self._mark("data_host_dev")
            self._in_pass = True

    def end_pass(self) -> None:
        """Mark that the optimizer is about to step."""
        self._mark("fwd_bwd")
        self._in_pass = False

    def end_step(self) -> None:
        """Mark the end of the step and its exchange."""
        self._mark("upd_dev")

    def seconds(self, wait_s: float) -> dict[str, float]:
        """Return the seconds of each part, with `wait_s` of them spent on communication."""
        update_s = max(0.0, self._spent["upd_dev"] - wait_s)
        return {**self._spent, "upd_dev": update_s, "param_dev_dev": wait_s}

    def _mark(self, part: str) -> None:
        now_s = self._clock()
        self._spent[part] += now_s - self._last_s
        self._last_s = now_s
