"""Local SGD, SlowMo, DiLoCo and similar methods: an outer optimizer moves the centre.

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

The outer optimizer is any of torch; its parameters are the centre in the shapes of the model.
Buffers (running statistics) are averaged without it: momentum could make a variance negative. With
a delay, the sum runs beside the steps in between; waiting for it at once gives the same bits.
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
from ganglion.execute.averaging.methods.method import NoOverlap, State
from ganglion.execute.averaging.methods.metrics import ExchangeMetrics, Motion, distance
from ganglion.execute.averaging.methods.packed import Packed
from ganglion.execute.averaging.methods.sums import Bounds, Meter, Sum, Votes
from ganglion.execute.averaging.methods.sync import consensus, turns_seen

OuterFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def local_sgd() -> OuterFactory:
    """Return an outer optimizer that sets the centre to the mean of the workers."""
    return lambda parameters: torch.optim.SGD(parameters, lr=1.0)


def slow_momentum(lr: float = 1.0, momentum: float = 0.5) -> OuterFactory:
    """Return an outer optimizer with momentum (SlowMo, BMUF), for a constant inner rate."""
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=momentum)


def diloco(lr: float = 0.7, momentum: float = 0.9) -> OuterFactory:
    """Return an outer optimizer with Nesterov momentum (DiLoCo)."""
    return lambda ps: torch.optim.SGD(ps, lr=lr, momentum=momentum, nesterov=True)


class _Fragment:
    """A part of the flat vector that is exchanged at once: its range, sum and parameters."""

    def __init__(self, packed: Packed, center: Tensor, bounds: tuple[int, int], sums: Sum) -> None:
        self.range = slice(*bounds)
        self.trained = slice(bounds[0], min(bounds[1], packed.num_trained))
        self.sums = sums
        entries = [e for e in packed.entries if bounds[0] <= e.offset < self.trained.stop]
        self.parameters = [nn.Parameter(entry.view(center)) for entry in entries]
        self._gradients = [entry.view(sums.buffer, bounds[0]) for entry in entries]

    def set_gradients(self) -> None:
        """Set the gradients of the parameters, in the memory of the sum."""
        for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
            parameter.grad = gradient

    def clear_gradients(self) -> None:
        """Clear the gradients, so that a step leaves these parameters unchanged."""
        for parameter in self.parameters:
            parameter.grad = None


class OuterAveraging(NoOverlap):
    """Averaging every tau steps, whose result an outer optimizer applies to the centre."""

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
        self._parts = [_Fragment(packed, center, b, s) for b, s in zip(bounds, sums, strict=True)]
        self.outer = outer([p for part in self._parts for p in part.parameters])
        self._motion = Motion()
        self._arrived: dict[int, dict[int, bool]] = {}  # votes by number of exchange, once complete

    def outer_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the outer optimizer, in the order of the packed tensors."""
        return [parameter for part in self._parts for parameter in part.parameters]

    def after_step(self, lr: float) -> None:
        """Finish the exchanges that are due, and start the next ones."""
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
        """Apply exchanges in flight before they are due; all workers call it at the same step."""
        self._end(self.turns.in_flight)

    def abandon(self) -> None:
        """Give up exchanges in flight, without waiting."""
        for exchange in self.turns.in_flight:
            self._parts[exchange.fragment].sums.discard()
        self._arrived.clear()
        self.turns.discard()

    def catch_up(self, center: Tensor, version: int, lr: float) -> None:
        """Apply the pull of exchanges that were given up here and applied by others."""
        missed = self.turns.missed(version)
        if missed:
            self._center.copy_(center)
        for exchange in missed:
            self._pull(self._parts[exchange.fragment])

    def metrics(self) -> ExchangeMetrics:
        """Return the measurements so far."""
        away, size = consensus(self._packed.gather(), self._center)
        seen = dataclasses.replace(turns_seen(self.turns, self._meter), consensus=away)
        return self._motion.seen(seen, size)

    def tensors(self) -> list[Tensor]:
        """Return the centre, the sums, and the state of the outer optimizer."""
        sums = [tensor for part in self._parts for tensor in part.sums.tensors()]
        kept = [t for state in self.outer.state.values() for t in state.values()]
        return [self._center, *sums, *(t for t in kept if isinstance(t, Tensor))]

    def state_dict(self) -> State:
        """Return the centre, the outer optimizer, the counts and exchanges in flight."""
        return {
            "center": self._center.clone(),
            "step": self.turns.step,
            "version": self.turns.version,
            "outer": copy.deepcopy(self.outer.state_dict()),
            "sums": [part.sums.state() for part in self._parts],
            "in_flight": [self._saved(exchange) for exchange in self.turns.in_flight],
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from the result of state_dict; the weights must be loaded, too."""
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
        """End exchanges in flight without applying them."""
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
                self._wait_for(exchange)

    def _wait_for(self, exchange: Exchange) -> dict[int, bool]:
        """Wait for the sum of an exchange; return the votes on it."""
        if exchange.number not in self._arrived:
            try:
                self._parts[exchange.fragment].sums.wait()
                self._arrived[exchange.number] = self._votes[exchange.fragment].wait()
            except CommError:
                self.abandon()
                raise
        return self._arrived[exchange.number]

    def _end(self, ending: Sequence[Exchange]) -> None:
        for exchange in ending:
            votes = self._wait_for(exchange)
            del self._arrived[exchange.number]
            part = self._parts[exchange.fragment]
            if self.turns.on_votes(exchange, votes):
                old = self._old_center(part)
                self._move_center(part, exchange.num_workers)
                self._motion.note(distance(self._center[part.range], old))
                self._pull(part)
            else:
                part.sums.discard()

    def _old_center(self, part: _Fragment) -> Tensor:
        """Return a copy of the centre, in memory that the pull will overwrite if possible."""
        center = self._center[part.range]
        if self._q < 1:
            return center.clone()
        return self._packed.flat[part.range].copy_(center)

    def _move_center(self, part: _Fragment, num_workers: int) -> None:
        center, gradient = self._center[part.range], part.sums.buffer
        gradient.mul_(-1.0 / num_workers)
        if not self._differences:
            gradient.add_(center)
        part.set_gradients()
        self.outer.step()
        part.clear_gradients()
        num_trained = part.trained.stop - part.trained.start
        center[num_trained:].sub_(gradient[num_trained:])

    def _pull(self, part: _Fragment) -> None:
        worker = self._packed.gather()
        trained, rest = part.trained, slice(part.trained.stop, part.range.stop)
        if self._q == 1:
            worker[trained].copy_(self._center[trained])
        else:
            worker[trained].lerp_(self._center[trained], self._q)
        worker[rest].copy_(self._center[rest])
        self._packed.scatter()

    def _saved(self, exchange: Exchange) -> dict[str, Any]:
        votes = self._wait_for(exchange)
        total = self._parts[exchange.fragment].sums.buffer.clone()
        return {"exchange": dataclasses.asdict(exchange), "total": total, "votes": dict(votes)}

    def _resume(self, saved: dict[str, Any]) -> None:
        fields = {**saved["exchange"], "members": tuple(saved["exchange"]["members"])}
        exchange = Exchange(**fields)
        self._parts[exchange.fragment].sums.buffer.copy_(saved["total"])
        self._arrived[exchange.number] = dict(saved["votes"])
        self.turns.resume(exchange)

    def _drop(self) -> None:
        """End exchanges in flight without applying them."""
        for exchange in self.turns.in_flight:
            self._wait_for(exchange)
        self.abandon()
