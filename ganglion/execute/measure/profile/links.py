"""Messages between pairs of ranks and collectives of groups, by size.

A message is timed there and back, alone and while all other pairs send too. A collective is timed
on the rank that takes longest, for all have to wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import linear

from ganglion.decide.costs import BUCKET, BYTE, CALL, LATENCY, RING_BYTE, STEP, Timing
from ganglion.execute.comm import Group, Handle, World, empty_for
from ganglion.execute.measure.profile.timing import Watch, undisturbed
from ganglion.units import format_bytes

_WARM_UPS, _LEAST, _MOST = 3, 8, 40
_SMALL_BYTES_PER_S = 1e9  # a guess, for how many repetitions fit into the budget
_TIMEOUT_S = 60.0
_LEAST_SHARE = 0.1
KIND = "profile"


@dataclass(frozen=True, slots=True)
class Pairs:
    """Ranks that send to each other, two by two; the first pair alone, or all at once."""

    link: str  # "intra" or "inter"
    pairs: tuple[tuple[int, int], ...]


def time_messages(
    world: World, watch: Watch, pairs: Pairs, sizes: Sequence[int], budget_s: float
) -> list[Timing]:
    """Return the times of messages one way, the same on every rank.

    The kind is "message" where one pair sends, and "messages at once" where all do.
    """
    transport = world.open_transport(*world.mesh.sizes())
    found = []
    for num_bytes in sizes:
        tensor = torch.ones(num_bytes // 4, device=watch.device)
        repeats = _repeats(num_bytes, budget_s)
        for kind, busy in (("message", pairs.pairs[:1]), ("messages at once", pairs.pairs)):
            if kind != "message" and len(pairs.pairs) == 1:
                continue
            mine = next((pair for pair in busy if world.rank in pair), None)
            world.barrier()
            seconds = 0.0
            if mine is not None:
                peer = mine[0] if mine[1] == world.rank else mine[1]

                def send(peer: int = peer, tensor: Tensor = tensor) -> None:
                    transport.post(peer, KIND, tensor)

                def receive() -> None:
                    transport.receive(_TIMEOUT_S, "a message of the profile")

                seconds = _ping_pong(watch, world.rank == mine[0], send, receive, repeats)
            table = world.gather_numbers([seconds])
            of_first = [float(table[pair[0], 0]) for pair in busy]
            found.append(
                Timing(
                    kind=kind,
                    label=f"{pairs.link}, {format_bytes(num_bytes)}",
                    seconds=median(of_first),
                    terms={LATENCY: 1.0, BYTE: float(num_bytes)},
                )
            )
    world.barrier()
    transport.close()
    return found


def _ping_pong(
    watch: Watch,
    begins: bool,
    send: Callable[[], None],
    receive: Callable[[], None],
    repeats: int,
) -> float:
    """Return half the time there and back."""

    def there_and_back() -> None:
        for sends in (begins, not begins):
            if sends:
                send()
            else:
                receive()

    for _ in range(_WARM_UPS):
        there_and_back()
    return undisturbed([watch.once(there_and_back) for _ in range(repeats)]) / 2


def time_rings(
    world: World, watch: Watch, group: Group, link: str, sizes: Sequence[int], budget_s: float
) -> list[Timing]:
    """Return the times of the collectives of a group, the same on every rank.

    Each follows a product that makes its tensor, as in training: what a collective adds to that is
    its time. Every group of that size works at the same time.
    """
    found = []
    for num_bytes in sizes:
        work = _work(num_bytes, group.size, watch.device)
        repeats = _repeats(num_bytes, budget_s)
        alone_s = _call_s(world, watch, work, repeats)
        for name, call, steps in _calls(group, work):

            def both(call: Callable[[], Handle] = call) -> None:
                call().wait()

            seconds = _call_s(world, watch, both, repeats) - alone_s
            if seconds < _LEAST_SHARE * alone_s:
                continue  # lost in the noise of the product
            found.append(
                Timing(
                    kind=name,
                    label=f"{link}, {group.size} ranks, {format_bytes(num_bytes)}",
                    seconds=seconds,
                    terms={
                        CALL: 1.0,
                        STEP: float(steps),
                        RING_BYTE: steps / group.size * num_bytes,
                    },
                )
            )
    return found


def overlap_share(world: World, watch: Watch, group: Group, num_bytes: int) -> float:
    """Return the share of a collective that is hidden behind as much computation, from 0 to 1."""
    work = _work(num_bytes, group.size, watch.device)
    tensor = work()
    collective_s = _call_s(world, watch, lambda: group.all_reduce(tensor).wait(), _LEAST)
    count = max(1, round(collective_s / watch.time_s(work, _LEAST)))

    def compute() -> None:
        for _ in range(count):
            work()

    def together() -> None:
        handle = group.all_reduce(tensor)
        compute()
        handle.wait()

    compute_s = _call_s(world, watch, compute, _LEAST)
    hidden_s = compute_s + collective_s - _call_s(world, watch, together, _LEAST)
    return max(0.0, min(1.0, hidden_s / min(compute_s, collective_s)))


_COLUMNS, _INNER = 256, 16


def _work(num_bytes: int, num_parts: int, device: torch.device) -> Callable[[], Tensor]:
    """Return a product that makes a tensor of about so many bytes, in equal parts along dim 0."""
    columns = min(_COLUMNS, max(1, num_bytes // 4 // num_parts))
    rows = max(1, num_bytes // 4 // columns // num_parts) * num_parts
    left = torch.randn(rows, _INNER, device=device)
    right = torch.randn(columns, _INNER, device=device)
    return partial(linear, left, right)


def _calls(group: Group, work: Callable[[], Tensor]) -> list[tuple[str, Callable[[], Handle], int]]:
    """Return a product with each collective on what it made, and the steps of their rings."""
    like = work()
    part = torch.empty_like(like[: len(like) // group.size])
    whole = torch.empty_like(like)

    bucket = empty_for(group, like.numel(), like).zero_()

    def filled_bucket() -> Tensor:
        work()
        return bucket

    def own() -> Tensor:
        return work()[: len(part)]

    steps = group.size - 1
    return [
        ("all-reduce", lambda: group.all_reduce(work()), 2 * steps),
        (BUCKET, lambda: group.all_reduce(filled_bucket()), 2 * steps),
        # The size of a gather is that of what it gives.
        ("all-gather", lambda: group.all_gather(whole, own()), steps),
        ("reduce-scatter", lambda: group.reduce_scatter(part, work()), steps),
    ]


def _call_s(world: World, watch: Watch, call: Callable[[], object], repeats: int) -> float:
    """Return the seconds of calls that follow each other, on the rank that takes longest."""
    world.barrier()
    taken = [watch.once(call) for _ in range(_WARM_UPS + repeats)][_WARM_UPS:]
    return float(world.gather_numbers([undisturbed(taken)]).max())


def _repeats(num_bytes: int, budget_s: float) -> int:
    guess_s = 1e-4 + num_bytes / _SMALL_BYTES_PER_S
    return max(_LEAST, min(_MOST, round(budget_s / guess_s)))
