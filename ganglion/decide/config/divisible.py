"""One check of all layouts: that an axis divides a size of the run file."""

from __future__ import annotations

from ganglion.errors import LayoutError


def check_divides(key: str, size: int, axis: str, parts: int) -> None:
    """Refuse a size, by the key it is known by, that cannot be split over an axis."""
    if size % parts:
        raise LayoutError(
            f"{key} = {size} cannot be split over parallel.{axis} = {parts}: choose a multiple of "
            f"{parts}, or another parallel.{axis}"
        )
