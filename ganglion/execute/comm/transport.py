"""What every transport offers: post a message to a rank, and a mailbox of what arrives.

    transport.post(2, "forward", activations, microbatch=0)       # returns at once
    arrival = transport.receive(60.0, awaiting="a gradient")      # the next of any source

Messages of one sender arrive in the order it posted them; nothing is said about the order between
senders. A transport belongs to one thread: the one that made it.

What all transports do alike stands here: a message gets its number, and both of its ends are noted
in the trace. A subclass carries it.

    post(target, kind, tensor)  numbers --> _carry(...), the transport's own --> event send_KIND
    _noted(arrival)                                                          --> event receive_KIND

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
        """Belong to `rank`, which talks to `peers`; with a `trace`, note every message there.

        `peers` are the other ranks, ascending.
        """
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
        """Send a copy of `tensor` and never wait for the peer; the caller may reuse it at once.

        Raises PeerLost if it is already known that the peer is gone.
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
        """Wait for the next arrival of any source.

        What came in is handed out first; then a peer that died without `close()`, or silence past
        the deadline, is PeerLost that names the rank and what was `awaiting`, and what is no
        message is a ProtocolError that names the sender.
        """

    @abstractmethod
    def poll(self, timeout_s: float = 0.0) -> Arrival | None:
        """Return the next arrival if one comes in time, else None; a loss is raised."""

    @abstractmethod
    def flush(self, timeout_s: float) -> None:
        """Return when everything posted was handed over; PeerLost names the ranks that lag."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; arrivals stay valid.

        Peers see an orderly end, unless something posted was not handed over: they see a loss.
        """

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


def silence(rank: int, silent: Iterable[int], timeout_s: float, awaiting: str) -> PeerLost:
    """Describe a deadline that passed."""
    return PeerLost(
        f"rank {rank} waited {timeout_s:g} s for {awaiting}: {name_ranks(silent)} stayed silent; "
        f"look for the first error in the logs of the other ranks"
    )


def death(rank: int, lost: int, reason: str, doing: str) -> PeerLost:
    """Describe a peer whose end of the connection broke."""
    return PeerLost(
        f"rank {lost} is gone ({reason}) while rank {rank} {doing}; look for the first error in "
        f"the log of rank {lost}"
    )


def left(rank: int, gone: Iterable[int], doing: str) -> PeerLost:
    """Describe peers that closed their transports in good order, too early for this rank."""
    return PeerLost(
        f"rank {rank} {doing}, but {name_ranks(gone)} had closed the transport: the ranks disagree "
        f"about how many messages there are"
    )


def name_ranks(ranks: Iterable[int]) -> str:
    """Return `rank 2` or `ranks [1, 2]`."""
    names = sorted(ranks)
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {names}"
