"""Tests of the deciding half are imported and run where torch does not exist."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest

from tests.support.absent import without_torch

APART = without_torch()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Import the test modules of this folder, and so what they import, without torch."""
    with APART:
        return (yield)


@pytest.fixture(scope="module", autouse=True)
def _without_torch() -> Iterator[None]:
    """Run them so. The scope is that of modules, as their own fixtures must run so as well."""
    with APART:
        yield
