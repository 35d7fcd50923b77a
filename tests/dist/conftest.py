"""What distributed tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.harness import Ranks
from tests.support.leftovers import hydra_files, remove_what_dead_mpi_jobs_left


@pytest.fixture(scope="session")
def ranks() -> Ranks:
    return Ranks()


@pytest.fixture(scope="session", autouse=True)
def _mpi_leftovers() -> Iterator[None]:
    before = hydra_files()
    yield
    remove_what_dead_mpi_jobs_left(before)
