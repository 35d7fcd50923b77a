"""Progress of MPI, which moves data only inside its calls: waiters make them, else a thread.

    start()   sends small data at once, and wakes the thread if it sleeps
    wait()    tests requests until its own work is done; meanwhile the thread does not
    thread    tests requests while there are any and no thread waits

Tests follow each other without a pause at first, then with short sleeps: MPI itself would spin for
ever, and ranks may have to share a core.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Protocol


class Activity(IntEnum):
    """The state of a task, in order of urgency."""

    OVER = -1  # the task can be removed
    IDLE = 0
    AWAITING = 1  # waits for data that peers have not sent yet
    MOVING = 2  # moves data that all sides have agreed on


class Task(Protocol):
    """Work that Progress advances."""

    def advance(self) -> Activity:
        """Do all that needs no waiting; never raise."""


# In the order of Activity.
_WAITER_SPINS_S = dict(zip(Activity, (0.0, 1e-3, 1e-3, 0.05), strict=True))
_THREAD_SPINS_S = dict(zip(Activity, (0.0, 0.0, 0.0, 0.05), strict=True))
_SHORTEST_S, _WAITER_LONGEST_S, _THREAD_LONGEST_S = 5e-5, 2e-4, 1e-3
# To wake the thread for every collective would cost the caller more than the collective.
_LINGER_S = 0.05


class Pauses:
    """The pauses between two tests."""

    def __init__(self, spins_s: dict[Activity, float], longest_s: float) -> None:
        """Spin for `spins_s` after every change, then sleep longer and longer."""
        self._spins_s = spins_s
        self._longest_s = longest_s
        self._activity: Activity | None = None
        self._changed_s = 0.0
        self._sleep_s = _SHORTEST_S

    def pause(self, activity: Activity) -> None:
        """Yield the core, or sleep if `activity` has not changed for a while."""
        now_s = time.monotonic()
        if activity != self._activity:
            self._activity, self._changed_s, self._sleep_s = activity, now_s, _SHORTEST_S
        if now_s - self._changed_s < self._spins_s[activity]:
            os.sched_yield()
        else:
            time.sleep(self._sleep_s)
            self._sleep_s = min(2 * self._sleep_s, self._longest_s)


class Progress:
    """Advances the tasks of one process."""

    def __init__(self) -> None:
        self.turn = threading.Lock()  # tasks advance under it, one thread at a time
        self._tasks: tuple[Task, ...] = ()
        self._num_waiting = 0
        self._wake = threading.Event()
        self._is_asleep = False
        self._thread: threading.Thread | None = None
        self._stopped = False

    def add(self, task: Task) -> None:
        """Advance this task from now on."""
        with self.turn:
            self._tasks = (*self._tasks, task)

    def remove(self, task: Task) -> None:
        """Advance this task no more."""
        with self.turn:
            self._tasks = tuple(other for other in self._tasks if other is not task)

    def notify(self) -> None:
        """Start or wake the thread: a task has something to do."""
        if self._thread is None and not self._stopped:
            self._thread = threading.Thread(target=self._serve, name="mpi progress", daemon=True)
            self._thread.start()
        if self._is_asleep:
            self._wake.set()

    def wait(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """Advance tasks until `is_done()`; return False if that takes too long."""
        end_s = time.monotonic() + timeout_s
        pauses = Pauses(_WAITER_SPINS_S, _WAITER_LONGEST_S)
        with self._waiting():
            while True:
                activity = self._step()
                if is_done():
                    return True
                if time.monotonic() >= end_s:
                    return False
                pauses.pause(activity)

    def stop(self) -> None:
        """End the thread; after that, only `wait` advances tasks."""
        self._stopped = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _step(self) -> Activity:
        with self.turn:
            activities = [task.advance() for task in self._tasks]
            if Activity.OVER in activities:
                pairs = zip(self._tasks, activities, strict=True)
                self._tasks = tuple(task for task, state in pairs if state != Activity.OVER)
            return max(activities, default=Activity.IDLE)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        with self.turn:
            self._num_waiting += 1
        try:
            yield
        finally:
            with self.turn:
                self._num_waiting -= 1

    def _serve(self) -> None:
        """Advance tasks now and then; after a while without work, sleep until `notify`."""
        pauses, idle_s = Pauses(_THREAD_SPINS_S, _THREAD_LONGEST_S), 0.0
        while not self._stopped:
            activity = Activity.IDLE if self._num_waiting else self._step()
            if activity > Activity.IDLE:
                idle_s = 0.0
                pauses.pause(activity)
            elif self._num_waiting or idle_s < _LINGER_S:
                time.sleep(_THREAD_LONGEST_S)
                idle_s += _THREAD_LONGEST_S
            else:
                self._sleep()
                idle_s = 0.0

    def _sleep(self) -> None:
        self._wake.clear()
        self._is_asleep = True
        # `notify` reads the flag after adding work; this looks for work after setting the flag.
        if not self._stopped and self._step() <= Activity.IDLE:
            self._wake.wait()
        self._is_asleep = False
