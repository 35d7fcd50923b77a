"""What every test starts from: a fixed seed, no launcher around it, and nothing left behind."""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.leftovers import (
    Leftovers,
    abandoned_segments,
    adopt_orphans,
    own_temporary_folder,
    segments,
)
from tests.support.profiles import load_profile

load_profile()

TIERS = ("pure", "single", "dist")
SLOWEST = 10
SECONDS: Counter[str] = Counter()  # by test, with what was set up and torn down for it
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
LAUNCHER_PREFIXES = ("SLURM_", "PMI_", "MPI_LOCAL", "OMPI_COMM_WORLD_")
SEGMENTS_BEFORE = pytest.StashKey[set[str]]()
SEGMENTS_LEFT = pytest.StashKey[set[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in a random order")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffle the modules, and the tests of each: what they set up together stays together."""
    if (seed := config.getoption("--shuffle")) is None:
        return
    names = [item.nodeid for item in items]
    random.Random(seed).shuffle(names)
    place = {name: number for number, name in enumerate(names)}
    first: dict[Path, int] = {}
    for item in items:
        first[item.path] = min(place[item.nodeid], first.get(item.path, len(items)))
    items.sort(key=lambda item: (first[item.path], place[item.nodeid]))


def pytest_configure(config: pytest.Config) -> None:
    """Remember which segments there are before all tests."""
    config.stash[SEGMENTS_BEFORE] = segments()
    config.stash[SEGMENTS_LEFT] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up the time of every test; with several workers this is called in the main process."""
    SECONDS[report.nodeid] += report.duration


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a whole run that has lost a tier, or that left segments of shared memory."""
    if hasattr(session.config, "workerinput"):
        return
    config = session.config
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword
    config.stash[SEGMENTS_LEFT] = abandoned_segments(config.stash[SEGMENTS_BEFORE])
    if (whole and not all(_by_tier())) or config.stash[SEGMENTS_LEFT]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print how many tests of each tier ran and how long they took, and the slowest."""
    write = terminalreporter.write_line
    for name in sorted(config.stash[SEGMENTS_LEFT]):
        write(f"FAILED: the tests left the segment {name}")
    for tier, seconds in zip(TIERS, _by_tier(), strict=True):
        write(f"{tier:7} {len(seconds):5} tests {sum(seconds):7.1f} s of worker time")
    for test, seconds_of_one in SECONDS.most_common(SLOWEST):
        write(f"{seconds_of_one:7.1f} s  {test}")


def _by_tier() -> list[list[float]]:
    """Return the seconds of the tests of each tier."""
    return [[s for test, s in SECONDS.items() if Path(test).parts[1] == tier] for tier in TIERS]


@pytest.fixture(scope="session")
def _leftovers(tmp_path_factory: pytest.TempPathFactory) -> Leftovers:
    tmp_path_factory.getbasetemp()  # pytest's own folder is to be elsewhere
    adopt_orphans()
    return Leftovers(own_temporary_folder())


@pytest.fixture(scope="module", autouse=True)
def _nothing_left(_leftovers: Leftovers) -> Iterator[None]:
    """Fail if the tests of a module leave a process or a temporary file when all is torn down."""
    _leftovers.begin()
    yield
    remaining = _leftovers.remaining()
    assert not remaining, "left behind:\n" + "\n".join(remaining)


@pytest.fixture(autouse=True)
def _looked_after(_leftovers: Leftovers, request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    _leftovers.look(request.node.nodeid)


@pytest.fixture(autouse=True)
def _clean_start(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [*LAUNCHER_VARIABLES, *(k for k in os.environ if k.startswith(LAUNCHER_PREFIXES))]:
        monkeypatch.delenv(name, raising=False)
    random.seed(0)
    if "torch" in sys.modules:
        import torch

        torch.manual_seed(0)
        torch.set_num_threads(1)
    yield
    if "torch" in sys.modules:
        import torch.distributed as dist

        assert not (dist.is_available() and dist.is_initialized()), "a process group was left"
