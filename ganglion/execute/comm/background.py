"""A thread that does work in the order given while the caller computes.

For work that no library does asynchronously by itself. It blocks without the interpreter lock (in
sockets, in torch), so the caller really computes meanwhile.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from ganglion.errors import CommError

Work = Callable[[], None]


class BackgroundHandle:
    """Work that the thread will do, is doing or has done."""

    def __init__(self, work: Work) -> None:
        self.started_s = time.perf_counter()
        self.finished_s: float | None = None
        self._work = work
        self._error: BaseException | None = None
        self._done = threading.Event()

    def run(self) -> None:
        """Do the work; keep an error for `wait`."""
        try:
            self._work()
        except BaseException as error:
            self._error = error
        self.finished_s = time.perf_counter()
        self._done.set()

    def fail(self, error: BaseException) -> None:
        """Mark as never to be done."""
        self._error = error
        self._done.set()

    def is_done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return self._done.is_set()

    def wait(self) -> None:
        """Return when the work is done; raise its error, if any."""
        self._done.wait()
        if self._error is not None:
            raise self._error


class Background:
    """A thread, started with the first work and ended by `close`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[BackgroundHandle | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, work: Work) -> BackgroundHandle:
        """Queue `work` behind everything started before."""
        handle = BackgroundHandle(work)
        if self._thread is None:
            # A daemon: work that waits for a lost rank must not keep the process alive.
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self._queue.put(handle)
        return handle

    def close(self) -> None:
        """End the thread after its queued work; later work is not done."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout=5)
            self._thread = None

    def _serve(self) -> None:
        failed: BaseException | None = None
        while (handle := self._queue.get()) is not None:
            if failed is not None:  # ranks are out of step: work after a failure fails as well
                handle.fail(CommError(f"{self._name}: an earlier collective failed ({failed})"))
                continue
            handle.run()
            failed = handle._error
