"""What all transports do alike: give a message its number, and note both of its ends in the trace.

    post(target, kind, tensor)  numbers --> _carry(...), the transport's own --> event send_KIND
    _noted(arrival)                                                          --> event receive_KIND

Both events have the flow number of the message, which joins them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from torch import Tensor

from ganglion.comm.message import Arrival, Numbers, flow_number, header_numbers
from ganglion.comm.transport import death
from ganglion.errors import CommError
from ganglion.trace import COMM, Recorder


class TransportBase(ABC):
    """The bookkeeping of a Transport; a subclass carries the messages."""

    def __init__(self, rank: int, peers: Iterable[int], trace: Recorder | None) -> None:
        """Belong to `rank`, which talks to `peers`; with a `trace`, note every message there."""
        self.rank = rank
        self.peers = tuple(sorted(peers))
        self._trace = trace
        self._num_posted = 0
        self._broken: dict[int, str | CommError] = {}  # peers that were lost, and how that showed
        self._departed: set[int] = set()  # peers that send nothing any more

    def post(
        self,
        target: int,
        kind: str,
        tensor: Tensor,
        *,
        step: int = -1,
        stage: int = -1,
        microbatch: int = -1,
        version: int = -1,
    ) -> None:
        """Send a copy of `tensor` and never wait for the peer; see Transport."""
        trace = self._trace
        start_s = 0.0 if trace is None else trace.clock()
        self._num_posted += 1
        numbers = (step, stage, microbatch, version, flow_number(self.rank, self._num_posted))
        self._carry(target, kind, tensor, numbers)
        if trace is not None and trace.enabled:
            _record(trace, "send", kind, numbers, tensor.nbytes, start_s)

    @abstractmethod
    def _carry(self, target: int, kind: str, tensor: Tensor, numbers: Numbers) -> None:
        """Send a copy of `tensor` to `target`, or raise what `post` is to raise."""

    def _noted(self, arrival: Arrival, start_s: float | None = None) -> Arrival:
        """Return `arrival` after noting it as an event that began at `start_s`, or just now."""
        trace = self._trace
        if trace is not None and trace.enabled:
            _, header, tensor = arrival
            start_s = trace.clock() if start_s is None else start_s
            _record(trace, "receive", header.kind, header_numbers(header), tensor.nbytes, start_s)
        return arrival

    def _raise_if_broken(self, doing: str) -> None:
        for peer in self._broken:
            raise self._loss(peer, doing)

    def _loss(self, peer: int, doing: str) -> CommError:
        reason = self._broken[peer]
        return death(self.rank, peer, reason, doing) if isinstance(reason, str) else reason


def _record(
    trace: Recorder, verb: str, kind: str, numbers: Numbers, num_bytes: int, start_s: float
) -> None:
    """Note one message as an event that ends now."""
    step, stage, microbatch, version, flow = numbers
    trace.add(
        COMM,
        f"{verb}_{kind}",
        start_s,
        trace.clock(),
        step=step,
        stage=stage,
        microbatch=microbatch,
        version=version,
        num_bytes=num_bytes,
        flow=flow,
    )
