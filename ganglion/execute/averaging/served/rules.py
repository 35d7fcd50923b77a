"""What a served centre does with what workers send: one small rule for each family of methods.

    Elastic     reads w, replies the old c, c += rate * (w - c)      Async EASGD, Original EASGD
    Delta       hands c out, later reads e, c += e                   Async EASGD as of 2015
    Additive    reads an update u, c += u, replies the new c         Async SGD, DOWNPOUR
    the same with momentum:       v = mu v + u, c += v               Async MSGD, MDOWNPOUR
    WithMean    any of these, and z = (1 - k) z + k c                ADOWNPOUR, MVADOWNPOUR

An update is what the worker's own torch optimizer did to its weights (for plain SGD: -lr * g), so
weight decay, clipping and schedules are the user's, and the centre knows no optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from ganglion.decide.schedules.exchanges import EXCHANGE, PUSH
from ganglion.errors import ConfigError
from ganglion.execute.averaging.methods import elastic_force


class Rule(Protocol):
    """How a write changes the centre."""

    @property
    def kind(self) -> str:
        """The kind of request that writes: PUSH or EXCHANGE."""

    def apply(self, center: Tensor, sent: Tensor, rate: float, reply: Tensor) -> bool:
        """Change `center`; fill `reply` and return True, or return False if it stays empty."""

    def moved(self) -> float | None:
        """Return how far the last write moved the centre; None if it was just what was sent."""

    def shown(self, center: Tensor) -> Tensor:
        """Return what whoever looks at the centre is shown: to evaluate, not to train from."""

    def tensors(self) -> list[Tensor]:
        """Return what is kept between writes besides the centre."""

    def state(self) -> Mapping[str, Tensor]:
        """Return what a snapshot must keep besides the centre."""

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what a snapshot kept."""


class _Plain:
    def moved(self) -> float | None:
        """Leave it to the worker, who knows its own force or update."""
        return None

    def shown(self, center: Tensor) -> Tensor:
        """Show the centre itself."""
        return center


class _Stateless(_Plain):
    def state(self) -> Mapping[str, Tensor]:
        """Keep nothing."""
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue from nothing."""


class Elastic(_Stateless):
    """Move the centre to the worker; the worker gets the centre both halves are reckoned from."""

    kind = EXCHANGE

    def __init__(self) -> None:
        """Make room for the force with the first exchange: new memory costs more than the sum."""
        self._force: Tensor | None = None

    def apply(self, center: Tensor, sent: Tensor, rate: float, reply: Tensor) -> bool:
        """Do the centre's half of an elastic step."""
        reply.copy_(center)
        self._force = elastic_force(sent, center, rate, out=self._force)
        center.add_(self._force)
        return True

    def tensors(self) -> list[Tensor]:
        """Return the room of the force."""
        return [] if self._force is None else [self._force]


class Delta(_Stateless):
    """Add the force that a worker reckoned from a centre it had pulled."""

    kind = PUSH

    def tensors(self) -> list[Tensor]:
        """Keep nothing."""
        return []

    def apply(self, center: Tensor, sent: Tensor, rate: float, reply: Tensor) -> bool:
        """Add; there is nothing to tell."""
        center.add_(sent)
        return False


class Additive(_Plain):
    """Add an update, through a velocity if there is momentum, and tell the new centre."""

    kind = PUSH

    def __init__(
        self, momentum: float = 0.0, *, as_printed: bool = False, num_trained: int | None = None
    ) -> None:
        """Keep one velocity for all workers.

        Elements from `num_trained` on are buffers and get no momentum: a running variance that
        overshoots would turn negative. `as_printed` adds momentum * velocity instead of the
        velocity, as MDOWNPOUR stands in its paper (Zhang, Choromanska, LeCun 2015, supplement).
        """
        if not 0.0 <= momentum < 1.0:
            raise ConfigError(f"momentum = {momentum}: give 0 or more, and less than 1")
        self._momentum = momentum
        self._weight = momentum if as_printed else 1.0
        self._num_trained = num_trained
        self._velocity: Tensor | None = None
        self._rest = 0.0  # how far the last write moved what has no momentum

    def apply(self, center: Tensor, sent: Tensor, rate: float, reply: Tensor) -> bool:
        """Add the update, or what the velocity has become with it."""
        if self._momentum:
            end = center.numel() if self._num_trained is None else self._num_trained
            self._push(center[:end], sent[:end])
            center[end:].add_(sent[end:])
            self._rest = float(torch.linalg.vector_norm(sent[end:]))
        else:
            center.add_(sent)
        reply.copy_(center)
        return True

    def moved(self) -> float | None:
        """Return the way that the velocity took the centre, by one pass over it."""
        if self._velocity is None:
            return None
        pushed = self._weight * float(torch.linalg.vector_norm(self._velocity))
        return math.hypot(pushed, self._rest)

    def _push(self, center: Tensor, sent: Tensor) -> None:
        if self._velocity is None:
            self._velocity = torch.zeros_like(center)
        self._velocity.mul_(self._momentum).add_(sent)
        center.add_(self._velocity, alpha=self._weight)

    def tensors(self) -> list[Tensor]:
        """Return the velocity, if there is one."""
        return [] if self._velocity is None else [self._velocity]

    def state(self) -> Mapping[str, Tensor]:
        """Keep the velocity."""
        return {} if self._velocity is None else {"velocity": self._velocity}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue with the velocity that was kept, of what has one."""
        velocity = state.get("velocity")
        self._velocity = None if velocity is None else velocity[: self._num_trained]


class WithMean:
    """Another rule, and a running mean of the centre to be looked at.

    With a `rate` of 0 it is the mean of all centres so far, the first one included (ADOWNPOUR);
    else each new one counts `rate` (MVADOWNPOUR, 0.001 in its paper).
    """

    def __init__(self, inner: Rule, rate: float = 0.0) -> None:
        """Let `inner` move the centre."""
        if not 0.0 <= rate <= 1.0:
            raise ConfigError(f"mean_rate = {rate}: give 0 for the plain mean, or up to 1")
        self._inner, self._rate = inner, rate
        self._mean: Tensor | None = None
        self._num_seen = 0

    @property
    def kind(self) -> str:
        """The kind of request that writes."""
        return self._inner.kind

    def apply(self, center: Tensor, sent: Tensor, rate: float, reply: Tensor) -> bool:
        """Change the centre, and let the mean follow."""
        if self._mean is None:
            self._mean = center.clone()
        replies = self._inner.apply(center, sent, rate, reply)
        self._num_seen += 1
        self._mean.lerp_(center, self._rate or 1.0 / (self._num_seen + 1))
        return replies

    def moved(self) -> float | None:
        """Return how far the other rule moved the centre itself."""
        return self._inner.moved()

    def shown(self, center: Tensor) -> Tensor:
        """Show the mean."""
        return center if self._mean is None else self._mean

    def tensors(self) -> list[Tensor]:
        """Return the mean, and what the other rule keeps."""
        return [*self._inner.tensors(), *([] if self._mean is None else [self._mean])]

    def state(self) -> Mapping[str, Tensor]:
        """Keep the mean, of how many it is, and what the other rule keeps."""
        if self._mean is None:
            return self._inner.state()
        number = torch.tensor(self._num_seen)
        return {**self._inner.state(), "mean": self._mean, "num_seen": number}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue with the mean that was kept, or begin with the next centre."""
        self._inner.load(state)
        self._mean = state.get("mean")
        self._num_seen = int(state["num_seen"]) if "num_seen" in state else 0
