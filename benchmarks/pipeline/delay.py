"""A link delay for both sides of the pipeline benchmark: a message counts as here when it is due.

The sender notes the moment in memory that the ranks of a contestant share; a message is due so
long after that, whoever reads it when. So delays do not add up, and one that passed while the
receiver computed costs it nothing:

    sent          due                        Ganglion: a message that is not due has not come yet
    |---- 2 ms ---|                                    for the engine, which does what is ready
                  receiver may use it        torch:    a receive returns, then waits until it is due
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from ganglion.execute.comm import Arrival, Transport, World
from ganglion.execute.comm.message import Numbers
from ganglion.trace import Recorder

_KINDS = {"forward": 0, "backward": 1}
_NUM_SLOTS = 256  # more microbatches than are ever in flight


class Departures:
    """When the messages of one contestant were sent, in a file that all its ranks map."""

    def __init__(self, path: Path, num_stages: int, delay_s: float) -> None:
        """Map `path`, made by whoever comes first; messages are due `delay_s` after their start."""
        self._delay_s = delay_s
        shape = (len(_KINDS), num_stages, _NUM_SLOTS)
        with path.open("ab") as file:
            file.truncate(8 * len(_KINDS) * num_stages * _NUM_SLOTS)
        self._sent_s = np.memmap(path, dtype=np.float64, mode="r+", shape=shape)

    def note(self, kind: str, stage: int, microbatch: int) -> None:
        """Say that a message to `stage` is sent now."""
        self._sent_s[_KINDS[kind], stage, microbatch % _NUM_SLOTS] = time.monotonic()

    def due_s(self, kind: str, stage: int, microbatch: int) -> float:
        """Return when a message that was read may be used."""
        sent_s = self._sent_s[_KINDS[kind], stage, microbatch % _NUM_SLOTS]
        return float(sent_s) + self._delay_s

    def wait(self, kind: str, stage: int, microbatch: int) -> None:
        """Return when a message is due."""
        _sleep_until(self.due_s(kind, stage, microbatch))


class DelayedTransport(Transport):
    """A transport that holds activations and gradients back until they are due."""

    def __init__(self, inner: Transport, departures: Departures) -> None:
        super().__init__(inner.rank, inner.peers, None)
        self._inner = inner
        self._departures = departures
        self._held: deque[tuple[float, Arrival]] = deque()

    def _carry(self, target: int, kind: str, tensor: Tensor, numbers: Numbers) -> None:
        step, stage, microbatch, version, _ = numbers
        if kind in _KINDS:
            self._departures.note(kind, stage, microbatch)
        self._inner.post(
            target, kind, tensor, step=step, stage=stage, microbatch=microbatch, version=version
        )

    def receive(self, timeout_s: float, awaiting: str = "a message") -> Arrival:
        self._read()
        if not self._held:
            self._hold(self._inner.receive(timeout_s, awaiting))
        # What is sent from now on is due later than what is held: nothing else to wait for.
        due_s, arrival = self._held.popleft()
        _sleep_until(due_s)
        return arrival

    def poll(self, timeout_s: float = 0.0) -> Arrival | None:
        self._read()
        end_s = time.monotonic() + timeout_s
        if not self._held and timeout_s > 0:
            arrival = self._inner.poll(timeout_s)
            if arrival is not None:
                self._hold(arrival)
        if not self._held or self._held[0][0] > end_s:
            return None
        due_s, arrival = self._held.popleft()
        _sleep_until(due_s)
        return arrival

    def flush(self, timeout_s: float) -> None:
        self._inner.flush(timeout_s)

    def close(self) -> None:
        self._inner.close()

    def _read(self) -> None:
        while (arrival := self._inner.poll()) is not None:
            self._hold(arrival)

    def _hold(self, arrival: Arrival) -> None:
        """Keep what came in the order in which it is due."""
        header = arrival.header
        due_s = 0.0
        if header.kind in _KINDS:
            due_s = self._departures.due_s(header.kind, header.stage, header.microbatch)
        place = len(self._held)
        while place and self._held[place - 1][0] > due_s:
            place -= 1
        self._held.insert(place, (due_s, arrival))


def delayed_world(world: World, departures: Departures) -> World:
    """Return the same world with a delay on its transports; collectives have none."""

    def transport_along(axes: tuple[str, ...], trace: Recorder | None) -> Transport:
        return DelayedTransport(world.open_transport(*axes, trace=trace), departures)

    return World(
        world.rank,
        world.mesh,
        lambda axes: world.group(*axes),
        transport_along,
        carrier=world.carrier,
    )


class DelayedStage(PipelineStage):
    """A stage of torch whose computations wait until what was received for them is due."""

    def __init__(self, departures: Departures, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._departures = departures

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        if not self.is_last:
            self._departures.note("forward", self.stage_index + 1, fwd_chunk_id)
        return super().get_fwd_send_ops(fwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        if not self.is_first:
            self._departures.note("backward", self.stage_index - 1, bwd_chunk_id)
        return super().get_bwd_send_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        # The schedule has just waited for the receive.
        if not self.is_first:
            self._departures.wait("forward", self.stage_index, fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *arguments, **options)

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        if not self.is_last:
            self._departures.wait("backward", self.stage_index, bwd_chunk_id)
        return super().backward_one_chunk(bwd_chunk_id, *arguments, **options)


def _sleep_until(due_s: float) -> None:
    remaining_s = due_s - time.monotonic()
    if remaining_s > 0:
        time.sleep(remaining_s)
