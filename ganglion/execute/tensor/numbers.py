"""Numbers that name rows of a split table: one outside would be nobody's, and silently count 0."""

from __future__ import annotations

import torch
from torch import Tensor

from ganglion.errors import DataError


def check_numbers(numbers: Tensor, total: int, what: str) -> None:
    """Refuse numbers outside 0 .. total - 1, as torch does for a whole table."""
    good = (numbers >= 0) & (numbers < total)
    if numbers.device.type != "cpu":
        torch._assert_async(good.all())  # reading the answer would stop the device
    elif not bool(good.all()):
        wrong = int(numbers[~good].flatten()[0])
        raise DataError(
            f"{what} {wrong} is outside 0 .. {total - 1}: check the data, or the size that the "
            f"model was built with"
        )
