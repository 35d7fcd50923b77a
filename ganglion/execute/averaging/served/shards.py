"""A served centre as one vector, whose parts several servers may hold.

    flat    | shard 0 | shard 1 | ... | the last takes the rest |
                |         |
             server 0  server 1           each exchanges on its own and has its own versions

A worker asks all shards at once and waits for all; their versions may differ.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ganglion.errors import ConfigError
from ganglion.execute.averaging.served.center_link import Answer, CenterLink
from ganglion.execute.averaging.served.connections import Store


def shard_bounds(numel: int, num_shards: int) -> tuple[tuple[int, int], ...]:
    """Cut a vector into equal parts (begin, end); the last one takes the remainder."""
    if not 1 <= num_shards <= numel:
        raise ConfigError(
            f"num_shards = {num_shards}: give 1 to {numel}, the number of weights of the centre"
        )
    size = numel // num_shards
    cuts = [*range(0, size * num_shards, size), numel]
    return tuple(itertools.pairwise(cuts))


class Shard(NamedTuple):
    """A link to one shard, and its elements of the flat vector."""

    link: CenterLink
    begin: int
    end: int


class ShardedCenter:
    """The links of one worker to all shards."""

    def __init__(
        self,
        store: Store,
        like: Tensor,
        *,
        run_id: str,
        worker: int,
        num_shards: int = 1,
        timeout_s: float = 300.0,
    ) -> None:
        """Prepare to connect through `store`; the centre is a host vector like `like`."""
        self.numel = like.numel()
        self.dtype = like.dtype
        self.staleness: Counter[int] = Counter()
        self.num_refused = self.max_queue = 0
        self.wait_s = self.comm_s = self.apply_s = 0.0
        self.num_members = self.max_members = 0  # now, and the most there ever were
        self._asked_s: float | None = None
        self.parts = tuple(
            Shard(
                CenterLink(
                    store,
                    run_id=run_id,
                    worker=worker,
                    numel=end - begin,
                    dtype=self.dtype,
                    shard=shard,
                    timeout_s=timeout_s,
                ),
                begin,
                end,
            )
            for shard, (begin, end) in enumerate(shard_bounds(self.numel, num_shards))
        )

    @property
    def num_retries(self) -> int:
        """The number of connections that broke and were made again."""
        return sum(max(0, part.link.num_connections - 1) for part in self.parts)

    @property
    def sent_bytes(self) -> int:
        """The number of bytes that this worker has sent."""
        return sum(part.link.sent_bytes for part in self.parts)

    def join(self) -> Tensor:
        """Become a member of every shard; return the centre, where this worker starts."""
        center = torch.cat([part.link.join() for part in self.parts])
        self._count_members()
        return center

    def look(self) -> Tensor:
        """Return the present centre."""
        return torch.cat([part.link.look() for part in self.parts])

    def recall(self) -> tuple[Tensor, Tensor]:
        """Return the present centre and its velocity."""
        centers, velocities = zip(*(part.link.recall() for part in self.parts), strict=True)
        return torch.cat(centers), torch.cat(velocities)

    def restore(self, flat: Tensor, velocity: Tensor | None = None) -> None:
        """Set the centre and its velocity (None for zero); no worker may exchange meanwhile."""
        for part in self.parts:
            moving = None if velocity is None else velocity[part.begin : part.end]
            part.link.restore(flat[part.begin : part.end], moving)

    def tensors(self) -> list[Tensor]:
        """Return the buffers of messages to the shards."""
        return [part.link.block.payload for part in self.parts]

    def fill(self, flat: Tensor) -> None:
        """Copy a vector into the next messages."""
        for part in self.parts:
            part.link.block.payload.copy_(flat[part.begin : part.end])

    def ask(self, kind: str, *, step: int, rate: float = 0.0) -> None:
        """Send the same request to all shards."""
        self._asked_s = time.perf_counter()
        for part in self.parts:
            part.link.ask(kind, step=step, rate=rate)

    def answers(self) -> Iterator[tuple[Shard, Answer]]:
        """Wait for the answer of each shard, one after the other."""
        for part in self.parts:
            yield part, self._answer_of(part)
        if self._asked_s is not None:  # an upper bound: early answers wait here
            self.comm_s += time.perf_counter() - self._asked_s
            self._asked_s = None

    def _answer_of(self, part: Shard) -> Answer:
        start_s = time.perf_counter()
        answer = part.link.answer()
        self.wait_s += time.perf_counter() - start_s
        self.num_refused += answer.envelope.is_refused
        self.staleness[answer.envelope.staleness] += 1
        self.max_queue = max(self.max_queue, answer.envelope.queue)
        self._count_members()
        self.apply_s += answer.envelope.apply_s
        return answer

    def leave(self) -> None:
        """Leave all shards."""
        for part in self.parts:
            part.link.leave()

    def _count_members(self) -> None:
        self.num_members = max(part.link.num_members for part in self.parts)
        self.max_members = max(self.max_members, self.num_members)
