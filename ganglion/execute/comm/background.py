"""Work that goes on while the caller computes: one thread that does things in the order given.

For what no library does asynchronously by itself. The things it does block without holding the
interpreter lock (sockets, torch), so the caller really computes meanwhile.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from ganglion.errors import CommError

Work = Callable[[], None]


class BackgroundHandle:
    """Something the thread will do, is doing or has done."""

    def __init__(self, work: Work) -> None:
        """Describe `work`, asked for now."""
        self.started_s = time.perf_counter()
        self.finished_s: float | None = None
        self._work = work
        self._error: BaseException | None = None
        self._done = threading.Event()

    def run(self) -> None:
        """Do it; an error is kept for `wait`."""
        try:
            self._work()
        except BaseException as error:
            self._error = error
        self.finished_s = time.perf_counter()
        self._done.set()

    def fail(self, error: BaseException) -> None:
        """Say that it will never be done."""
        self._error = error
        self._done.set()

    def is_done(self) -> bool:
        """Say, without waiting, whether `wait` would return or raise at once."""
        return self._done.is_set()

    def wait(self) -> None:
        """Return when it is done; raise what it raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error


class Background:
    """A thread, started with the first work and ended by `close`."""

    def __init__(self, name: str) -> None:
        """Prepare a thread called `name`."""
        self._name = name
        self._queue: queue.SimpleQueue[BackgroundHandle | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, work: Work) -> BackgroundHandle:
        """Let the thread do `work` after everything started before."""
        handle = BackgroundHandle(work)
        if self._thread is None:
            # A daemon: work that waits for a rank that never comes must not keep a process alive.
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self._queue.put(handle)
        return handle

    def close(self) -> None:
        """End the thread once it has done what it was given; later work is not done."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout=5)
            self._thread = None

    def _serve(self) -> None:
        failed: BaseException | None = None
        while (handle := self._queue.get()) is not None:
            if failed is not None:  # ranks would mismatch: what follows a failure fails as well
                handle.fail(CommError(f"{self._name}: an earlier collective failed ({failed})"))
                continue
            handle.run()
            failed = handle._error
