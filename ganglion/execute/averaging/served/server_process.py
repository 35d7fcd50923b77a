"""Server processes: each finds the centres it has to serve through a store.

    workers                          store                      server process k of K
    announce(centre 0, 1, ... end) ----------------------------> a thread for each centre,
                                     <--- where shard k listens --- with shard k of it
    first worker: restore(weights) ==== one connection each ===>
    all workers: join, exchange ... leave                       ends when all have left

A server has no model and is in no group of the workers: announcements describe the centre, and the
first weights arrive over a connection. Announcements stay in the store, so a killed server can be
started again, and continues from its snapshots.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ganglion.decide.plan import ASYNC_SGD, ROUND_ROBIN, SERVER_MODES
from ganglion.decide.schedules.exchanges import FIRST_COME
from ganglion.decide.topology import read_launch
from ganglion.errors import ConfigError, PeerLost
from ganglion.execute.averaging.methods import Packed
from ganglion.execute.averaging.options import SERVER, AveragingOptions
from ganglion.execute.averaging.served.connections import Store
from ganglion.execute.averaging.served.rules import Additive, Elastic, Rule
from ganglion.execute.averaging.served.server import CenterServer, ServerMetrics
from ganglion.execute.averaging.served.shards import ShardedCenter, shard_bounds
from ganglion.execute.averaging.served.snapshot import Snapshots, load_snapshot
from ganglion.execute.averaging.workers import server_place
from ganglion.execute.comm import Group, World, broadcast_text, open_store

_COUNTER = "ganglion/centers"
_END = "end"


class CountingStore(Store, Protocol):
    """A store that can also count."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter that starts at 0, and return it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """The description of one centre for its servers."""

    run_id: str
    numel: int
    dtype: str
    num_trained: int
    num_workers: int
    num_shards: int
    mode: str
    center_momentum: float
    max_staleness: int | None

    def bounds(self, shard: int) -> tuple[int, int]:
        """Return the first element of a shard and the end."""
        return shard_bounds(self.numel, self.num_shards)[shard]

    def rule(self, shard: int) -> Rule:
        """Return the rule of writes to a shard."""
        begin, end = self.bounds(shard)
        return rule_of(self.mode, self.center_momentum, self.num_trained - begin, end - begin)


def rule_of(mode: str, momentum: float, num_trained: int, numel: int) -> Rule:
    """Return the rule of writes to a part of a centre."""
    if mode == ASYNC_SGD:
        return Additive(momentum, num_trained=min(max(0, num_trained), numel))
    return Elastic()


def order_of(mode: str) -> str:
    """Return the order in which writes of a mode are served."""
    return ROUND_ROBIN if mode == ROUND_ROBIN else FIRST_COME


def remote_center(
    options: AveragingOptions, packed: Packed, group: Group, store: CountingStore, timeout_s: float
) -> ShardedCenter:
    """Return this worker's end of a centre at the weights of the first worker of `group`."""
    run_id = broadcast_text(group, uuid.uuid4().hex[:16], 0)
    like = packed.gather().to("cpu")
    if group.index == 0:
        announcement = Announcement(
            run_id=run_id,
            numel=packed.numel,
            dtype=str(like.dtype).removeprefix("torch."),
            num_trained=packed.num_trained,
            num_workers=group.size,
            num_shards=options.servers,
            mode=options.mode,
            center_momentum=options.center_momentum,
            max_staleness=options.max_staleness,
        )
        _announce(store, json.dumps(dataclasses.asdict(announcement)))
    center = ShardedCenter(
        store,
        like,
        run_id=run_id,
        worker=group.index,
        num_shards=options.servers,
        timeout_s=timeout_s,
    )
    if group.index == 0:
        center.restore(like)
    group.barrier()  # no worker may join before the centre has weights
    return center


def announce_end(store: CountingStore) -> None:
    """Announce that no more centres follow; one worker calls it for all."""
    _announce(store, _END)


def _announce(store: CountingStore, text: str) -> None:
    store.set(_place(store.add(_COUNTER, 1) - 1), text)


def _place(number: int) -> str:
    return f"{_COUNTER}/{number}"


class RemoteHost:
    """The CenterHost of a centre in server processes, which the first worker can restore."""

    def __init__(self, center: ShardedCenter, group: Group) -> None:
        self._center, self._is_first = center, group.index == 0

    def restore(self, center: Tensor, velocity: Tensor | None = None) -> None:
        """Set the centre and its velocity (None for zero); no worker may exchange meanwhile."""
        if self._is_first:
            self._center.restore(center.to("cpu"), velocity)

    def tensors(self) -> list[Tensor]:
        """Return nothing: the servers hold the centre."""
        return []

    def close(self) -> None:
        """Do nothing: the servers end when all workers have left."""


class ServerProcess:
    """Serves one shard of every centre that is announced, a thread for each centre."""

    def __init__(self, store: CountingStore, shard: int, timeout_s: float) -> None:
        """Prepare to serve shard `shard`; workers may be silent for up to `timeout_s`."""
        self._store, self._shard, self._timeout_s = store, shard, timeout_s
        self._errors: list[BaseException] = []

    def serve(
        self, *, listen_on: str | None = None, snapshots: Path | None = None, every: int = 100
    ) -> list[ServerMetrics]:
        """Serve until all workers of all centres have left; return the metrics of each."""
        if snapshots is not None:
            snapshots.mkdir(parents=True, exist_ok=True)
        servers, threads = [], []
        for number in itertools.count():
            announcement = self._hear(number)
            if announcement is None:
                break
            servers.append(self._open(announcement, listen_on, snapshots, every))
            threads.append(threading.Thread(target=self._run, args=(servers[-1],), daemon=True))
            threads[-1].start()
        for thread in threads:
            thread.join()  # a server ends by itself when all have left or been silent
        if self._errors:
            raise self._errors[0]
        return [server.metrics() for server in servers]

    def _hear(self, number: int) -> Announcement | None:
        try:
            self._store.wait([_place(number)], timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise PeerLost(
                f"the server of shard {self._shard} waited {self._timeout_s:g} s for workers to "
                f"announce a centre: look for the first error in their logs"
            ) from error
        text = self._store.get(_place(number)).decode()
        return None if text == _END else Announcement(**json.loads(text))

    def _open(
        self, known: Announcement, listen_on: str | None, folder: Path | None, every: int
    ) -> CenterServer:
        begin, end = known.bounds(self._shard)
        center = torch.zeros(end - begin, dtype=getattr(torch, known.dtype))
        rule, version, snapshots = known.rule(self._shard), 0, None
        if folder is not None:
            path = folder / f"{known.run_id}-{self._shard}.safetensors"
            snapshots = Snapshots(path, every)
            if path.exists():  # of the server that this one replaces
                saved = load_snapshot(path)
                center, version = saved.center, saved.version
                rule.load(saved.state)
        return CenterServer(
            center,
            rule,
            self._store,
            run_id=known.run_id,
            num_workers=known.num_workers,
            shard=self._shard,
            order=order_of(known.mode),
            max_staleness=known.max_staleness,
            version=version,
            timeout_s=self._timeout_s,
            listen_on=listen_on,
            snapshots=snapshots,
        )

    def _run(self, server: CenterServer) -> None:
        try:
            server.serve()
        except BaseException as error:
            self._errors.append(error)


def own_server(
    options: AveragingOptions,
    world: World | None,
    environment: Mapping[str, str],
    inner: int,
    deterministic: bool,
    timeout_s: float,
) -> ServerProcess | None:
    """Return the server of this process, if it is one of the last `servers` of the launch."""
    _check(options)
    if not options.servers:
        return None
    if world is not None or inner != 1 or deterministic:
        given = "a world" if world is not None else f"inner = {inner}"
        raise ConfigError(
            f"servers = {options.servers} and {'deterministic' if deterministic else given} do not "
            f"go together: servers are the last processes that a launcher started, beside workers "
            f"of one process each"
        )
    launch = read_launch(environment)
    place = server_place(launch, options.servers)
    if place is None:
        return None
    return ServerProcess(open_store(launch, timeout_s), place, timeout_s)


def _check(options: AveragingOptions) -> None:
    """Refuse servers for a mode without them, or another number of shards than servers."""
    servers, mode, center = options.servers, options.mode, options.center
    if servers < 0:
        raise ConfigError(f"servers = {servers}: give 0 or more processes")
    if servers and mode not in SERVER_MODES:
        raise ConfigError(
            f'servers = {servers} has no meaning with mode = "{mode}", whose centre is with the '
            f"workers: leave it out, or give one of {list(SERVER_MODES)}"
        )
    if servers and center not in (None, SERVER, f"sharded:{servers}"):
        raise ConfigError(
            f'center = "{center}", but servers = {servers} processes hold a part of it each: '
            f"leave center out"
        )
