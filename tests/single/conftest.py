"""Tests of one process, whose ranks are threads: each worker keeps to one core."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _one_core(worker_id: str) -> Iterator[None]:
    """Run threads one at a time, on a core that is another one in each worker of pytest.

    torch lets go of the interpreter's lock for every operation. Threads on several cores then hand
    it over each time, which takes longer than most of the operations do: 1.6 times as long in all.
    """
    cores = sorted(os.sched_getaffinity(0))
    number = int(worker_id.removeprefix("gw")) if worker_id.startswith("gw") else 0
    os.sched_setaffinity(0, {cores[number % len(cores)]})
    yield
    os.sched_setaffinity(0, cores)
