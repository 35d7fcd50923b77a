"""A lane: one thread that makes moves of one kind, in order, on a stream of its own on a GPU."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

Work = Callable[[], None]
_JOIN_S = 5.0


class Lane:
    """Does what it is given, one thing after the other; the work must not raise."""

    def __init__(self, name: str, device: torch.device) -> None:
        """Start the thread."""
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # A daemon: a disk that never answers must not keep a process alive.
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Work) -> None:
        """Do `work` after all that was started before."""
        self._queue.put(work)

    def finish_copies(self) -> None:
        """Return when the copies of the present work have arrived; for the work itself to call."""
        if self._stream is not None:
            self._stream.synchronize()

    def close(self) -> None:
        """End the thread, once it has done what it was given."""
        self._queue.put(None)
        self._thread.join(timeout=_JOIN_S)

    def _serve(self) -> None:
        with self._on_stream():
            while (work := self._queue.get()) is not None:
                work()

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
