"""The processes that all distributed tests of a session share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    shared = Ranks()
    yield shared
    shared.close()
