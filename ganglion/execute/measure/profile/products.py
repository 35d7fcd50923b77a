"""Rates of matrix products, by shape, precision and number of threads, on all ranks at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from ganglion.decide.costs import FLOP, MEMORY_BYTE, Timing
from ganglion.execute.comm import World
from ganglion.execute.measure.profile.timing import Watch

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTime:
    """The time of one product (m, k) x (k, n)."""

    m: int
    k: int
    n: int
    precision: str
    num_threads: int
    seconds: float

    @property
    def flops(self) -> float:
        """Flop a second."""
        return 2.0 * self.m * self.k * self.n / self.seconds

    def timing(self) -> Timing:
        """Return the time with its amounts."""
        m, k, n = self.m, self.k, self.n
        moved = (m * k + k * n + m * n) * _TYPES[self.precision].itemsize
        return Timing(
            kind="product",
            label=f"{m} x {k} x {n}",
            seconds=self.seconds,
            terms={FLOP: 2.0 * m * k * n, MEMORY_BYTE: float(moved)},
        )


def time_products(
    world: World,
    watch: Watch,
    shapes: Sequence[tuple[int, int, int]],
    *,
    precision: str,
    num_threads: int,
) -> list[ProductTime]:
    """Return the times of products on this rank, while every rank multiplies the same."""
    found: list[ProductTime] = []
    with _threads(num_threads, watch.device):
        for m, k, n in shapes:
            call = partial(linear, *(_random(r, k, precision, watch.device) for r in (m, n)))
            repeats = watch.num_repeats(call)
            world.barrier()
            found.append(
                ProductTime(
                    m=m,
                    k=k,
                    n=n,
                    precision=precision,
                    num_threads=num_threads,
                    seconds=watch.time_s(call, repeats),
                )
            )
    return found


def _random(rows: int, columns: int, precision: str, device: torch.device) -> Tensor:
    return torch.randn(rows, columns, dtype=_TYPES[precision], device=device)


@contextmanager
def _threads(number: int, device: torch.device) -> Iterator[None]:
    """Compute with so many threads; a device of its own needs none of them."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(number)
    yield
    torch.set_num_threads(before)
