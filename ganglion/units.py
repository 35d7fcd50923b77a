"""Units: byte counts, counts and durations as text for people."""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


def format_bytes(num_bytes: float) -> str:
    """Return a size with a binary unit: `format_bytes(1536) == '1.5 KiB'`."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def format_count(number: float) -> str:
    """Return a count with a decimal suffix: `format_count(1_234_567) == '1.2M'`."""
    value = float(number)
    for suffix in ("", "k", "M", "G", "T"):
        if abs(value) < 1000:
            return f"{value:.0f}" if suffix == "" else f"{value:.1f}{suffix}"
        value /= 1000
    return f"{value:.1f}P"


def format_duration(duration_s: float) -> str:
    """Return a duration in a suitable unit: `format_duration(75) == '1m15s'`."""
    if duration_s < 1:
        return f"{duration_s * 1000:.0f}ms"
    if duration_s < 60:
        return f"{duration_s:.1f}s"
    minutes, seconds = divmod(round(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"


def format_time(time_s: float) -> str:
    """Return a short time with three digits: `format_time(0.00185) == '1.85 ms'`."""
    for unit, size_s in (("s", 1.0), ("ms", 1e-3)):
        if abs(time_s) >= size_s or time_s == 0:
            return f"{time_s / size_s:.3g} {unit}"
    return f"{time_s / 1e-6:.3g} us"
