"""Processes of one test that may be killed, stopped, or started later than the others."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from tests.support.harness import TEST
from tests.support.warm import CONTEXT

DEADLINE_S = 40.0


class Crew:
    """The processes of one test and their results; all are ended with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: dict[str, BaseProcess] = {}

    def start(self, name: str, body: Callable[..., Any], *args: Any) -> None:
        test = os.environ.get(TEST, "")
        process = CONTEXT.Process(target=_child, args=(test, self.folder, name, body, args))
        process.start()
        self._processes[name] = process

    def signal(self, name: str, number: int) -> None:
        os.kill(self._processes[name].pid or 0, number)

    def is_stopped(self, name: str) -> bool:
        status = Path(f"/proc/{self._processes[name].pid}/stat").read_text()
        return status.rpartition(") ")[2][0] == "T"

    def await_death(self, name: str) -> int:
        """Return how a process ended, which it must have done by a signal."""
        self._processes[name].join(DEADLINE_S)
        code = self._processes[name].exitcode
        assert code is not None, f"{name} lives on"
        return -code

    def result(self, name: str) -> Any:
        self._processes[name].join(DEADLINE_S)
        failure = self.folder / f"{name}.failed"
        assert not failure.exists(), failure.read_text()
        assert self._processes[name].exitcode == 0, f"{name}: {self._processes[name].exitcode}"
        return torch.load(self.folder / name)

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.join(10)


def _child(
    test: str, folder: Path, name: str, body: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ[TEST] = test
    torch.set_num_threads(1)
    try:
        torch.save(body(folder, *args), folder / name)
    except BaseException:
        (folder / f"{name}.failed").write_text(traceback.format_exc())
        raise


def await_true(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, f"waited {DEADLINE_S} s for {what}"
        time.sleep(0.01)
