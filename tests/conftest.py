"""What every test starts from: a fixed seed, no launcher around it, and nothing left behind."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Machines are shared and noisy: no test may fail because it was slow.
settings.register_profile("ganglion", deadline=None)
settings.load_profile("ganglion")

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


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


@pytest.fixture(autouse=True)
def _clean_start(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [*LAUNCHER_VARIABLES, *(k for k in os.environ if k.startswith("SLURM_"))]:
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
