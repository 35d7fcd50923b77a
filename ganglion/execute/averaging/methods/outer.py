"""One form for local SGD, SlowMo, DiLoCo and their like: an optimizer outside moves the centre.

Every tau steps, with w the weights of a worker and c the centre:

    D = c - mean of w          the outer gradient
    c = outer optimizer(c, D)
    w = (1 - q) w + q c        the pull

| method                  | outer optimizer               | q | delay, fragments      |
|-------------------------|-------------------------------|---|-----------------------|
| local SGD               | SGD(1)                        | 1 |                       |
| SlowMo, BMUF            | SGD(lr, momentum)             | 1 |                       |
| DiLoCo                  | SGD(0.7, momentum 0.9, Nesterov) | 1 |                    |
| overlapped, streaming   | as DiLoCo, for each fragment  | any | applied `delay` steps late |

The outer optimizer is any of torch: it sees the centre as parameters of the model's own shapes.
Buffers (running statistics) are plainly averaged: momentum could make a variance negative. With a
delay, the sum runs beside the steps in between; waiting for it at once gives the same bits.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ganglion.decide.schedules.exchanges import Exchange, SyncExchange
from ganglion.errors import CommError, ConfigError
from ganglion.execute.averaging.methods.method import ExchangeMetrics, State
from ganglion.execute.averaging.methods.motion import Motion, distance
from ganglion.execute.averaging.methods.packed import Packed
from ganglion.execute.averaging.methods.sums import Bounds, Meter, Sum, Votes
from ganglion.execute.averaging.methods.sync import consensus, turns_seen

OuterFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def local_sgd() -> OuterFactory:
    """Let the centre be the mean of the workers."""
    return lambda parameters: torch.optim.SGD(parameters, lr=1.0)


def slow_momentum(lr: float = 1.0, momentum: float = 0.5) -> OuterFactory:
    """Give the movement of the mean momentum (SlowMo, BMUF), at a constant inner rate."""
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=momentum)


def diloco(lr: float = 0.7, momentum: float = 0.9) -> OuterFactory:
    """Give the movement of the mean Nesterov momentum (DiLoCo)."""
    return lambda ps: torch.optim.SGD(ps, lr=lr, momentum=momentum, nesterov=True)


class _Part:
    """One fragment: its range of the flat vector, its sum, its votes and its parameters."""

    def __init__(self, packed: Packed, center: Tensor, bounds: tuple[int, int], sums: Sum) -> None:
        self.range = slice(*bounds)
        self.trained = slice(bounds[0], min(bounds[1], packed.num_trained))
        self.sums = sums
        entries = [e for e in packed.entries if bounds[0] <= e.offset < self.trained.stop]
        self.parameters = [nn.Parameter(entry.view(center)) for entry in entries]
        self._gradients = [entry.view(sums.buffer, bounds[0]) for entry in entries]

    def give_gradients(self) -> None:
        """Let the outer optimizer see the gradients that lie in the memory of the sum."""
        for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
            parameter.grad = gradient

    def take_gradients(self) -> None:
        """Let it see none: a step then leaves these parameters alone."""
        for parameter in self.parameters:
            parameter.grad = None


class OuterAveraging:
    """Averages every tau steps, and lets an optimizer move the centre by what it finds."""

    def __init__(
        self,
        packed: Packed,
        center: Tensor,
        sums: Sequence[Sum],
        votes: Sequence[Votes],
        bounds: Bounds,
        turns: SyncExchange,
        outer: OuterFactory,
        meter: Meter,
        *,
        q: float = 1.0,
        overlap: bool = True,
        differences: bool = False,
    ) -> None:
        """Average the fragments of `bounds`; the weights and `center` must be the same on all.

        With `differences`, w - c is summed in place of w: that can be compressed.
        """
        if not 0 < q <= 1:
            raise ConfigError(f"q = {q} is no pull: give a number above 0, up to 1")
        self._packed, self._center, self._votes = packed, center, votes
        self.turns, self._meter, self._q = turns, meter, q
        self._overlap, self._differences = overlap, differences
        self._parts = [_Part(packed, center, b, s) for b, s in zip(bounds, sums, strict=True)]
        self.outer = outer([p for part in self._parts for p in part.parameters])
        self._motion = Motion()
        self._came: dict[int, dict[int, bool]] = {}  # votes by number of exchange, once it is here

    def outer_parameters(self) -> list[nn.Parameter]:
        """Return the centre as the outer optimizer sees it, in the order of the packed tensors."""
        return [parameter for part in self._parts for parameter in part.parameters]

    def begin_pass(self) -> None:
        """Have nothing to start: exchanges start right after a step."""

    def before_step(self, lr: float) -> None:
        """Have nothing to do: the exchange reads the weights after the step."""

    def after_step(self, lr: float) -> None:
        """End the exchanges that are due, and start those whose turn it is."""
        self.turns.on_step()
        self._end(self.turns.ending())
        self._begin(self.turns.starting())
        self._end(self.turns.ending())

    def sync_now(self, lr: float) -> None:
        """Exchange all fragments now; all workers call it."""
        self.flush()
        self._begin(self.turns.start_now())
        self._end(self.turns.in_flight)

    def center(self) -> Tensor:
        """Return the centre, the same on all workers."""
        return self._center

    def flush(self) -> None:
        """Apply what is in flight now, before it is due; all workers call it at the same step."""
        self._end(self.turns.in_flight)

    def abandon(self) -> None:
        """Give up what is in flight, without a wait for anybody."""
        for exchange in self.turns.in_flight:
            self._parts[exchange.fragment].sums.discard()
        self._came.clear()
        self.turns.discard()

    def catch_up(self, center: Tensor, version: int, lr: float) -> None:
        """Take the pull of exchanges that were given up here and applied by others."""
        missed = self.turns.missed(version)
        if missed:
            self._center.copy_(center)
        for exchange in missed:
            self._pull(self._parts[exchange.fragment])

    def metrics(self) -> ExchangeMetrics:
        """Return what was seen so far."""
        away, size = consensus(self._packed.gather(), self._center)
        seen = dataclasses.replace(turns_seen(self.turns, self._meter), consensus=away)
        return self._motion.seen(seen, size)

    def tensors(self) -> list[Tensor]:
        """Return the centre, the sums, and what the outer optimizer remembers."""
        sums = [tensor for part in self._parts for tensor in part.sums.tensors()]
        kept = [t for state in self.outer.state.values() for t in state.values()]
        return [self._center, *sums, *(t for t in kept if isinstance(t, Tensor))]

    def state_dict(self) -> State:
        """Return the centre, the outer optimizer, the counts and what is in flight."""
        return {
            "center": self._center.clone(),
            "step": self.turns.step,
            "version": self.turns.version,
            "outer": copy.deepcopy(self.outer.state_dict()),
            "sums": [part.sums.state() for part in self._parts],
            "in_flight": [self._saved(exchange) for exchange in self.turns.in_flight],
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from what state_dict returned; the last weights must be loaded, too."""
        self._drop()
        self._center.copy_(state["center"])
        self.outer.load_state_dict(copy.deepcopy(state["outer"]))
        self.turns.move_to(int(state["step"]), int(state["version"]))
        for part, saved in zip(
            self._parts, state.get("sums") or [{}] * len(self._parts), strict=True
        ):
            part.sums.load_state(saved)
        for saved in state.get("in_flight", []):
            self._resume(saved)

    def close(self) -> None:
        """Let nothing be in flight."""
        self._drop()

    # --- parts ---------------------------------------------------------------------------------

    def _begin(self, started: Sequence[Exchange]) -> None:
        if not started:
            return
        self._packed.check()
        worker = self._packed.gather()
        for exchange in started:
            part = self._parts[exchange.fragment]
            mine = worker[part.range]
            part.sums.buffer.copy_(mine)
            if self._differences:
                part.sums.buffer.sub_(self._center[part.range])
            part.sums.start()
            self._votes[exchange.fragment].start(mine)
            if not self._overlap:
                self._arrive(exchange)

    def _arrive(self, exchange: Exchange) -> dict[int, bool]:
        """Wait for the sum of an exchange; return the votes on it."""
        if exchange.number not in self._came:
            try:
                self._parts[exchange.fragment].sums.wait()
                self._came[exchange.number] = self._votes[exchange.fragment].wait()
            except CommError:
                self.abandon()
                raise
        return self._came[exchange.number]

    def _end(self, ending: Sequence[Exchange]) -> None:
        for exchange in ending:
            votes = self._arrive(exchange)
            del self._came[exchange.number]
            part = self._parts[exchange.fragment]
            if self.turns.on_votes(exchange, votes):
                old = self._old_center(part)
                self._move_center(part, exchange.num_workers)
                self._motion.note(distance(self._center[part.range], old))
                self._pull(part)
            else:
                part.sums.discard()

    def _old_center(self, part: _Part) -> Tensor:
        """Return a copy of the centre, where possible in memory that the pull is about to fill."""
        center = self._center[part.range]
        if self._q < 1:
            return center.clone()
        return self._packed.flat[part.range].copy_(center)

    def _move_center(self, part: _Part, num_workers: int) -> None:
        center, gradient = self._center[part.range], part.sums.buffer
        gradient.mul_(-1.0 / num_workers)
        if not self._differences:
            gradient.add_(center)
        part.give_gradients()
        self.outer.step()
        part.take_gradients()
        num_trained = part.trained.stop - part.trained.start
        center[num_trained:].sub_(gradient[num_trained:])

    def _pull(self, part: _Part) -> None:
        worker = self._packed.gather()
        trained, rest = part.trained, slice(part.trained.stop, part.range.stop)
        if self._q == 1:
            worker[trained].copy_(self._center[trained])
        else:
            worker[trained].lerp_(self._center[trained], self._q)
        worker[rest].copy_(self._center[rest])
        self._packed.scatter()

    def _saved(self, exchange: Exchange) -> dict[str, Any]:
        votes = self._arrive(exchange)
        total = self._parts[exchange.fragment].sums.buffer.clone()
        return {"exchange": dataclasses.asdict(exchange), "total": total, "votes": dict(votes)}

    def _resume(self, saved: dict[str, Any]) -> None:
        fields = {**saved["exchange"], "members": tuple(saved["exchange"]["members"])}
        exchange = Exchange(**fields)
        self._parts[exchange.fragment].sums.buffer.copy_(saved["total"])
        self._came[exchange.number] = dict(saved["votes"])
        self.turns.resume(exchange)

    def _drop(self) -> None:
        """End what is in flight without applying it."""
        for exchange in self.turns.in_flight:
            self._arrive(exchange)
        self.abandon()
