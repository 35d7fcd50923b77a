"""What every transport offers: post a message to a rank, and a mailbox of what arrives.

    transport.post(2, "forward", activations, microbatch=0)       # returns at once
    arrival = transport.receive(60.0, awaiting="a gradient")      # the next of any source

Messages of one sender arrive in the order it posted them; nothing is said about the order between
senders. A transport belongs to one thread: the one that made it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from ganglion.comm.message import Arrival
from ganglion.errors import PeerLost


class Transport(Protocol):
    """Carries messages between this rank and its peers."""

    @property
    def rank(self) -> int:
        """The rank this end belongs to."""

    @property
    def peers(self) -> tuple[int, ...]:
        """The other ranks, ascending."""

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

    def receive(self, timeout_s: float, awaiting: str = "a message") -> Arrival:
        """Wait for the next arrival of any source.

        What came in is handed out first; then a peer that died without `close()`, or silence past
        the deadline, is PeerLost that names the rank and what was `awaiting`, and what is no
        message is a ProtocolError that names the sender.
        """

    def poll(self, timeout_s: float = 0.0) -> Arrival | None:
        """Return the next arrival if one comes in time, else None; a loss is raised."""

    def flush(self, timeout_s: float) -> None:
        """Return when everything posted was handed over; PeerLost names the ranks that lag."""

    def close(self) -> None:
        """Release everything; arrivals stay valid.

        Peers see an orderly end, unless something posted was not handed over: they see a loss.
        """


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
