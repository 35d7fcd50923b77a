"""A rank must not outlive the process that launched it, however that one died."""

from __future__ import annotations

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """End this process when the one that launched it through multiprocessing is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "this process was not launched through multiprocessing"

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
