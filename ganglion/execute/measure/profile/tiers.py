"""Rates of host memory and disk as tiers, while all ranks move theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ganglion.execute.comm import World
from ganglion.execute.measure.profile.timing import Watch
from ganglion.execute.offload import DiskTier, HostTier, Tier, page_buffer

_MOVES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRates:
    """Bytes a second of one rank."""

    name: str
    read_bytes_per_s: float
    write_bytes_per_s: float


def time_tiers(world: World, watch: Watch, folder: Path, num_bytes: int) -> list[TierRates]:
    """Return the rates of the tiers of this machine, the mean of all ranks.

    Host memory is a tier of devices with memory of their own; without one it is measured as a copy.
    """
    found = []
    tiers: dict[str, Callable[[], Tier]] = {
        "host": partial(HostTier, watch.device),
        "disk": partial(DiskTier, folder, watch.device),
    }
    for name, opened in tiers.items():
        tier = opened()
        buffer = page_buffer(num_bytes, watch.device)
        region = tier.reserve(num_bytes)
        calls = (partial(region.write_from, 0, buffer), partial(region.read_into, 0, buffer))
        written_s, read_s = (_moved_s(world, watch, call) for call in calls)
        tier.close()
        found.append(
            TierRates(
                name=name,
                read_bytes_per_s=num_bytes / read_s,
                write_bytes_per_s=num_bytes / written_s,
            )
        )
    return found


def _moved_s(world: World, watch: Watch, call: Callable[[], None]) -> float:
    """Return the seconds of a move, the mean of all ranks."""
    call()
    taken = []
    for _ in range(_MOVES):
        world.barrier()
        taken.append(watch.once(call)[0])
    return float(world.gather_numbers([min(taken)]).mean())
