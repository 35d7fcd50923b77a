"""Asynchronous workers without server processes: some of them serve the centre, or all share it.

| mode          | centre                            | served by                              |
|---------------|-----------------------------------|----------------------------------------|
| "async"       | "server", or "sharded:K"          | a thread of each of the first K workers |
| "round_robin" | the same, in order of rank        | the same                               |
| "async_sgd"   | the same, moved by updates        | the same                               |
| "hogwild", "hogwild_sgd" | one memory of this host | none: all workers write it             |

A worker that serves stays until all workers have left. With `servers`, separate processes serve
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
from ganglion.execute.averaging.methods import (
    HogwildEasgd,
    HogwildSgd,
    Method,
    Packed,
    SharedCenter,
)
from ganglion.execute.averaging.options import OUTER, RATE, SERVER, AveragingOptions
from ganglion.execute.averaging.served.connections import place_of
from ganglion.execute.averaging.served.methods import ServedEasgd, ServedSgd
from ganglion.execute.averaging.served.server import CenterServer
from ganglion.execute.averaging.served.server_process import (
    CountingStore,
    RemoteHost,
    order_of,
    remote_center,
    rule_of,
)
from ganglion.execute.averaging.served.shards import ShardedCenter, shard_bounds
from ganglion.execute.comm import Group, broadcast_text

_SHARED_FOLDER = Path("/dev/shm")


class CenterHost(Protocol):
    """This worker's part in keeping an asynchronous centre for all workers."""

    def restore(self, center: Tensor, velocity: Tensor | None = None) -> None:
        """Set the centre and its velocity (None for zero); no worker may exchange meanwhile."""

    def tensors(self) -> list[Tensor]:
        """Return the memory that this worker keeps for the others."""

    def close(self) -> None:
        """Return when no worker needs this worker's part of the centre any more."""


class _AddressTable:
    """The addresses of all servers, in place of a store; every worker has a copy."""

    def __init__(self) -> None:
        self._entries: dict[str, str] = {}

    def set(self, key: str, value: str, /) -> None:
        self._entries[key] = value

    def get(self, key: str, /) -> bytes:
        return self._entries.get(key, "").encode()

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        missing = [key for key in keys if not self._entries.get(key)]
        if missing:
            raise RuntimeError(f"no worker serves {missing}")


class _NoHost:
    """The part of a worker that serves nothing."""

    def restore(self, center: Tensor, velocity: Tensor | None = None) -> None:
        pass

    def tensors(self) -> list[Tensor]:
        return []

    def close(self) -> None:
        pass


class _ThreadHost:
    """One shard of the centre, served by a thread of this worker."""

    def __init__(self, server: CenterServer, begin: int, timeout_s: float) -> None:
        self._server, self._begin, self._timeout_s = server, begin, timeout_s
        self._error: BaseException | None = None
        # A daemon: a worker that failed must not stay alive for the others.
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


def async_method(
    options: AveragingOptions,
    packed: Packed,
    group: Group,
    lr: Callable[[], float],
    timeout_s: float,
    store: CountingStore | None = None,
    listen_on: str | None = None,
) -> tuple[Method, CenterHost]:
    """Return the method of an asynchronous mode, and this worker's part in hosting its centre.

    With a `store`, server processes are found through it; otherwise workers serve, at the address
    `listen_on` if they are on several hosts.
    """
    _check(options, group.size, lr())
    if options.mode in (HOGWILD, HOGWILD_SGD):
        return _hogwild(options, packed, group), _NoHost()
    host: CenterHost
    if store is None:
        center, host = _serve_locally(options, packed, group, timeout_s, listen_on)
    else:
        center = remote_center(options, packed, group, store, timeout_s)
        host = RemoteHost(center, group)
    num_workers, tau = group.size, options.tau
    if options.mode == ASYNC_SGD:
        moves = options.center_momentum > 0
        method = ServedSgd(packed, center, num_workers=num_workers, tau=tau, has_momentum=moves)
        return method, host
    rate, overlap = options.rate(), options.overlap
    elastic = ServedEasgd(
        packed, center, rate, lr, num_workers=num_workers, tau=tau, overlap=overlap
    )
    return elastic, host


def _check(options: AveragingOptions, num_workers: int, lr: float) -> None:
    """Refuse options that do not fit, before anything starts that others would wait for."""
    options.refuse(("outer", "compress", *OUTER, "bucket_mb", "pack", "reduction"))
    if options.mode != ASYNC_SGD:
        options.refuse(("center_momentum",))
    if options.mode in (ASYNC_SGD, HOGWILD_SGD):
        options.refuse(RATE)
    else:
        options.rate().checked_alpha(lr, num_workers, options.tau, options.mode)


def _serve_locally(
    options: AveragingOptions,
    packed: Packed,
    group: Group,
    timeout_s: float,
    listen_on: str | None,
) -> tuple[ShardedCenter, CenterHost]:
    """Start a server on each of the first workers, and give all workers their addresses."""
    bounds = shard_bounds(packed.numel, _num_shards(options, group))
    run_id, addresses = broadcast_text(group, uuid.uuid4().hex[:16], 0), _AddressTable()
    host: CenterHost = _NoHost()
    if group.index < len(bounds):
        begin, end = bounds[group.index]
        server = CenterServer(
            packed.gather()[begin:end].to("cpu", copy=True),
            rule_of(options.mode, options.center_momentum, packed.num_trained - begin, end - begin),
            addresses,
            run_id=run_id,
            num_workers=group.size,
            shard=group.index,
            order=order_of(options.mode),
            max_staleness=options.max_staleness,
            timeout_s=timeout_s,
            listen_on=listen_on,
        )
        host = _ThreadHost(server, begin, timeout_s)
    for shard in range(len(bounds)):
        place = place_of(run_id, shard)
        addresses.set(place, broadcast_text(group, addresses.get(place).decode(), shard))
    like, worker = packed.gather().to("cpu"), group.index
    center = ShardedCenter(
        addresses, like, run_id=run_id, worker=worker, num_shards=len(bounds), timeout_s=timeout_s
    )
    return center, host


def _num_shards(options: AveragingOptions, group: Group) -> int:
    """Return K of "sharded:K", 1 of "server"."""
    kind, _, number = options.center_of_mode().partition(":")
    if kind == SERVER and not number:
        return 1
    if kind == "sharded" and number.isdecimal() and 1 <= int(number) <= group.size:
        return int(number)
    raise ConfigError(
        f'center = "{options.center}" does not fit mode = "{options.mode}": give "server", or '
        f'"sharded:K" with K from 1 to the {group.size} workers'
    )


def _hogwild(options: AveragingOptions, packed: Packed, group: Group) -> Method:
    """Return a method on memory that the workers share; they must be on one host."""
    path = _SHARED_FOLDER / broadcast_text(group, f"ganglion-{uuid.uuid4().hex}", 0)
    if group.index == 0:
        center = SharedCenter.create(path, packed.gather().to("cpu"), group.size)
    group.barrier()
    if not path.exists():
        raise ConfigError(
            f'mode = "{options.mode}" shares memory, but this worker does not see that of the '
            f'first one at {path}: start all workers on one host, or give mode="async"'
        )
    center = SharedCenter.attach(path)
    group.barrier()
    if group.index == 0:
        path.unlink()  # the mappings stay valid, and no file is left behind
    worker, tau, limit = group.index, options.tau, options.max_staleness
    if options.mode == HOGWILD_SGD:
        return HogwildSgd(packed, center, worker, tau=tau, max_staleness=limit)
    rate = options.rate()
    return HogwildEasgd(packed, center, rate, worker, tau=tau, max_staleness=limit)
