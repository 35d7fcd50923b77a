"""Progress of the large collectives of a group: in its own thread, or in one that waits.

Started collectives are carried in order, by one thread at a time: the holder of the turn.

    start()   queues the job and wakes the thread
    thread    takes the turn if it is free, and works until the queue is empty
    wait()    takes the turn if it is free, and works until its own job is done: a caller that
              waits at once needs no switch to the thread; else it sleeps until its job is done

A holder that gives the turn back with jobs left wakes the thread.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from ganglion.errors import CommError
from ganglion.execute.comm.calls import Call
from ganglion.execute.comm.checked_group import GroupFailure


class Job:
    """A started large collective: its call, its data and its handle."""

    def __init__(self, progress: Progress, call: Call, source: Tensor, target: Tensor) -> None:
        """Combine the members' `source` into `target`, both flat; wait through `progress`."""
        self._progress = progress
        self.call = call
        self.source = source
        self.target = target
        self.started_s = time.perf_counter()
        self.taken_up_s: float | None = None
        self.finished_s: float | None = None
        self.error: CommError | None = None
        self.shared: Tensor | None = None  # the result of a call of kind share
        self.done = False
        self._gate = threading.Lock()  # an Event would cost ten times as much to make
        self._gate.acquire()

    def is_done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return self.done

    def wait(self) -> None:
        """Return when the result is in place; raise CommError if it will never be."""
        if not self.done:
            self._progress.work(until=self)
            with self._gate:
                pass
        if self.error is not None:
            raise type(self.error)(str(self.error)) from self.error

    def finish(self) -> None:
        """Mark as done and wake the waiters."""
        self.done = True
        self._gate.release()


class Progress:
    """Carries jobs one after the other, on a thread that the first job starts."""

    def __init__(self, carry: Callable[[Job], None], failure: GroupFailure, name: str) -> None:
        """Call `carry` for each job; an error fails the group through `failure`."""
        self._carry = carry
        self._failure = failure
        self._name = name
        self._jobs: deque[Job] = deque()
        self._turn = threading.Lock()
        self._wakes: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, job: Job) -> None:
        """Queue `job`; it makes progress by itself."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.append(job)
        self._wakes.put(True)

    def close(self) -> None:
        """End the thread; unfinished jobs fail."""
        if self._thread is not None:
            self._wakes.put(False)
            self._thread.join()
        self.work(until=None)

    def _serve(self) -> None:
        while self._wakes.get():
            self.work(until=None)

    def work(self, until: Job | None) -> None:
        """Carry jobs until `until` is done or none are left, unless the turn is taken."""
        if not self._turn.acquire(blocking=False):
            return
        try:
            while self._jobs and not (until is not None and until.done):
                self._run(self._jobs.popleft())
        finally:
            self._turn.release()
        # After the release: a job queued just before it found the turn taken.
        if self._jobs and self._thread is not None:
            self._wakes.put(True)

    def _run(self, job: Job) -> None:
        job.taken_up_s = time.perf_counter()
        try:
            self._failure.check()
            # The caller may be in inference mode, which is a property of its thread.
            with torch.inference_mode():
                self._carry(job)
            job.finished_s = time.perf_counter()
        except CommError as error:
            job.error = self._failure.fail(error)
        except BaseException as error:
            # The members are out of step now, whatever the error.
            job.error = self._failure.fail(CommError(f"{job.call} failed on one rank: {error!r}"))
            if not isinstance(error, Exception):
                raise
        finally:
            job.finish()
