"""What a method of averaging is to the loop that drives it: hooks around a step, and a centre.

    begin_pass()        a forward is about to begin: overlapped exchanges start here
    ...                 forward, backward: the weights do not change
    before_step(lr)     the weights are still those the gradient was taken at
    optimizer.step()    any torch optimizer
    after_step(lr)      the force of the exchange is applied

One instance belongs to one worker and to the thread that runs its loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

State = dict[str, Any]
"""What torch.save takes: tensors, numbers and texts by name."""

BREAKDOWN = ("param_dev_dev", "data_host_dev", "param_host_dev", "fwd_bwd", "upd_dev", "upd_host")
"""The six parts of a step's time that the paper reports (You, Buluc, Demmel 2017, table 3)."""


@dataclass(frozen=True, slots=True)
class ExchangeMetrics:
    """What one worker has seen of the exchanges so far; times are of the wall clock."""

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
    step_norm: float = 0.0  # and of what the optimizer did in its step, by a sample of the weights
    center_move: float = 0.0  # |c' - c|: how far the last exchange moved the centre
    center_speed: float = 0.0  # the same as a share of |c|
    age_s: float = 0.0  # how old the centre was that the last exchange took the place of
    concurrency: int = 1  # most exchanges that were reckoned from the same centre
    num_retries: int = 0  # connections that broke and were made again
    max_queue: int = 0  # most requests that ever waited at the server
    lost_update: float = 0.0  # |applied forces - change of the centre|, without locks
    seconds: Mapping[str, float] = field(default_factory=dict)  # by the names of BREAKDOWN

    @property
    def staleness_max(self) -> int:
        """How many versions the stalest exchange had missed."""
        return max(self.staleness, default=0)

    @property
    def staleness_p99(self) -> int:
        """How many versions were missed at most by 99 of 100 exchanges."""
        most = 0.99 * self.staleness.total()
        num_seen = 0
        for missed, times in sorted(self.staleness.items()):
            num_seen += times
            if num_seen >= most:
                return missed
        return 0


class Method(Protocol):
    """What ElasticAverage drives; one instance a worker."""

    def before_step(self, lr: float) -> None:
        """Take note that the optimizer is about to step; the gradient belongs to these weights."""

    def after_step(self, lr: float) -> None:
        """Take note that it has stepped."""

    def begin_pass(self) -> None:
        """Take note that a forward is about to begin; any number of times before a step."""

    def sync_now(self, lr: float) -> None:
        """Exchange now, in place of this step's own exchange if it has one."""

    def center(self) -> Tensor:
        """Return the flat centre, as new as this worker can have it, for reading only."""

    def flush(self) -> None:
        """Finish what is in flight."""

    def metrics(self) -> ExchangeMetrics:
        """Return what was seen so far."""

    def tensors(self) -> list[Tensor]:
        """Return what is kept between steps, besides the weights themselves."""

    def state_dict(self) -> State:
        """Return copies of everything a bit-exact resume needs, but the weights."""

    def load_state_dict(self, state: State) -> None:
        """Continue from what state_dict returned."""

    def close(self) -> None:
        """Release what the method holds; it cannot be used afterwards."""
