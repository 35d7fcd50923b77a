"""MPI moves data only inside its calls: whoever waits makes them, and a thread when nobody waits.

    start()   sends what is small at once, and wakes the thread if it sleeps
    wait()    tests requests until its own work is done; the thread keeps out of the way
    thread    tests requests while there are any and nobody waits

Tests come one after the other without a pause at first, then with short sleeps: MPI itself would
spin for ever, and ranks may have to share a core.
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
    """How much there is to do, from never again to all hands."""

    OVER = -1  # the task is to be forgotten
    IDLE = 0
    AWAITING = 1  # for what peers have not sent yet
    MOVING = 2  # data that all sides have agreed on


class Task(Protocol):
    """Something that moves on when it is given the chance."""

    def advance(self) -> Activity:
        """Do what can be done without waiting; never raise."""


_WAITER_SPINS_S = {
    Activity.OVER: 0.0,
    Activity.IDLE: 1e-3,
    Activity.AWAITING: 1e-3,
    Activity.MOVING: 0.05,
}
_THREAD_SPINS_S = {
    Activity.OVER: 0.0,
    Activity.IDLE: 0.0,
    Activity.AWAITING: 0.0,
    Activity.MOVING: 0.05,
}
_SHORTEST_S, _WAITER_LONGEST_S, _THREAD_LONGEST_S = 5e-5, 2e-4, 1e-3
# To wake the thread for every collective would cost the caller more than the collective.
_LINGER_S = 0.05


class Pauses:
    """How long to leave MPI alone between two tests."""

    def __init__(self, spins_s: dict[Activity, float], longest_s: float) -> None:
        """Spin for a while after every change, then sleep longer and longer."""
        self._spins_s = spins_s
        self._longest_s = longest_s
        self._activity: Activity | None = None
        self._changed_s = 0.0
        self._sleep_s = _SHORTEST_S

    def pause(self, activity: Activity) -> None:
        """Give others the core, for as long as it makes sense in this state."""
        now_s = time.monotonic()
        if activity != self._activity:
            self._activity, self._changed_s, self._sleep_s = activity, now_s, _SHORTEST_S
        if now_s - self._changed_s < self._spins_s[activity]:
            os.sched_yield()
        else:
            time.sleep(self._sleep_s)
            self._sleep_s = min(2 * self._sleep_s, self._longest_s)


class Progress:
    """Moves the tasks of one process on."""

    def __init__(self) -> None:
        """Start with no task and no thread."""
        self.turn = threading.Lock()  # tasks advance under it, one thread at a time
        self._tasks: tuple[Task, ...] = ()
        self._num_waiting = 0
        self._wake = threading.Event()
        self._is_asleep = False
        self._thread: threading.Thread | None = None
        self._stopped = False

    def add(self, task: Task) -> None:
        """Move this task on from now on."""
        with self.turn:
            self._tasks = (*self._tasks, task)

    def remove(self, task: Task) -> None:
        """Leave this task alone from now on."""
        with self.turn:
            self._tasks = tuple(other for other in self._tasks if other is not task)

    def notify(self) -> None:
        """Say that a task has been given something to do."""
        if self._thread is None and not self._stopped:
            self._thread = threading.Thread(target=self._serve, name="mpi progress", daemon=True)
            self._thread.start()
        if self._is_asleep:
            self._wake.set()

    def wait(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """Move tasks on until `is_done()`; return False if that takes too long."""
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
        """End the thread; after that, only waiting moves anything."""
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
        """Look for work now and then, and after a while without any, sleep until called."""
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
        # Who starts something looks at the flag afterwards; this looks for work after setting it.
        if not self._stopped and self._step() <= Activity.IDLE:
            self._wake.wait()
        self._is_asleep = False
