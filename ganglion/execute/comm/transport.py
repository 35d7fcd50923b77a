"""The base of all transports: post messages to ranks, and receive from any rank.

    transport.post(2, "forward", activations, microbatch=0)       # returns at once
    arrival = transport.receive(60.0, awaiting="a gradient")      # the next of any source

Messages of one sender arrive in the order it posted them; there is no order between senders. A
transport belongs to the thread that made it.

The base numbers each message and records both of its ends in the trace; a subclass carries it:

    post(target, kind, tensor)  numbers --> _carry(...), the transport's own --> event send_KIND
    _recorded(arrival)                                                       --> event receive_KIND

Both events have the flow number of the message, which joins them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from torch import Tensor

from ganglion.errors import CommError, PeerLost
from ganglion.execute.comm.message import Arrival, Numbers, flow_number, header_numbers
from ganglion.trace import COMM, Recorder


class Transport(ABC):
    """Carries messages between this rank and its peers."""

    def __init__(self, rank: int, peers: Iterable[int], trace: Recorder | None) -> None:
        """Connect `rank` to `peers`; record every message in `trace`, if there is one."""
        self.rank = rank
        self.peers = tuple(sorted(peers))
        self._trace = trace
        self._num_posted = 0
        self._broken: dict[int, str | CommError] = {}  # lost peers, and the reasons
        self._departed: set[int] = set()  # peers that send nothing more

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
        """Send a copy of `tensor` without waiting for the peer; the caller may reuse it at once.

        Raise PeerLost if the peer is known to be gone.
        """
        trace = self._trace
        start_s = 0.0 if trace is None else trace.clock()
        self._num_posted += 1
        numbers = (step, stage, microbatch, version, flow_number(self.rank, self._num_posted))
        self._carry(target, kind, tensor, numbers)
        if trace is not None and trace.enabled:
            _record(trace, "send", kind, numbers, tensor.nbytes, start_s)

    @abstractmethod
    def receive(self, timeout_s: float, awaiting: str = "a message") -> Arrival:
        """Return the next arrival of any source.

        After all arrivals were returned, raise PeerLost, naming the ranks and `awaiting`, if a peer
        died without `close()` or the deadline passed, and ProtocolError, naming the sender, for
        garbage.
        """

    @abstractmethod
    def poll(self, timeout_s: float = 0.0) -> Arrival | None:
        """Return the next arrival, or None if none comes in time; raise PeerLost after a loss."""

    @abstractmethod
    def flush(self, timeout_s: float) -> None:
        """Return when all posted messages were handed over; raise PeerLost naming late ranks."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; arrivals stay valid.

        Peers see an orderly end, or a loss if a posted message was not handed over.
        """

    @abstractmethod
    def _carry(self, target: int, kind: str, tensor: Tensor, numbers: Numbers) -> None:
        """Send a copy of `tensor` to `target`; raise the errors of `post`."""

    def _recorded(self, arrival: Arrival, start_s: float | None = None) -> Arrival:
        """Record `arrival` as an event that began at `start_s`, or now, and return it."""
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
        return death_error(self.rank, peer, reason, doing) if isinstance(reason, str) else reason


def _record(
    trace: Recorder, verb: str, kind: str, numbers: Numbers, num_bytes: int, start_s: float
) -> None:
    """Record one message as an event that ends now."""
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


def timeout_error(rank: int, silent: Iterable[int], timeout_s: float, awaiting: str) -> PeerLost:
    """Return the error for a deadline that passed."""
    return PeerLost(
        f"rank {rank} waited {timeout_s:g} s for {awaiting}: {name_ranks(silent)} stayed silent; "
        f"look for the first error in the logs of the other ranks"
    )


def death_error(rank: int, lost: int, reason: str, doing: str) -> PeerLost:
    """Return the error for a peer whose connection broke."""
    return PeerLost(
        f"rank {lost} is gone ({reason}) while rank {rank} {doing}; look for the first error in "
        f"the log of rank {lost}"
    )


def departure_error(rank: int, gone: Iterable[int], doing: str) -> PeerLost:
    """Return the error for peers that closed in good order, but too early for this rank."""
    return PeerLost(
        f"rank {rank} {doing}, but {name_ranks(gone)} had closed the transport: the ranks disagree "
        f"about how many messages there are"
    )


def name_ranks(ranks: Iterable[int]) -> str:
    """Return `rank 2` or `ranks [1, 2]`."""
    names = sorted(ranks)
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {names}"
