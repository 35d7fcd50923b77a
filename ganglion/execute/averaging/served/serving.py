"""Asynchronous workers that need nobody else: the centre is served, or shared, from among them.

| mode          | centre                            | served by                              |
|---------------|-----------------------------------|----------------------------------------|
| "async"       | "server", or "sharded:K"          | a thread of each of the first K workers |
| "round_robin" | the same, in order of rank        | the same                               |
| "async_sgd"   | the same, moved by updates        | the same                               |
| "hogwild", "hogwild_sgd" | one memory of this host | nobody: all write it                   |

Whoever serves stays until all workers have gone. With `servers`, processes of their own serve
instead; see server_process.py.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from torch import Tensor

from ganglion.decide.plan import ASYNC_SGD, HOGWILD, HOGWILD_SGD
from ganglion.errors import CommError, ConfigError
from ganglion.execute.averaging.choosing import RATE, SERVER, Wishes, refuse
from ganglion.execute.averaging.methods import (
    HogwildEasgd,
    HogwildSgd,
    Method,
    Packed,
    SharedCenter,
)
from ganglion.execute.averaging.served.connections import place_of
from ganglion.execute.averaging.served.methods import ServedEasgd, ServedSgd
from ganglion.execute.averaging.served.server import CenterServer
from ganglion.execute.averaging.served.server_process import (
    CountingStore,
    RemoteCenter,
    order_of,
    remote_center,
    rule_of,
)
from ganglion.execute.averaging.served.shards import ShardedCenter, shard_bounds
from ganglion.execute.comm import Group, broadcast_text

_SHARED_FOLDER = Path("/dev/shm")


class Hosting(Protocol):
    """What a worker keeps for all of them, besides its own method."""

    def restore(self, center: Tensor, velocity: Tensor | None = None) -> None:
        """Put the centre back, moving or at rest, while nobody exchanges."""

    def tensors(self) -> list[Tensor]:
        """Return what this worker keeps for the others."""

    def close(self) -> None:
        """Return when nobody needs this worker's part of the centre any more."""


class _Board:
    """The addresses of all servers, where workers look them up; told to all when they start."""

    def __init__(self) -> None:
        self._entries: dict[str, str] = {}

    def set(self, key: str, value: str, /) -> None:
        self._entries[key] = value

    def get(self, key: str, /) -> bytes:
        return self._entries.get(key, "").encode()

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        missing = [key for key in keys if not self._entries.get(key)]
        if missing:
            raise RuntimeError(f"nobody serves {missing}")


class _Server:
    """One shard of the centre, served by a thread of this worker."""

    def __init__(self, server: CenterServer, begin: int, timeout_s: float) -> None:
        self._server, self._begin, self._timeout_s = server, begin, timeout_s
        self._error: BaseException | None = None
        # A daemon: a worker that failed must not live on for the sake of the others.
        self._thread = threading.Thread(target=self._serve, name="centre", daemon=True)
        self._thread.start()

    def restore(self, center: Tensor, velocity: Tensor | None = None) -> None:
        own = slice(self._begin, self._begin + self._server.center.numel())
        self._server.restore(center[own], None if velocity is None else velocity[own])

    def tensors(self) -> list[Tensor]:
        return self._server.tensors()

    def close(self) -> None:
        self._thread.join(self._timeout_s)
        if self._thread.is_alive():
            raise CommError(
                f"workers still use the centre {self._timeout_s:g} s after this one left: close "
                f"every ElasticAverage, or raise timeout_s"
            )
        if self._error is not None:
            raise self._error

    def _serve(self) -> None:
        try:
            self._server.serve()
        except BaseException as error:
            self._error = error


class _Nothing:
    """The part of a worker that serves nothing."""

    def restore(self, center: Tensor, velocity: Tensor | None = None) -> None:
        pass

    def tensors(self) -> list[Tensor]:
        return []

    def close(self) -> None:
        pass


def served_method(
    wishes: Wishes,
    packed: Packed,
    group: Group,
    lr: Callable[[], float],
    timeout_s: float,
    store: CountingStore | None = None,
    listen_on: str | None = None,
) -> tuple[Method, Hosting]:
    """Return the method of an asynchronous mode, and what this worker serves for it.

    With a `store`, servers are found through it; else workers serve, at `listen_on` if they have
    several hosts.
    """
    _check(wishes, group.size, lr())
    if wishes.mode in (HOGWILD, HOGWILD_SGD):
        return _hogwild(wishes, packed, group), _Nothing()
    if store is None:
        center, hosting = _served(wishes, packed, group, timeout_s, listen_on)
    else:
        center = remote_center(wishes, packed, group, store, timeout_s)
        hosting = RemoteCenter(center, group)
    num_workers, tau, overlap = group.size, wishes.tau, wishes.overlap
    if wishes.mode == ASYNC_SGD:
        moves = wishes.center_momentum > 0
        method = ServedSgd(packed, center, num_workers=num_workers, tau=tau, has_momentum=moves)
        return method, hosting
    rate = wishes.rate()
    elastic = ServedEasgd(
        packed, center, rate, lr, num_workers=num_workers, tau=tau, overlap=overlap
    )
    return elastic, hosting


def _check(wishes: Wishes, num_workers: int, lr: float) -> None:
    """Refuse what cannot be, before anything is started that others would wait for."""
    names = ("outer", "compress", "q", "delay", "fragments", "bucket_mb", "pack", "reduction")
    refuse(wishes, names, wishes.mode)
    if wishes.mode != ASYNC_SGD:
        refuse(wishes, ("center_momentum",), wishes.mode)
    if wishes.mode in (ASYNC_SGD, HOGWILD_SGD):
        refuse(wishes, RATE, wishes.mode)
    else:
        wishes.rate().checked_alpha(lr, num_workers, wishes.tau, wishes.mode)


def _served(
    wishes: Wishes, packed: Packed, group: Group, timeout_s: float, listen_on: str | None
) -> tuple[ShardedCenter, Hosting]:
    """Start the servers, one on each of the first workers, and tell all where they are."""
    bounds = shard_bounds(packed.numel, _num_shards(wishes, group))
    run_id, board = broadcast_text(group, uuid.uuid4().hex[:16], 0), _Board()
    hosting: Hosting = _Nothing()
    if group.index < len(bounds):
        begin, end = bounds[group.index]
        server = CenterServer(
            packed.gather()[begin:end].to("cpu", copy=True),
            rule_of(wishes.mode, wishes.center_momentum, packed.num_trained - begin, end - begin),
            board,
            run_id=run_id,
            num_workers=group.size,
            shard=group.index,
            order=order_of(wishes.mode),
            max_staleness=wishes.max_staleness,
            timeout_s=timeout_s,
            listen_on=listen_on,
        )
        hosting = _Server(server, begin, timeout_s)
    for shard in range(len(bounds)):
        place = place_of(run_id, shard)
        board.set(place, broadcast_text(group, board.get(place).decode(), shard))
    like, worker = packed.gather().to("cpu"), group.index
    center = ShardedCenter(
        board, like, run_id=run_id, worker=worker, num_shards=len(bounds), timeout_s=timeout_s
    )
    return center, hosting


def _num_shards(wishes: Wishes, group: Group) -> int:
    """Return K of "sharded:K", 1 of "server"."""
    kind, _, number = wishes.center_of_mode().partition(":")
    if kind == SERVER and not number:
        return 1
    if kind == "sharded" and number.isdecimal() and 1 <= int(number) <= group.size:
        return int(number)
    raise ConfigError(
        f'center = "{wishes.center}" does not fit mode = "{wishes.mode}": give "server", or '
        f'"sharded:K" with K from 1 to the {group.size} workers'
    )


def _hogwild(wishes: Wishes, packed: Packed, group: Group) -> Method:
    """Share one memory between the workers, which must be on one host."""
    path = _SHARED_FOLDER / broadcast_text(group, f"ganglion-{uuid.uuid4().hex}", 0)
    if group.index == 0:
        center = SharedCenter.create(path, packed.gather().to("cpu"), group.size)
    group.barrier()
    if not path.exists():
        raise ConfigError(
            f'mode = "{wishes.mode}" shares memory, but this worker does not see that of the '
            f'first one at {path}: start all workers on one host, or give mode="async"'
        )
    center = SharedCenter.attach(path)
    group.barrier()
    if group.index == 0:
        path.unlink()  # those who mapped it keep it, and nothing is left behind
    worker, tau, limit = group.index, wishes.tau, wishes.max_staleness
    if wishes.mode == HOGWILD_SGD:
        return HogwildSgd(packed, center, worker, tau=tau, max_staleness=limit)
    rate = wishes.rate()
    return HogwildEasgd(packed, center, rate, worker, tau=tau, max_staleness=limit)
