"""Things that tests must not leave behind: processes, temporary files, segments of shared memory.

Each worker has a temporary folder of its own and adopts the orphans of its tests, so that whatever
is left is known to be of one of them: of the one after which it was first seen.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from multiprocessing.util import Finalize
from pathlib import Path

from tests.support.warm_python import FOLDER_PREFIX, SERVERS

SHARED_MEMORY = Path("/dev/shm")
_PR_SET_CHILD_SUBREAPER = 36
_NEXT_LOOK_S = 0.1
_GRACE_S = 10.0  # processes that were asked to end may take a moment


@dataclass
class Leftovers:
    """The things that were there before, and the test after which each new one was first seen."""

    folder: Path
    known: set[str] = field(default_factory=set)
    seen_after: dict[str, str] = field(default_factory=dict)

    def begin(self) -> None:
        """Accept everything that is there now."""
        self.known, self.seen_after = self._present(), {}

    def look(self, test: str) -> None:
        """Remember the things that are new after a test."""
        for thing in self._present() - self.known:
            self.seen_after.setdefault(thing, test)

    def remaining(self) -> list[str]:
        """Return the things that stay after a grace period, each with the test before it."""
        end_s = time.monotonic() + _GRACE_S
        while self._present() - self.known and time.monotonic() < end_s:
            time.sleep(0.05)
        return [
            f"{thing}, first seen after {self.seen_after.get(thing, 'the last test')}"
            for thing in sorted(self._present() - self.known)
        ]

    def _present(self) -> set[str]:
        files = {f"file {path}" for path in self.folder.iterdir() if not _lives_on(path)}
        return files | {f"process {_described(number)}" for number in _descendants()}


def own_temporary_folder() -> Path:
    """Make a folder for all temporary files of this process and its children."""
    folder = Path(tempfile.mkdtemp(prefix="t-"))  # short: sockets have at most 107 characters
    # multiprocessing has a folder in it, which it removes at an exit priority of -100.
    Finalize(None, shutil.rmtree, args=(folder,), exitpriority=-200)
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None
    return folder


def adopt_orphans() -> None:
    """Become the parent of processes whose own parent ends before them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def segments() -> set[str]:
    """Return all segments of shared memory on this machine."""
    return {str(path) for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.exists() else set()


def abandoned_segments(before: set[str], grace_s: float = _GRACE_S) -> set[str]:
    """Return the segments since `before` that no process has had mapped during the grace period.

    Other programs may be at work here, and theirs come and go. Semaphores of multiprocessing are
    removed by a process of their own, shortly after the last process that mapped them has ended.
    """
    end_s = time.monotonic() + grace_s
    found = segments() - before - _mapped()
    while found and time.monotonic() < end_s:
        time.sleep(_NEXT_LOOK_S)
        found &= segments() - _mapped()
    return found


def _mapped() -> set[str]:
    """Return the segments of shared memory that some process has mapped."""
    maps = (_text(path) for path in Path("/proc").glob("[0-9]*/maps"))
    lines = (line for text in maps for line in text.splitlines() if str(SHARED_MEMORY) in line)
    return {line.split()[-1] for line in lines}


def hydra_files() -> set[str]:
    """Return the files that mpiexec keeps in /tmp despite TMPDIR, and leaves there if killed."""
    return {str(path) for path in Path("/tmp").glob("hydra_hwloc_xmlfile_*")}


def remove_what_dead_mpi_jobs_left(before: set[str]) -> None:
    """Remove unused leftovers of killed MPICH jobs, and their files that are not in `before`."""
    left = {str(path) for path in SHARED_MEMORY.glob("mpich_shm_*")} - _mapped()
    if not any("hydra_pmi_proxy" in _command(number) for number in _processes()):
        left |= hydra_files() - before  # which such a process reads and removes
    for path in left:
        Path(path).unlink(missing_ok=True)


def _processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _lives_on(path: Path) -> bool:
    """Return whether it serves the whole session: sockets of multiprocessing, caches of torch."""
    return path.name.startswith(("pymp-", "torchinductor_", FOLDER_PREFIX))


def _descendants() -> list[int]:
    """Return processes below this one but for the servers of multiprocessing, found quickly."""
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    tracker = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
    servers = {server, tracker, *(each.pid for each in SERVERS)}
    parents = [os.getpid(), *(number for number in servers - {tracker} if number is not None)]
    found = [number for parent in parents for number in _children(parent)]
    return [number for number in found if number not in servers]


def _children(process: int) -> list[int]:
    """Return the children of all threads of a process that have not ended."""
    found: list[int] = []
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        found += [int(number) for number in _text(path).split()]
    return [number for number in found if _command(number)]


def _command(process: int) -> str:
    """Return the command line of a process; that of one which has ended is empty."""
    return _text(Path(f"/proc/{process}/cmdline")).replace("\0", " ")


def _described(process: int) -> str:
    return f"{process} ({_command(process)[:150].strip()})"


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
