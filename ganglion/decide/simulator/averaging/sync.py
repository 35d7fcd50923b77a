"""Synchronous averaging on a virtual clock: Sync SGD and the three versions of Sync EASGD.

Each worker has its own time. An exchange without overlap begins when the slowest pass has ended;
with overlap, as soon as all have begun theirs: nothing it reads changes before the update.
"""

from __future__ import annotations

from ganglion.decide.schedules.exchanges import SyncExchange
from ganglion.decide.simulator.averaging.costs import AveragingCosts
from ganglion.decide.simulator.averaging.methods import AveragingMethod
from ganglion.decide.simulator.averaging.result import (
    EVERYONE,
    GATHER,
    REDUCE,
    STEP,
    AveragingEvent,
    AveragingLog,
    AveragingSimulation,
)


class Synchronous:
    """Drives SyncExchange; watches worker 0, which holds the centre unless the host does."""

    def __init__(
        self, method: AveragingMethod, costs: AveragingCosts, num_workers: int, tau: int
    ) -> None:
        self._costs, self._overlaps = costs, method.overlaps
        self._is_elastic, self._on_host = method.is_elastic, method.center_on_host
        self._turns = SyncExchange(range(num_workers), tau=tau)
        self._free_s = [0.0] * num_workers  # when each worker has done its last update
        self._log = AveragingLog()
        self._data_s = num_workers * costs.data_s()  # the host copies one batch after the other
        link = costs.host_link if self._on_host else costs.device_link
        num_ranks = num_workers + self._on_host  # a host is one more node of the tree
        self._comm_s = costs.reduction_s(num_ranks, link, method.is_packed)

    def run(self, name: str, num_batches: int) -> AveragingSimulation:
        """Return the simulation in which every worker takes the same number of steps."""
        num_workers = len(self._free_s)
        for step in range(num_batches // num_workers):
            self._step(step)
        return self._log.close(name, num_workers, num_batches, max(self._free_s))

    def _step(self, step: int) -> None:
        begins_s = [free_s + self._data_s for free_s in self._free_s]
        ends_s = [
            begin_s + self._costs.pass_of(worker, step, begin_s)
            for worker, begin_s in enumerate(begins_s)
        ]
        self._log.spend(
            data_host_dev=self._data_s, fwd_bwd=ends_s[0] - self._free_s[0] - self._data_s
        )
        if self._turns.starting():
            ends_s = self._exchange(step, ends_s)
        self._update(step, ends_s)
        self._turns.on_step()

    def _exchange(self, step: int, ends_s: list[float]) -> list[float]:
        """Return when each worker has finished both its pass and the exchange."""
        begin_s = max(self._free_s if self._overlaps else ends_s)
        end_s = begin_s + self._comm_s
        done_s = [max(pass_s, end_s) for pass_s in ends_s]
        waited_s = done_s[0] - ends_s[0]
        for exchange in self._turns.ending():
            self._turns.on_votes(exchange, dict.fromkeys(exchange.members, True))
        kind = GATHER if self._is_elastic else REDUCE
        self._log.events.append(AveragingEvent(end_s, kind, EVERYONE, step, self._turns.version))
        exposed_s = min(waited_s, self._comm_s)
        way = "param_host_dev" if self._on_host else "param_dev_dev"
        # The rest of the wait is for the passes of others.
        self._log.spend(**{way: exposed_s, "fwd_bwd": waited_s - exposed_s})
        return done_s

    def _update(self, step: int, ends_s: list[float]) -> None:
        costs = self._costs
        host_s = costs.host_center_s if self._on_host else 0.0
        self._free_s = [end_s + costs.update_s + host_s for end_s in ends_s]
        center_s = costs.device_center_s if self._is_elastic and not self._on_host else 0.0
        self._free_s[0] += center_s
        self._log.spend(upd_dev=costs.update_s + center_s, upd_host=host_s)
        self._log.events += [
            AveragingEvent(free_s, STEP, worker, step, self._turns.version)
            for worker, free_s in enumerate(self._free_s)
        ]
