"""Workers that wait for nobody: results of the own worker, and news of the others as they come.

A worker of an asynchronous method agrees with nobody at the end of a step. The leaders of all
workers exchange a few numbers beside the steps: each puts in its newest ones when the last table is
complete, and never waits for it.

    worker 0   step 1 | 2 | 3 | 4 |          | evaluate     a table is complete when the slowest
    worker 1   step 1     | 2     | 3 | 4    | evaluate     has put its numbers in
                                      meet --'

Where all must be at one place (evaluation, checkpoint, the end) they meet: tables are exchanged
until all say that they wait. A request to stop is obeyed by the worker that reads it in a table;
all read the same tables, so all obey it, each at a step of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ganglion.decide.plan import Plan
from ganglion.decide.topology import TENSOR_AXES
from ganglion.execute.comm import Group, Handle, World
from ganglion.execute.pipeline import Executor, Share
from ganglion.execute.update import StepResult

_LOSS, _NORM, _STOP, _PEAK, _WAITS = range(5)
_NUM = 5


@dataclass(frozen=True, slots=True)
class _News:
    """What a worker knows of all: means of their newest losses and norms, and the most memory."""

    loss: float
    grad_norm: float
    peak_bytes: int
    stops: bool
    all_wait: bool


class Notices:
    """The tables that leaders exchange, and what they tell the ranks of their own worker."""

    def __init__(self, world: World) -> None:
        """Make the groups; all ranks do so together."""
        self._worker: Group = world.group("pipe", *TENSOR_AXES, use="notices inside")
        self._leaders: Group = world.group("data", use="notices")
        self._is_leader = self._worker.index == 0
        self._own = torch.zeros(_NUM, dtype=torch.float64)
        self._known: Tensor | None = None
        self._stops = False
        self._handle: Handle | None = None
        self._table = torch.zeros(self._leaders.size, _NUM, dtype=torch.float64)

    def step(self, result: StepResult) -> _News:
        """Tell the numbers of a step when the last table is complete; return what is known."""
        numbers = [result.loss, result.grad_norm, result.stop_requested, result.peak_bytes, 0]
        self._own = torch.tensor(numbers, dtype=torch.float64)
        if self._is_leader:
            if self._handle is not None and self._handle.is_done():
                self._read()
            if self._handle is None:
                self._start()
        return self._shared(all_wait=False)

    def meet(self) -> _News:
        """Return when all workers wait here, or when one is known to ask for a stop."""
        self._own[_WAITS] = 1
        stopped_before, all_wait = self._stops, False
        while self._is_leader and not all_wait:
            if self._handle is None:
                self._start()
            all_wait = self._read()
            if self._stops and not stopped_before:
                break
        return self._shared(all_wait=all_wait)

    def _start(self) -> None:
        self._table = torch.empty(self._leaders.size * _NUM, dtype=torch.float64)
        self._handle = self._leaders.all_gather(self._table, self._own.clone())

    def _read(self) -> bool:
        """Take a table in; return whether all waited when they told."""
        assert self._handle is not None, "started before"
        self._handle.wait()
        self._handle = None
        self._known = self._table.view(self._leaders.size, _NUM)
        self._stops |= bool(self._known[:, _STOP].any())
        return bool(self._known[:, _WAITS].all())

    def _shared(self, *, all_wait: bool) -> _News:
        """Return what the leader knows, on all ranks of its worker."""
        found = torch.zeros(_NUM, dtype=torch.float64)
        if self._is_leader:
            rows = self._own.repeat(self._leaders.size, 1) if self._known is None else self._known
            rows = rows.clone()
            rows[self._leaders.index] = self._own
            found[_LOSS], found[_NORM] = rows[:, _LOSS].mean(), rows[:, _NORM].mean()
            found[_PEAK] = rows[:, _PEAK].max()
            found[_STOP], found[_WAITS] = float(self._stops), float(all_wait)
        if self._worker.size > 1:
            self._worker.broadcast(found, 0).wait()
        self._stops = bool(found[_STOP])
        return _News(
            loss=float(found[_LOSS]),
            grad_norm=float(found[_NORM]),
            peak_bytes=int(found[_PEAK]),
            stops=self._stops,
            all_wait=bool(found[_WAITS]),
        )


def agreeing(world: World, plan: Plan) -> Group | None:
    """Return the ranks that agree on every step: those of a worker that drifts, None for all."""
    return world.group("pipe", *TENSOR_AXES, use="worker") if plan.drifts else None


def drifting(executor: Executor, world: World, plan: Plan) -> Executor:
    """Return the executor of a worker, which agrees with others now and then if the plan drifts."""
    return DriftingExecutor(executor, Notices(world)) if plan.drifts else executor


class DriftingExecutor:
    """An executor whose ranks agree inside their worker only; each result comes one step late.

    So the result of the step before a meeting can still say that somebody asked for a stop.
    """

    def __init__(self, inner: Executor, notices: Notices) -> None:
        """Let `inner` train one worker."""
        self._inner, self._notices = inner, notices
        self._held: StepResult | None = None
        self._has_trained = False

    def begin_at(self, step: int) -> None:
        """Say that `step` updates have been made."""
        self._inner.begin_at(step)

    def train(self, batch: Share) -> Iterator[StepResult]:
        """Train on a batch; yield the result of the one before."""
        for result in self._inner.train(batch):
            self._has_trained = True
            news = self._notices.step(result)
            before, self._held = self._held, _with(result, news)
            if before is not None:
                yield replace(before, stop_requested=news.stops)

    def drain(self) -> Iterator[StepResult]:
        """Meet the other workers, unless nothing was trained since; yield what was held back."""
        if self._has_trained:
            news = self._notices.meet()
            self._has_trained = not news.all_wait
            held, self._held = self._held, None
            if held is not None:
                yield _with(held, news)

    def older_weights(self) -> dict[str, Tensor]:
        """Return what the worker needs besides the newest weights."""
        return self._inner.older_weights()

    def evaluate(self, batch: Share) -> float | None:
        """Return the mean loss of this rank's share of a batch."""
        return self._inner.evaluate(batch)

    def outputs(self, inputs: Tensor) -> Tensor:
        """Return what the newest weights make of some inputs."""
        return self._inner.outputs(inputs)

    def request_stop(self) -> None:
        """Ask all workers to stop, each at the step that hears of it."""
        self._inner.request_stop()

    def gather_numbers(self, numbers: list[float]) -> Tensor:
        """Return every rank's numbers; all workers call it together."""
        return self._inner.gather_numbers(numbers)

    def tensors(self) -> Mapping[str, Sequence[Tensor]]:
        """Return the versions of weights and the gradients of this worker."""
        return self._inner.tensors()

    def close(self) -> None:
        """Close the worker."""
        self._inner.close()


def _with(result: StepResult, news: _News) -> StepResult:
    return replace(
        result,
        loss=news.loss,
        grad_norm=news.grad_norm,
        peak_bytes=news.peak_bytes,
        stop_requested=news.stops,
    )
