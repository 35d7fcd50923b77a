"""From options to a synchronous method: which sum, which centre, which turns.

| asked for                      | sum                | centre       |
|--------------------------------|--------------------|--------------|
| center="replicated"            | all-reduce of w    | Replicated   |
| center="delta", or `compress`  | of w - c, or codes | Delta        |
| center="root"                  | reduce of w        | Root         |
| outer=...                      | as above, by fragment | moved by an optimizer |
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from ganglion.decide.plan import SYNC
from ganglion.decide.schedules.exchanges import ElasticRate, SyncExchange
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
from ganglion.execute.comm import Group

REPLICATED, DELTA, ROOT, HOST_ROOT = "replicated", "delta", "root", "host_root"
CENTERS = (REPLICATED, DELTA, ROOT, HOST_ROOT)


@dataclass(frozen=True, slots=True)
class SyncOptions:
    """How synchronous workers exchange; `max_elements` bounds one message."""

    tau: int = 1
    center: str = REPLICATED
    overlap: bool = True
    compress: str | None = None
    max_elements: int | None = None


@dataclass(frozen=True, slots=True)
class OuterOptions:
    """How an outer optimizer averages: the pull, and how late and in how many turns."""

    q: float = 1.0
    delay: int = 0
    fragments: int = 1


def sync_easgd(
    packed: Packed,
    group: Group,
    rate: ElasticRate,
    lr: float,
    options: SyncOptions,
    turns: SyncExchange | None = None,
) -> SyncEasgd:
    """Return Sync EASGD among `group`, whose rate is checked at the present learning rate.

    Workers that exchanged before, in another group, bring their `turns`, and let beta follow.
    """
    check = rate.checked_alpha if turns is None else rate.following_alpha
    check(lr, group.size, options.tau, SYNC)
    meter = Meter()
    return SyncEasgd(
        packed,
        _center(packed, group, options, meter),
        Votes(group, packed.flat, meter),
        _turns(turns, group) or SyncExchange(group.ranks, tau=options.tau),
        rate,
        meter,
        overlap=options.overlap,
    )


def outer_averaging(
    packed: Packed,
    group: Group,
    outer: OuterFactory,
    options: SyncOptions,
    form: OuterOptions,
    turns: SyncExchange | None = None,
) -> OuterAveraging:
    """Return the averaging of `group` whose centre an optimizer moves."""
    if options.center != REPLICATED:
        raise ConfigError(
            f'outer=... moves a centre that every worker has, but center = "{options.center}": '
            f'give center="replicated"'
        )
    meter, bounds = Meter(), packed.fragments(form.fragments)
    return OuterAveraging(
        packed,
        packed.gather().clone(),
        [_sum(group, packed, slice(*b), options, meter) for b in bounds],
        [Votes(group, packed.flat, meter) for _ in bounds],
        bounds,
        _turns(turns, group)
        or SyncExchange(
            group.ranks,
            tau=options.tau,
            num_fragments=form.fragments,
            delay=form.delay,
            begins_at_zero=False,
        ),
        outer,
        meter,
        q=form.q,
        overlap=options.overlap,
        differences=options.compress is not None,
    )


def sync_sgd(packed: Packed, group: Group, how: str, max_elements: int | None = None) -> SyncSgd:
    """Return the summing, or averaging, of gradients among `group`."""
    if how not in (SUM_OF, MEAN_OF):
        raise ConfigError(f'reduction = "{how}" is not one of ["sum", "mean"]')
    meter = Meter()
    like = packed.flat[: packed.num_trained]
    bounds = _clipped(packed.bounds(max_elements), 0, packed.num_trained)
    return SyncSgd(packed, group, GroupSum(group, like, bounds, meter), meter, how)


def digest(center: Tensor) -> int:
    """Return a number that differs, all but certainly, if a bit of the centre does."""
    return zlib.crc32(center.detach().cpu().contiguous().view(torch.uint8).numpy().data)


def check_digests(center: Tensor, group: Group) -> int:
    """Return the digest of the centre; raise ProtocolError if another worker has another."""
    table = torch.empty(group.size, dtype=torch.int64)
    group.all_gather(table, torch.tensor([digest(center)], dtype=torch.int64)).wait()
    digests = dict(zip(group.ranks, table.tolist(), strict=True))
    if len(set(digests.values())) > 1:
        raise ProtocolError(
            f"the centre differs between workers, digests by rank: {digests}; give "
            f"deterministic=True, or load the last checkpoint"
        )
    return int(table[0])


def _turns(turns: SyncExchange | None, group: Group) -> SyncExchange | None:
    """Let the next exchange be one of the new group."""
    if turns is not None:
        turns.change_members(group.ranks)
    return turns


def _center(packed: Packed, group: Group, options: SyncOptions, meter: Meter) -> Center:
    worker = packed.gather()
    if options.center in (ROOT, HOST_ROOT):
        if options.compress is not None:
            raise ConfigError(
                f'compress = "{options.compress}" needs the same centre on all workers: give '
                f'center="replicated"'
            )
        bounds = packed.bounds(options.max_elements)
        return RootCenter(worker, group, bounds, meter, on_host=options.center == HOST_ROOT)
    if options.center not in CENTERS:
        raise ConfigError(f'center = "{options.center}" is not one of {list(CENTERS)}')
    sums = _sum(group, packed, slice(0, packed.numel), options, meter)
    is_delta = options.center == DELTA or options.compress is not None
    return (DeltaCenter if is_delta else ReplicatedCenter)(worker, sums, group)


def _sum(group: Group, packed: Packed, part: slice, options: SyncOptions, meter: Meter) -> Sum:
    """Return the sum of a part of the flat vector over all workers."""
    like = packed.flat[part]
    if options.compress is not None:
        return CompressedSum(group, like, make_codec(options.compress), meter)
    within = _clipped(packed.bounds(options.max_elements), part.start, part.stop)
    return GroupSum(group, like, [(b - part.start, e - part.start) for b, e in within], meter)


def _clipped(bounds: Bounds, begin: int, end: int) -> Bounds:
    """Return the parts that lie between two places, cut off there."""
    return [(max(b, begin), min(e, end)) for b, e in bounds if b < end and e > begin]
