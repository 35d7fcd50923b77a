"""Time messages and sums between two ranks of this machine, by every carrier, for the doctor."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from ganglion.execute.comm import World

Key = tuple[str, str, str]  # carrier, "message" or "all-reduce", size
Times = dict[Key, float]
SIZES = {"1 KB": 1 << 10, "1 MB": 1 << 20, "16 MB": 1 << 24}
_ROUNDS, _WARM_UP = 12, 3


@dataclass(frozen=True, slots=True)
class Probe:
    """The results of one rank: the carrier `auto` chose, correct sums, median times."""

    way: str
    correct: bool
    times_s: Times


def probe_ranks() -> Probe:
    """Measure as one of two ranks that a launcher started."""
    import torch

    from ganglion.decide.topology import Mesh, read_launch
    from ganglion.execute.comm import open_world, torch_world

    torch.set_num_threads(1)
    launch = read_launch(os.environ)
    mesh = Mesh(data=launch.num_ranks)
    chosen = open_world(launch, mesh, timeout_s=60.0)
    times_s: Times = {}
    correct = True
    for carrier in dict.fromkeys((chosen.carrier, "torch")):
        world = torch_world(launch.rank, mesh, 60.0, transport=carrier)
        for name, num_bytes in SIZES.items():
            tensor = torch.full((num_bytes // 4,), float(launch.rank + 1))
            correct &= _sums(world, tensor, times_s, (carrier, "all-reduce", name))
            _send(world, tensor, times_s, (carrier, "message", name))
        world.close()
    chosen.close()
    return Probe(chosen.carrier, correct, times_s)


def _sums(world: World, tensor: Tensor, times_s: Times, key: Key) -> bool:
    group, times = world.group("data"), []
    for _ in range(_ROUNDS):
        total = tensor.clone()
        world.barrier()
        start_s = time.perf_counter()
        group.all_reduce(total).wait()
        times.append(time.perf_counter() - start_s)
    times_s[key] = statistics.median(times[_WARM_UP:])
    return bool((total == 3.0).all())


def _send(world: World, tensor: Tensor, times_s: Times, key: Key) -> None:
    """Send a message there and back, and record half of the time."""
    transport, times = world.open_transport("data"), []
    peer = 1 - world.rank
    for _ in range(_ROUNDS):
        world.barrier()
        start_s = time.perf_counter()
        for sender in (0, 1):
            if world.rank == sender:
                transport.post(peer, "probe", tensor)
            else:
                transport.receive(60.0, "a probe")
        times.append((time.perf_counter() - start_s) / 2)
    times_s[key] = statistics.median(times[_WARM_UP:])
    world.barrier()
    transport.close()
