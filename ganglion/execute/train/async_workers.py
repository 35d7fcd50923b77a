"""Workers that do not wait for each other: own results, and numbers of the others as they arrive.

Workers of an asynchronous method do not agree at the end of a step. The leaders of all workers
gather a table of a few numbers beside the steps: each adds its newest numbers when the last table
is complete, and never waits for one.

    worker 0   step 1 | 2 | 3 | 4 |          | evaluate     a table is complete when the slowest
    worker 1   step 1     | 2     | 3 | 4    | evaluate     worker has added its numbers
                                      meet --'

Before an evaluation, a checkpoint and the end they meet: tables are gathered until all workers
wait. A worker stops when a table holds a request to stop; all read the same tables, so all stop,
each at a step of its own.

Server processes of a centre, if the plan has any, are the last of the launch, outside the mesh.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ganglion.decide.plan import Plan
from ganglion.decide.topology import TENSOR_AXES, Launch
from ganglion.execute.averaging import own_address, server_place
from ganglion.execute.averaging.served import CountingStore, ServerProcess
from ganglion.execute.comm import Group, Handle, World, open_store
from ganglion.execute.pipeline import Executor, Share
from ganglion.execute.update import StepResult

logger = logging.getLogger(__name__)

_LOSS, _NORM, _STOP, _PEAK, _WAITS = range(5)
_NUM = 5


@dataclass(frozen=True, slots=True)
class _Summary:
    """The newest numbers of all workers: mean loss and norm, and the greatest memory."""

    loss: float
    grad_norm: float
    peak_bytes: int
    stops: bool
    all_wait: bool


class Notices:
    """The tables that leaders gather, shared with the ranks of each worker."""

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

    def step(self, result: StepResult) -> _Summary:
        """Add the numbers of a step if the last table is complete; return the newest summary."""
        numbers = [result.loss, result.grad_norm, result.stop_requested, result.peak_bytes, 0]
        self._own = torch.tensor(numbers, dtype=torch.float64)
        if self._is_leader:
            if self._handle is not None and self._handle.is_done():
                self._read()
            if self._handle is None:
                self._start()
        return self._shared(all_wait=False)

    def meet(self) -> _Summary:
        """Return when all workers wait here, or when a table brings a request to stop."""
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
        """Wait for the table; return whether all workers were waiting when they filled it."""
        assert self._handle is not None, "started before"
        self._handle.wait()
        self._handle = None
        self._known = self._table.view(self._leaders.size, _NUM)
        self._stops |= bool(self._known[:, _STOP].any())
        return bool(self._known[:, _WAITS].all())

    def _shared(self, *, all_wait: bool) -> _Summary:
        """Return the summary of the leader, on all ranks of its worker."""
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
        return _Summary(
            loss=float(found[_LOSS]),
            grad_norm=float(found[_NORM]),
            peak_bytes=int(found[_PEAK]),
            stops=self._stops,
            all_wait=bool(found[_WAITS]),
        )


def step_group(world: World, plan: Plan) -> Group | None:
    """Return the ranks that agree on every step: one asynchronous worker, or None for all."""
    return world.group("pipe", *TENSOR_AXES, use="worker") if plan.drifts else None


def worker_executor(executor: Executor, world: World, plan: Plan) -> Executor:
    """Return `executor`, wrapped if the workers of the plan are asynchronous."""
    return AsyncWorkerExecutor(executor, Notices(world)) if plan.drifts else executor


class AsyncWorkerExecutor:
    """An executor whose ranks agree inside their worker only; each result comes one step late.

    So the result of the step before a meeting can still carry a request to stop.
    """

    def __init__(self, inner: Executor, notices: Notices) -> None:
        """Wrap `inner`, which trains one worker."""
        self._inner, self._notices = inner, notices
        self._held: StepResult | None = None
        self._has_trained = False

    def begin_at(self, step: int) -> None:
        """Continue after `step` updates."""
        self._inner.begin_at(step)

    def train(self, batch: Share) -> Iterator[StepResult]:
        """Train on a batch; yield the result of the batch before."""
        for result in self._inner.train(batch):
            self._has_trained = True
            known = self._notices.step(result)
            before, self._held = self._held, _with(result, known)
            if before is not None:
                yield replace(before, stop_requested=known.stops)

    def drain(self) -> Iterator[StepResult]:
        """Meet the other workers if anything was trained since; yield the result held back."""
        if self._has_trained:
            known = self._notices.meet()
            self._has_trained = not known.all_wait
            held, self._held = self._held, None
            if held is not None:
                yield _with(held, known)

    def older_weights(self) -> dict[str, Tensor]:
        """Return the older weights that the worker still needs."""
        return self._inner.older_weights()

    def evaluate(self, batch: Share) -> float | None:
        """Return the mean loss of this rank's share of a batch."""
        return self._inner.evaluate(batch)

    def outputs(self, inputs: Tensor) -> Tensor:
        """Return the outputs of the newest weights."""
        return self._inner.outputs(inputs)

    def request_stop(self) -> None:
        """Ask all workers to stop, each at the step that reads the request."""
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


def _with(result: StepResult, known: _Summary) -> StepResult:
    return replace(
        result,
        loss=known.loss,
        grad_norm=known.grad_norm,
        peak_bytes=known.peak_bytes,
        stop_requested=known.stops,
    )


# --- server processes ---------------------------------------------------------------------------


def serve_centers(plan: Plan, launch: Launch, timeout_s: float = 300.0) -> bool:
    """Serve until all workers have left, if this process is a server; return whether it was.

    A script calls it before `parallelize`, with the result of `read_launch`.
    """
    if not plan.servers:
        return False
    place = server_place(launch, plan.servers)
    if place is None:
        return False
    seen = ServerProcess(open_store(launch, timeout_s), place, timeout_s).serve(
        listen_on=own_address(launch)
    )
    for number, metrics in enumerate(seen):
        logger.info("served part %d of centre %d: %s", place, number, metrics)
    return True


def workers_of(launch: Launch, plan: Plan) -> Launch:
    """Return the same launch without its servers."""
    return replace(launch, num_ranks=launch.num_ranks - plan.servers)


def store_of(launch: Launch, plan: Plan, timeout_s: float) -> CountingStore | None:
    """Return the store through which workers find the servers of a plan; None without servers."""
    return open_store(launch, timeout_s) if plan.servers else None
