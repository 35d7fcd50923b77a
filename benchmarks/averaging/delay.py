"""A price for every message of the averaging methods: whoever carries one sleeps for it.

    tree of workers      the thread of the tree sleeps, then sends            SlowTransport
    served centre        the server takes and gives one message at a time     SlowListener
    centre on a host     copies from the device and back, one each way        HostCopies
    shared memory        has no messages: a read and a write cost one each    SlowMemory

A sleep in a thread or process of its own passes beside the sleep that stands for a pass, so what
overlaps really overlaps.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from torch import Tensor

from ganglion.decide.simulator.averaging.costs import MessagePrice
from ganglion.execute.averaging.methods.centers import Center
from ganglion.execute.averaging.methods.shared_center import SharedCenter
from ganglion.execute.averaging.methods.sums import Meter
from ganglion.execute.averaging.served.connections import CenterListener, Lost, Received
from ganglion.execute.comm import Arrival, Transport, World
from ganglion.execute.comm.message import Numbers
from ganglion.trace import Recorder

_SMALL_BYTES = 1024  # a header or a vote, never the weights


class Carrier:
    """What carries the messages of one process: it takes its time, and writes it down."""

    def __init__(
        self, price: MessagePrice, num_parts: int = 1, *, small_are_free: bool = False
    ) -> None:
        """Let a message of weights cost as much as `num_parts` messages that share its bytes.

        Others are small and may be free, to see what they cost.
        """
        self._price, self._num_parts, self._small_are_free = price, num_parts, small_are_free
        self._spans: list[tuple[float, float]] = []

    @property
    def num_messages(self) -> int:
        """How many were carried so far."""
        return len(self._spans)

    def carry(self, num_bytes: int) -> float:
        """Take the time of a message; return how long that was."""
        is_small = num_bytes <= _SMALL_BYTES
        if is_small and self._small_are_free:
            return 0.0
        num_parts = 1 if is_small else self._num_parts
        begin_s = time.monotonic()
        time.sleep(self._price.of(num_bytes, num_parts))
        end_s = time.monotonic()
        self._spans.append((begin_s, end_s))
        return end_s - begin_s

    def carried_s(self, begin_s: float, end_s: float) -> float:
        """Return the seconds of messages between two moments, which all processes tell alike."""
        return sum(max(0.0, min(b, end_s) - max(a, begin_s)) for a, b in self._spans)


class SlowTransport(Transport):
    """A transport whose sender is busy with a message for its time."""

    def __init__(self, inner: Transport, carrier: Carrier) -> None:
        super().__init__(inner.rank, inner.peers, None)
        self._inner, self._carrier = inner, carrier

    def _carry(self, target: int, kind: str, tensor: Tensor, numbers: Numbers) -> None:
        step, stage, microbatch, version, _ = numbers
        self._carrier.carry(tensor.nbytes)
        self._inner.post(
            target, kind, tensor, step=step, stage=stage, microbatch=microbatch, version=version
        )

    def receive(self, timeout_s: float, awaiting: str = "a message") -> Arrival:
        return self._inner.receive(timeout_s, awaiting)

    def poll(self, timeout_s: float = 0.0) -> Arrival | None:
        return self._inner.poll(timeout_s)

    def flush(self, timeout_s: float) -> None:
        self._inner.flush(timeout_s)

    def close(self) -> None:
        self._inner.close()


def slow_world(world: World, carrier: Carrier) -> World:
    """Return the same world with slow transports; groups, at which workers only meet, are not."""

    def transport_along(axes: tuple[str, ...], trace: Recorder | None) -> Transport:
        return SlowTransport(world.open_transport(*axes, trace=trace), carrier)

    return World(
        world.rank,
        world.mesh,
        lambda axes: world.group(*axes),
        transport_along,
        carrier=world.carrier,
    )


class SlowListener(CenterListener):
    """The listener of a centre that is busy with one message at a time, in and out."""

    def __init__(self, listen_on: str | None = None, *, carrier: Carrier) -> None:
        super().__init__(listen_on)
        self._carrier = carrier
        self._come: deque[Received | Lost] = deque()

    def events(self, timeout_s: float) -> list[Received | Lost]:
        """Return one event, so that its answer does not wait for what came after it."""
        if not self._come:
            self._come.extend(super().events(timeout_s))
        if not self._come:
            return []
        event = self._come.popleft()
        if isinstance(event, Received):
            self._carrier.carry(event.arrival.tensor.nbytes)
        return [event]

    def send(self, client: int, kind: str, data: Tensor, *, step: int, version: int) -> None:
        self._carrier.carry(data.nbytes)
        super().send(client, kind, data, step=step, version=version)


class HostCopies:
    """A centre in the memory of a host: weights come from the device, the force goes back."""

    def __init__(self, inner: Center, carrier: Carrier, meter: Meter) -> None:
        self._inner, self._carrier, self._meter = inner, carrier, meter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def start(self, worker: Tensor) -> None:
        self._meter.wait_s += self._carrier.carry(worker.nbytes)
        self._inner.start(worker)

    def apply(self, worker: Tensor, alpha: float, num_workers: int) -> Tensor:
        force = self._inner.apply(worker, alpha, num_workers)
        self._meter.wait_s += self._carrier.carry(force.nbytes)
        return force


class SlowMemory:
    """Shared memory as if it were at a host: a read brings it here, an addition goes there."""

    def __init__(self, inner: SharedCenter, carrier: Carrier) -> None:
        self._inner, self._carrier = inner, carrier

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read(self, out: Tensor) -> None:
        self._inner.read(out)
        self._carrier.carry(out.nbytes)

    def add(self, worker: int, delta: Tensor) -> None:
        self._carrier.carry(delta.nbytes)
        self._inner.add(worker, delta)
