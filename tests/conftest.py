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
from hypothesis import settings

# Machines are shared and noisy: no test may fail because it was slow.
settings.register_profile("ganglion", deadline=None)
settings.load_profile("ganglion")

TIERS = ("pure", "single", "dist")
RAN: Counter[str] = Counter()
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
LAUNCHER_PREFIXES = ("SLURM_", "PMI_", "MPI_LOCAL", "OMPI_COMM_WORLD_")


class _ForbidTorch:
    """An import hook under which torch does not exist."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError(f"{name} is forbidden: tests/pure must pass without torch")


def pytest_configure(config: pytest.Config) -> None:
    """With `--forbid-torch`, prove that the pure tier needs none."""
    if config.getoption("--forbid-torch"):
        sys.meta_path.insert(0, _ForbidTorch())  # type: ignore[arg-type]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forbid-torch", action="store_true", help="make importing torch an error")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count what really ran, by tier; with several workers this is called in the main process."""
    if report.when == "call":
        RAN[Path(report.location[0]).parts[1]] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a whole run that has lost a tier: green without running is worse than red."""
    config = session.config
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword
    if whole and not hasattr(config, "workerinput") and not all(RAN[tier] for tier in TIERS):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many tests of each tier ran."""
    shown = ", ".join(f"{tier} {RAN[tier]}" for tier in TIERS)
    terminalreporter.write_line(f"tests run by tier: {shown}")


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
