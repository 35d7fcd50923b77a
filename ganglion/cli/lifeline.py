"""A worker must not outlive the process that started it, however that one died."""

from __future__ import annotations

import os
import threading
import time


def end_with_parent(poll_s: float = 0.5) -> None:
    """Watch the parent from a thread and end this process when it is gone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(poll_s)
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
