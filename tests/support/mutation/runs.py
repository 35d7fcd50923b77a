"""Running mutants: each meets the tests that execute its function, the cheap ones first."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.mutation.trees import Changed, Mutant, apply, revert

MOST_TESTS = 60
SECOND_S = 240.0  # time limit of the second round
_TOKEN = "GANGLION_MUTANT_RUN"


@dataclass
class Result:
    """The fate of a mutant, and the test that decided it."""

    id: str
    verdict: str = (
        "untouched"  # or "caught", "timeout" (caught as well), "survived", "broken", "changed"
    )
    test: str = ""
    touching: int = 0
    ran: int = 0
    seconds: float = 0.0
    flakes: list[str] = field(default_factory=list)


@dataclass
class Runner:
    """A tree, the duration of each of its tests, and the new places of moved files."""

    tree: Path
    durations: dict[str, float]
    moved: dict[str, str]

    def judge(self, mutant: Mutant, touching: list[str]) -> Result:
        """Run the tests that touch a mutant and, if all pass, the other tests of their files."""
        result = Result(mutant.id, touching=len(touching))
        begin_s = time.monotonic()
        first = self._first(touching)
        try:
            self._round(mutant, self._ordered(first), result)
            if result.verdict == "survived":
                self._round(mutant, self._ordered(self._second(touching, first)), result)
        except Changed as changed:
            result.verdict, result.test = "changed", str(changed)
        result.seconds = round(time.monotonic() - begin_s, 1)
        return result

    def _seconds(self, test: str) -> float:
        return self.durations.get(test, 1.0)

    def _first(self, touching: list[str]) -> list[str]:
        """Return the cheapest tests, and the cheapest of each file in any case."""
        cheap = sorted(touching, key=self._seconds)
        of_files = list({_file(test): test for test in reversed(cheap)}.values())
        rest = [test for test in cheap if test not in of_files]
        return of_files + rest[: max(0, MOST_TESTS - len(of_files))]

    def _second(self, touching: list[str], first: list[str]) -> list[str]:
        """Return other tests: shared set-up is recorded for the first of them only."""
        files = {_file(test) for test in touching}
        beside = [test for test in self.durations if _file(test) in files]
        spent_s, taken = 0.0, []
        for test in sorted({*touching, *beside} - set(first), key=self._seconds):
            spent_s += self._seconds(test)
            if spent_s <= SECOND_S:
                taken.append(test)
        return taken

    def _ordered(self, tests: list[str]) -> list[str]:
        """Order by cost, the tests of a file together: they may share a costly set-up."""
        files: dict[str, list[str]] = {}
        for test in sorted(tests, key=lambda each: (self._seconds(each), each)):
            files.setdefault(_file(test), []).append(test)
        groups = sorted(files.values(), key=lambda group: sum(map(self._seconds, group)))
        return [test for group in groups for test in group]

    def _round(self, mutant: Mutant, tests: list[str], result: Result) -> None:
        result.ran += len(tests)
        while tests:
            result.verdict = "survived"
            verdict, test = self._pytest(tests, mutant)
            if verdict == "passed":
                return
            if self._is_confirmed(mutant, [test] if test in tests else tests, verdict):
                result.verdict, result.test = verdict, test
                return
            result.flakes.append(test)
            if test not in tests:
                result.verdict = "broken"
                return
            tests = [each for each in tests if each != test]

    def _is_confirmed(self, mutant: Mutant, suspects: list[str], verdict: str) -> bool:
        """Return whether a test passes without the mutant and fails with it, unlike a flaky one."""
        if self._pytest(suspects)[0] != "passed":
            return False
        return verdict == "timeout" or self._pytest(suspects, mutant)[0] != "passed"

    def _pytest(self, tests: list[str], mutant: Mutant | None = None) -> tuple[str, str]:
        """Return how a run ended, and with which test if it did not pass."""
        # Generous: each test has a time limit of its own, and machines are shared.
        limit_s = 120 + 4 * sum(map(self._seconds, tests))
        if mutant:
            apply(self.tree, mutant, self.moved)
        try:
            return _outcome(*_run_pytest(self.tree, tests, limit_s), tests)
        finally:
            revert(self.tree)


def _run_pytest(tree: Path, tests: list[str], limit_s: float) -> tuple[int | None, str]:
    """Return the exit code, which is None after the time limit, and the output."""
    options = ["-x", "-vv", "-rfE", "--tb=no", "-p", "no:cacheprovider"]
    token = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        # Examples that another mutant has failed must not be tried first on this one.
        own = {"PYTHONPATH": str(tree), "HYPOTHESIS_STORAGE_DIRECTORY": folder, _TOKEN: token}
        env = {**os.environ, **own, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", *options, *tests]
        printed = Path(folder) / "printed"
        with printed.open("w") as file:
            process = subprocess.Popen(command, cwd=tree, env=env, stdout=file, stderr=file)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(limit_s)
        code = process.poll()
        _end_all(token)
        process.wait()
        return code, printed.read_text(errors="replace")


def _end_all(token: str) -> None:
    """End the processes that a run left, found by their environment: they may have own sessions."""
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{_TOKEN}={token}".encode() in entry.read_bytes():
                os.kill(int(entry.parent.name), signal.SIGKILL)


def _outcome(code: int | None, printed: str, tests: list[str]) -> tuple[str, str]:
    if code == 0:
        return "passed", ""
    lines = printed.splitlines()
    for line in lines:
        word, _, rest = line.partition(" ")
        if word in ("FAILED", "ERROR") and rest.startswith("tests/"):
            return "caught", _named(rest, tests) or rest
    # The process was ended inside a test: the last that began.
    last = next(filter(None, (_named(line, tests) for line in reversed(lines))), "")
    return "timeout" if code is None or "+++ Timeout +++" in printed else "caught", last


def _named(line: str, tests: list[str]) -> str:
    return max((test for test in tests if line.startswith(test)), key=len, default="")


def _file(test: str) -> str:
    return test.partition("::")[0]
