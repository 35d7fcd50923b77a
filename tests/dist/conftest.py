"""What distributed tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness import Ranks
from tests.leftovers import remove_segments_of_dead_mpi_jobs


@pytest.fixture(scope="session")
def ranks() -> Ranks:
    return Ranks()


@pytest.fixture(scope="session", autouse=True)
def _mpi_segments() -> Iterator[None]:
    yield
    remove_segments_of_dead_mpi_jobs()
