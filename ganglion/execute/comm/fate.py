"""The end of a group: the first failure on any path fails every later call, here and elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ganglion.errors import CommError


class Fate:
    """Whether a group can still be used, and if not, why."""

    def __init__(self) -> None:
        """Start in good health."""
        self._tells: list[Callable[[CommError], None]] = []
        self._lock = threading.Lock()
        self._error: CommError | None = None

    def on_failure(self, tell: Callable[[CommError], None]) -> None:
        """Call `tell` at the first failure: it lets other members know."""
        self._tells.append(tell)

    def fail(self, error: CommError) -> CommError:
        """Fail the group unless it has failed before; return what to raise."""
        if self.end(error):
            for tell in self._tells:
                tell(error)
        return self.failure() or error

    def end(self, error: CommError) -> bool:
        """Let later calls raise `error`, without telling the others; False if it has ended."""
        with self._lock:
            first = self._error is None
            self._error = self._error or error
            return first

    def failure(self) -> CommError | None:
        """Return a fresh copy of the error that ended the group, if one has."""
        error = self._error
        return None if error is None else type(error)(str(error))

    def check(self) -> None:
        """Raise what the group ended with."""
        if self._error is not None:
            failure = self.failure()
            assert failure is not None
            raise failure
