"""The ends of waiting: a failure on one rank is raised on all, and silence ends in PeerLost.

A rank of a pipeline waits for its neighbours only. So a failure is posted to the ranks of the
pipeline, over the transport that carries activations, and to the same stage of the other replicas,
over one that carries nothing else. A rank that receives it passes it on before it ends:

    rank that failed ---> its pipeline ---> their replicas
                     `--> its replicas ---> their pipelines
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence

import torch

from ganglion.errors import CommError, GanglionError, PeerLost, PipelineError, ProtocolError
from ganglion.execute.comm import Arrival, Transport

ERROR_KIND = "error"
# How often the quiet transports are listened to: far below the seconds that a user would notice.
LISTEN_S = 0.1
_POST_S = 1.0
_CLASSES: dict[str, type[GanglionError]] = {
    error.__name__: error for error in (PipelineError, PeerLost, ProtocolError, CommError)
}


class Alarm:
    """Posts failures to other ranks, and listens for theirs."""

    def __init__(self, busy: Transport | None, quiet: Transport | None) -> None:
        """Post to both; listen to `quiet` only, as the engine reads `busy`."""
        self._quiet = quiet
        self._all: Sequence[Transport] = [t for t in (busy, quiet) if t is not None]
        self._listened_s = 0.0

    @property
    def has_quiet(self) -> bool:
        """Whether there is something to listen to."""
        return self._quiet is not None

    def listen(self) -> None:
        """Raise the error that another rank posted; looks every LISTEN_S, however often called."""
        if self._quiet is None or (now_s := time.monotonic()) < self._listened_s + LISTEN_S:
            return
        self._listened_s = now_s
        arrival = self._quiet.poll()
        if arrival is not None:
            raise posted_error(arrival)

    def heard(self) -> GanglionError | None:
        """Return the error that another rank posted before it left; drop all other messages."""
        for transport in self._all:
            with contextlib.suppress(CommError):
                while (arrival := transport.poll()) is not None:
                    if arrival.header.kind == ERROR_KIND:
                        return posted_error(arrival)
        return None

    def ring(self, error: Exception) -> None:
        """Post an error to all ranks that can be reached, within about a second."""
        payload = torch.frombuffer(bytearray(_text(error).encode()), dtype=torch.uint8)
        for transport in self._all:
            for peer in transport.peers:
                with contextlib.suppress(CommError):
                    transport.post(peer, ERROR_KIND, payload)
            with contextlib.suppress(CommError):
                transport.flush(_POST_S)

    def close(self) -> None:
        """Close all transports."""
        for transport in self._all:
            transport.close()


def leave(alarm: Alarm) -> None:
    """Close the transports of an engine that was not closed, so that other ranks can go on.

    Not if this process ends by an error: then the others are to see that it is gone.
    """
    if not hasattr(sys, "last_value"):
        alarm.close()


def posted_error(arrival: Arrival) -> GanglionError:
    """Return the error that another rank posted, of its own class or PipelineError."""
    name, _, text = bytes(arrival.tensor.tolist()).decode().partition("\n")
    return _CLASSES.get(name, PipelineError)(text)


def _text(error: Exception) -> str:
    said = str(error) if isinstance(error, GanglionError) else repr(error)
    return f"{type(error).__name__}\n{said}"


_MOMENT_S = 1.0
_LOOK_S = 0.001


class Patience:
    """Measures how long nothing has happened."""

    def __init__(self, timeout_s: float, lost: Callable[[str], PeerLost]) -> None:
        """Last `timeout_s`; `lost(awaiting)` is the error at its end."""
        self._timeout_s = timeout_s
        self._lost = lost
        self._idle_since_s: float | None = None

    def reset(self) -> None:
        """Start counting anew: something happened."""
        self._idle_since_s = None

    def is_young(self, age_s: float) -> bool:
        """Return whether the waiting began less than `age_s` ago."""
        return self._idle_since_s is not None and time.monotonic() < self._idle_since_s + age_s

    def check(self, awaiting: str) -> float:
        """Return how much longer to wait; raise if nothing has happened for too long."""
        now_s = time.monotonic()
        if self._idle_since_s is None:
            self._idle_since_s = now_s
        left_s = self._idle_since_s + self._timeout_s - now_s
        if left_s <= 0:
            raise self._lost(awaiting)
        return left_s


def gets_done(is_done: Callable[[], bool]) -> bool:
    """Return whether something gets done within a second."""
    end_s = time.monotonic() + _MOMENT_S
    while not (done := is_done()) and time.monotonic() < end_s:
        time.sleep(_LOOK_S)
    return done
