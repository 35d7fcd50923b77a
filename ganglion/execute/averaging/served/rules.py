"""How a served centre applies the writes of workers, by family of methods.

    Elastic     reads w, replies the old c, c += rate * (w - c)      Async EASGD, Original EASGD
    Additive    reads an update u, c += u, replies the new c         Async SGD, DOWNPOUR
    the same with momentum:       v = mu v + u, c += v               Async MSGD

An update is what the worker's own torch optimizer did to its weights (for plain SGD: -lr * g), so
weight decay, clipping and schedules stay with the worker.
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

    def apply(self, center: Tensor, sent: Tensor, rate: float, reply: Tensor) -> None:
        """Change `center` and fill `reply`."""

    def moved(self) -> float | None:
        """Return the distance of the last write; None if it moved by exactly what was sent."""

    def tensors(self) -> list[Tensor]:
        """Return the memory kept between writes, without the centre."""

    def state(self) -> Mapping[str, Tensor]:
        """Return the state for a snapshot, without the centre."""

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue from the state of a snapshot."""


class Elastic:
    """Move the centre towards the worker, and reply the centre before."""

    kind = EXCHANGE

    def __init__(self) -> None:
        """Keep one buffer for the force: new memory costs more than the sum."""
        self._force: Tensor | None = None

    def apply(self, center: Tensor, sent: Tensor, rate: float, reply: Tensor) -> None:
        """Do the centre's half of an elastic step."""
        reply.copy_(center)
        self._force = elastic_force(sent, center, rate, out=self._force)
        center.add_(self._force)

    def tensors(self) -> list[Tensor]:
        """Return the buffer of the force."""
        return [] if self._force is None else [self._force]

    def moved(self) -> float | None:
        """Return None: the worker knows its own force."""
        return None

    def state(self) -> Mapping[str, Tensor]:
        """Return nothing: the centre is the whole state."""
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Ignore an empty state."""


class Additive:
    """Add an update, through a velocity if there is momentum, and reply the new centre."""

    kind = PUSH

    def __init__(self, momentum: float = 0.0, *, num_trained: int | None = None) -> None:
        """Keep one velocity for all workers.

        Elements from `num_trained` on are buffers and get no momentum: a running variance that
        overshoots would turn negative.
        """
        if not 0.0 <= momentum < 1.0:
            raise ConfigError(f"momentum = {momentum}: give 0 or more, and less than 1")
        self._momentum = momentum
        self._num_trained = num_trained
        self._velocity: Tensor | None = None
        self._rest = 0.0  # distance of the last write in elements without momentum

    def apply(self, center: Tensor, sent: Tensor, rate: float, reply: Tensor) -> None:
        """Add the update, or the velocity that includes it."""
        if self._momentum:
            end = center.numel() if self._num_trained is None else self._num_trained
            self._push(center[:end], sent[:end])
            center[end:].add_(sent[end:])
            self._rest = float(torch.linalg.vector_norm(sent[end:]))
        else:
            center.add_(sent)
        reply.copy_(center)

    def moved(self) -> float | None:
        """Return the distance of the last write; None without momentum."""
        if self._velocity is None:
            return None
        return math.hypot(float(torch.linalg.vector_norm(self._velocity)), self._rest)

    def _push(self, center: Tensor, sent: Tensor) -> None:
        if self._velocity is None:
            self._velocity = torch.zeros_like(center)
        self._velocity.mul_(self._momentum).add_(sent)
        center.add_(self._velocity)

    def tensors(self) -> list[Tensor]:
        """Return the velocity, if there is one."""
        return [] if self._velocity is None else [self._velocity]

    def state(self) -> Mapping[str, Tensor]:
        """Return the velocity, if there is one."""
        return {} if self._velocity is None else {"velocity": self._velocity}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue with a saved velocity of the trained elements."""
        velocity = state.get("velocity")
        self._velocity = None if velocity is None else velocity[: self._num_trained]
