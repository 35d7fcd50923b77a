"""The methods with a served centre by the names papers give them: one table for both sides.

    server = center_server("async_easgd", model, store, options)     # in a process of its own
    server.serve()

    method = join_center("async_easgd", Packed(model), store, 3, options, rate, lr)   # worker 3

| name           | worker           | server               | order                  |
|----------------|------------------|----------------------|------------------------|
| original_easgd | ServedEasgd      | Elastic              | round robin            |
| async_easgd    | ServedEasgd      | Elastic              | first come             |
| async_measgd   | the same, and the user's optimizer has momentum        | first come   |
| easgd_delta    | ServedEasgdDelta | Delta                | first come             |
| async_sgd      | ServedSgd, tau 1 | Additive             | first come             |
| async_msgd     | ServedSgd, tau 1 | Additive(momentum)   | first come             |
| downpour       | ServedSgd        | Additive             | first come             |
| mdownpour      | ServedSgd, tau 1 | Additive, as printed | first come             |
| adownpour      | ServedSgd        | WithMean(Additive)   | first come             |
| mvadownpour    | ServedSgd        | the same, moving     | first come             |

The last two show a mean of the centre to whoever looks at it: of all, or moving by `mean_rate`.

Async MSGD with its momentum at the worker is async_sgd with an optimizer that has momentum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn

from ganglion.decide.schedules.exchanges import FIRST_COME, ROUND_ROBIN, ElasticRate, Event
from ganglion.errors import ConfigError
from ganglion.execute.averaging.methods import Method, Packed
from ganglion.execute.averaging.served.connections import Store
from ganglion.execute.averaging.served.methods import ServedEasgd, ServedEasgdDelta, ServedSgd
from ganglion.execute.averaging.served.rules import Additive, Delta, Elastic, Rule, WithMean
from ganglion.execute.averaging.served.server import CenterServer
from ganglion.execute.averaging.served.shards import ShardedCenter, shard_bounds
from ganglion.execute.averaging.served.snapshot import Snapshots, load_snapshot

_ELASTIC = ("original_easgd", "async_easgd", "async_measgd")
_EASGD_DELTA = "easgd_delta"
_ONE_STEP = ("async_sgd", "async_msgd", "mdownpour")
_WITH_MOMENTUM = ("async_msgd", "mdownpour")
_MEAN, _MOVING_MEAN = "adownpour", "mvadownpour"
SERVED = (*_ELASTIC, _EASGD_DELTA, *_ONE_STEP, "downpour", _MEAN, _MOVING_MEAN)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedOptions:
    """What servers and workers of one run must agree on, and the limits of each."""

    run_id: str
    num_workers: int
    num_shards: int = 1
    tau: int = 1
    momentum: float = 0.0  # at the master
    mean_rate: float = 0.001  # of mvadownpour
    overlap: bool = True
    max_staleness: int | None = None
    timeout_s: float = 300.0
    listen_on: str | None = None


def center_server(
    name: str,
    model: nn.Module,
    store: Store,
    options: ServedOptions,
    *,
    shard: int = 0,
    order: Iterable[Event] | None = None,
    snapshots: Snapshots | None = None,
    is_recording: bool = False,
) -> CenterServer:
    """Return the server of one shard, which begins with the weights of `model`.

    If there is a snapshot already, it takes the place of the server that wrote it. `order` is one
    that was recorded, to be replayed.
    """
    _check(name, options)
    packed = Packed(model)
    begin, end = shard_bounds(packed.numel, options.num_shards)[shard]
    rule = _rule(name, options, max(0, min(packed.num_trained, end) - begin))
    center, version = packed.flat[begin:end].to("cpu", copy=True), 0
    if snapshots is not None and snapshots.path.exists():
        saved = load_snapshot(snapshots.path)
        center.copy_(saved.center)
        rule.load(saved.state)
        version = saved.version
    own_order = ROUND_ROBIN if name == "original_easgd" else FIRST_COME
    return CenterServer(
        center,
        rule,
        store,
        run_id=options.run_id,
        num_workers=options.num_workers,
        shard=shard,
        order=own_order if order is None else order,
        max_staleness=options.max_staleness,
        version=version,
        timeout_s=options.timeout_s,
        listen_on=options.listen_on,
        snapshots=snapshots,
        is_recording=is_recording,
    )


def join_center(
    name: str,
    packed: Packed,
    store: Store,
    worker: int,
    options: ServedOptions,
    rate: ElasticRate | None = None,
    lr: Callable[[], float] | None = None,
) -> Method:
    """Return the method of one worker, which has joined and stands at the centre.

    Elastic methods need a `rate`, and `lr()`, the learning rate of the coming step.
    """
    _check(name, options)
    is_elastic = name in _ELASTIC or name == _EASGD_DELTA
    if is_elastic != (rate is not None):
        needs = "needs one of alpha, beta and rho" if is_elastic else "has no alpha, beta or rho"
        raise ConfigError(f'method = "{name}" {needs}: give what it needs and nothing else')
    center = ShardedCenter(
        store,
        packed.flat,
        run_id=options.run_id,
        worker=worker,
        num_shards=options.num_shards,
        timeout_s=options.timeout_s,
    )
    num_workers, tau = options.num_workers, options.tau
    if rate is None:
        moves = options.momentum > 0
        return ServedSgd(packed, center, num_workers=num_workers, tau=tau, has_momentum=moves)
    assert lr is not None, "whoever gives a rate gives the learning rate it may depend on"
    maker = ServedEasgdDelta if name == _EASGD_DELTA else ServedEasgd
    overlap = options.overlap
    return maker(packed, center, rate, lr, num_workers=num_workers, tau=tau, overlap=overlap)


def _rule(name: str, options: ServedOptions, num_trained: int) -> Rule:
    if name in _ELASTIC:
        return Elastic()
    if name == _EASGD_DELTA:
        return Delta()
    if name in (_MEAN, _MOVING_MEAN):
        return WithMean(Additive(), options.mean_rate if name == _MOVING_MEAN else 0.0)
    as_printed = name == "mdownpour"
    return Additive(options.momentum, as_printed=as_printed, num_trained=num_trained)


def _check(name: str, options: ServedOptions) -> None:
    if name not in SERVED:
        raise ConfigError(f'method = "{name}" is not one of {list(SERVED)}')
    if name in _ONE_STEP and options.tau != 1:
        raise ConfigError(
            f'tau = {options.tau}, but "{name}" sends every step: give tau=1, or method="downpour"'
        )
    if (name in _WITH_MOMENTUM) != (options.momentum != 0.0):
        raise ConfigError(
            f'momentum = {options.momentum} and method = "{name}" do not fit: momentum at the '
            f"master belongs to {list(_WITH_MOMENTUM)}, that at the worker to the optimizer"
        )
