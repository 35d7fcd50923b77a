"""Numbers as a person would write them."""

from __future__ import annotations

import pytest

from ganglion.units import format_bytes, format_count, format_duration


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (3 * 2**30, "3.0 GiB"),
        (2**50, "1024.0 TiB"),
    ],
)
def test_bytes(value: float, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(("value", "text"), [(7, "7"), (1234, "1.2k"), (1_234_567, "1.2M")])
def test_counts(value: float, text: str) -> None:
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.5, "500ms"), (2.04, "2.0s"), (75, "1m15s"), (3700, "1h01m")]
)
def test_durations(value: float, text: str) -> None:
    assert format_duration(value) == text
