"""From options to a synchronous method: its sum, its centre and its turns.

| option                         | summed over workers | centre                |
|--------------------------------|---------------------|-----------------------|
| center="replicated"            | w, to all           | ReplicatedCenter      |
| center="delta", or `compress`  | w - c, or its codes | DeltaCenter           |
| center="root"                  | w, to the root      | RootCenter            |
| outer=...                      | w, by fragment      | moved by an optimizer |
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from ganglion.decide.plan import ASYNC_MODES, SYNC, SYNC_SGD
from ganglion.decide.schedules.exchanges import SyncExchange
from ganglion.errors import ConfigError, ProtocolError
from ganglion.execute.averaging.methods import (
    MEAN_OF,
    SUM_OF,
    Bounds,
    Center,
    CompressedSum,
    DeltaCenter,
    GroupSum,
    Meter,
    Method,
    OuterAveraging,
    OuterFactory,
    Packed,
    ReplicatedCenter,
    RootCenter,
    Sum,
    SyncEasgd,
    SyncSgd,
    Votes,
    make_codec,
)
from ganglion.execute.averaging.options import (
    ASYNCHRONOUS,
    CENTERS,
    DELTA,
    HOST_ROOT,
    OUTER,
    RATE,
    REPLICATED,
    ROOT,
    AveragingOptions,
)
from ganglion.execute.comm import Group


def sync_method(
    options: AveragingOptions,
    packed: Packed,
    group: Group,
    lr: float,
    turns: SyncExchange | None = None,
) -> Method:
    """Return the synchronous method of `options` among `group`, which continues `turns`."""
    if options.mode == SYNC_SGD:
        options.refuse(("outer", "compress", "center", *OUTER, *RATE, *ASYNCHRONOUS))
        return sync_sgd(packed, group, options.reduction, options.max_elements(packed))
    if options.mode != SYNC:
        modes = [SYNC, SYNC_SGD, *ASYNC_MODES]
        raise ConfigError(f'mode = "{options.mode}" is not one of {modes}')
    options.refuse((*ASYNCHRONOUS, "reduction"))
    if options.outer is None:
        options.refuse(OUTER, "and no outer optimizer")
        return _sync_easgd(options, packed, group, lr, turns)
    options.refuse(RATE, "and an outer optimizer")
    return _outer_averaging(options, options.outer, packed, group, turns)


def _sync_easgd(
    options: AveragingOptions,
    packed: Packed,
    group: Group,
    lr: float,
    turns: SyncExchange | None,
) -> SyncEasgd:
    """Return Sync EASGD, with its rate checked at the present learning rate.

    With `turns` of another group, the number of workers has changed, and beta follows it.
    """
    bounds = packed.bounds(options.max_elements(packed))
    rate, meter = options.rate(), Meter()
    check = rate.checked_alpha if turns is None else rate.following_alpha
    check(lr, group.size, options.tau, SYNC)
    return SyncEasgd(
        packed,
        _center(packed, group, bounds, options, meter),
        Votes(group, packed.flat, meter),
        _continued(turns, group) or SyncExchange(group.ranks, tau=options.tau),
        rate,
        meter,
        overlap=options.overlap,
    )


def _outer_averaging(
    options: AveragingOptions,
    outer: OuterFactory,
    packed: Packed,
    group: Group,
    turns: SyncExchange | None,
) -> OuterAveraging:
    """Return averaging whose centre an outer optimizer moves."""
    bounds = packed.bounds(options.max_elements(packed))
    if options.center_of_mode() != REPLICATED:
        raise ConfigError(
            f'outer=... moves a centre that every worker has, but center = "{options.center}": '
            f'give center="replicated"'
        )
    parts, meter = packed.fragments(options.fragments), Meter()
    return OuterAveraging(
        packed,
        packed.gather().clone(),
        [_sum(group, packed, slice(*part), bounds, options, meter) for part in parts],
        [Votes(group, packed.flat, meter) for _ in parts],
        parts,
        _continued(turns, group)
        or SyncExchange(
            group.ranks,
            tau=options.tau,
            num_fragments=options.fragments,
            delay=options.delay,
            begins_at_zero=False,
        ),
        outer,
        meter,
        q=options.q,
        overlap=options.overlap,
        differences=options.compress is not None,
    )


def sync_sgd(packed: Packed, group: Group, how: str, max_elements: int | None = None) -> SyncSgd:
    """Return the method that sums, or averages, gradients among `group`."""
    if how not in (SUM_OF, MEAN_OF):
        raise ConfigError(f'reduction = "{how}" is not one of ["sum", "mean"]')
    meter = Meter()
    like = packed.flat[: packed.num_trained]
    bounds = _clipped(packed.bounds(max_elements), 0, packed.num_trained)
    return SyncSgd(packed, group, GroupSum(group, like, bounds, meter), meter, how)


def check_digests(center: Tensor, group: Group) -> int:
    """Return the digest of the centre; raise ProtocolError if another worker has another."""
    own = zlib.crc32(center.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    table = torch.empty(group.size, dtype=torch.int64)
    group.all_gather(table, torch.tensor([own], dtype=torch.int64)).wait()
    digests = dict(zip(group.ranks, table.tolist(), strict=True))
    if len(set(digests.values())) > 1:
        raise ProtocolError(
            f"the centre differs between workers, digests by rank: {digests}; give "
            f"deterministic=True, or load the last checkpoint"
        )
    return own


def _continued(turns: SyncExchange | None, group: Group) -> SyncExchange | None:
    """Return `turns` with the members of the new group."""
    if turns is not None:
        turns.change_members(group.ranks)
    return turns


def _center(
    packed: Packed, group: Group, bounds: Bounds, options: AveragingOptions, meter: Meter
) -> Center:
    worker, center = packed.gather(), options.center_of_mode()
    if center in (ROOT, HOST_ROOT):
        if options.compress is not None:
            raise ConfigError(
                f'compress = "{options.compress}" needs the same centre on all workers: give '
                f'center="replicated"'
            )
        return RootCenter(worker, group, bounds, meter, on_host=center == HOST_ROOT)
    if center not in CENTERS:
        raise ConfigError(f'center = "{center}" is not one of {list(CENTERS)}')
    sums = _sum(group, packed, slice(0, packed.numel), bounds, options, meter)
    is_delta = center == DELTA or options.compress is not None
    return (DeltaCenter if is_delta else ReplicatedCenter)(worker, sums, group)


def _sum(
    group: Group,
    packed: Packed,
    part: slice,
    bounds: Bounds,
    options: AveragingOptions,
    meter: Meter,
) -> Sum:
    """Return the sum of a part of the flat vector over all workers."""
    like = packed.flat[part]
    if options.compress is not None:
        return CompressedSum(group, like, make_codec(options.compress), meter)
    within = _clipped(bounds, part.start, part.stop)
    return GroupSum(group, like, [(b - part.start, e - part.start) for b, e in within], meter)


def _clipped(bounds: Bounds, begin: int, end: int) -> Bounds:
    """Return the parts of `bounds` between `begin` and `end`, cut off there."""
    return [(max(b, begin), min(e, end)) for b, e in bounds if b < end and e > begin]
