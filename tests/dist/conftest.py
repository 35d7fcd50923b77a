"""What distributed tests share."""

from __future__ import annotations

import pytest

from tests.harness import Ranks


@pytest.fixture(scope="session")
def ranks() -> Ranks:
    return Ranks()
