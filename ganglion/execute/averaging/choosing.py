"""Which method a user asked for: wishes are checked against each other, then built.

| mode             | without outer            | with outer=...                      |
|------------------|--------------------------|-------------------------------------|
| "sync"           | Sync EASGD, one rate     | local SGD, SlowMo, DiLoCo: no rate  |
| "sync_sgd"       | summed gradients         | refused                             |
| others           | see serving.py           | refused                             |
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ganglion.decide.plan import ASYNC_MODES, SYNC, SYNC_SGD
from ganglion.decide.schedules.exchanges import ElasticRate, SyncExchange
from ganglion.errors import ConfigError
from ganglion.execute.averaging.building import (
    REPLICATED,
    OuterOptions,
    SyncOptions,
    outer_averaging,
    sync_easgd,
    sync_sgd,
)
from ganglion.execute.averaging.methods import MEAN_OF, Method, OuterFactory, Packed
from ganglion.execute.comm import Group
from ganglion.units import MIB

SERVER = "server"
RATE = ("alpha", "beta", "rho", "amortise", "unsafe")
_ASYNCHRONOUS = ("center_momentum", "max_staleness", "servers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """The arguments of ElasticAverage that decide about the method, under their own names."""

    mode: str = SYNC
    alpha: float | None = None
    beta: float | None = None
    rho: float | None = None
    amortise: bool = False
    unsafe: bool = False
    tau: int = 10
    outer: OuterFactory | None = None
    q: float = 1.0
    delay: int = 0
    fragments: int = 1
    center: str | None = None
    overlap: bool = True
    pack: bool = True
    bucket_mb: float | None = None
    compress: str | None = None
    reduction: str = MEAN_OF
    center_momentum: float = 0.0
    max_staleness: int | None = None
    servers: int = 0

    def terms(self) -> str:
        """Return what all workers must have in common; functions cannot be compared."""
        given = dataclasses.asdict(dataclasses.replace(self, outer=None))
        return f"{given} outer={self.outer is not None}"

    def center_of_mode(self) -> str:
        """Return where the centre is: as given, or what suits the mode."""
        if self.center is not None:
            return self.center
        return SERVER if self.mode in ASYNC_MODES else REPLICATED

    def rate(self) -> ElasticRate:
        """Return the one rate that was given."""
        return ElasticRate(self.alpha, self.beta, self.rho, self.amortise, self.unsafe)

    def sync_options(self, packed: Packed) -> SyncOptions:
        """Return how synchronous workers shall exchange."""
        return SyncOptions(
            tau=self.tau,
            center=self.center_of_mode(),
            overlap=self.overlap,
            compress=self.compress,
            max_elements=self.max_elements(packed),
        )

    def max_elements(self, packed: Packed) -> int | None:
        """Return how many elements one message may have: all, some, or those of one tensor."""
        if not self.pack:
            return 0
        if self.bucket_mb is None:
            return None
        if self.bucket_mb <= 0:
            raise ConfigError(f"bucket_mb = {self.bucket_mb} holds nothing: give a number above 0")
        return max(1, int(self.bucket_mb * MIB) // packed.flat.element_size())


def choose_method(
    wishes: Wishes, packed: Packed, group: Group, lr: float, turns: SyncExchange | None = None
) -> Method:
    """Return the method of `wishes` among the workers of `group`, to go on with `turns`."""
    if wishes.mode == SYNC_SGD:
        names = ("outer", "compress", "center", "q", "delay", "fragments", *RATE, *_ASYNCHRONOUS)
        refuse(wishes, names, wishes.mode)
        return sync_sgd(packed, group, wishes.reduction, wishes.max_elements(packed))
    if wishes.mode != SYNC:
        raise ConfigError(f'mode = "{wishes.mode}" is not one of {[SYNC, SYNC_SGD, *ASYNC_MODES]}')
    refuse(wishes, (*_ASYNCHRONOUS, "reduction"), wishes.mode)
    options = wishes.sync_options(packed)
    if wishes.outer is None:
        refuse(wishes, ("q", "delay", "fragments"), wishes.mode, "and no outer optimizer")
        return sync_easgd(packed, group, wishes.rate(), lr, options, turns)
    refuse(wishes, RATE, wishes.mode, "and an outer optimizer")
    form = OuterOptions(wishes.q, wishes.delay, wishes.fragments)
    return outer_averaging(packed, group, wishes.outer, options, form, turns)


_UNSET = {field.name: field.default for field in dataclasses.fields(Wishes)}


def refuse(wishes: Wishes, names: tuple[str, ...], mode: str, and_what: str = "") -> None:
    """Raise if one of these has been given: nothing is ignored in silence."""
    for name in names:
        value = getattr(wishes, name)
        if value != _UNSET[name]:
            because = f'mode = "{mode}" {and_what}'.strip()
            raise ConfigError(f"{name} = {value} has no meaning with {because}: leave it out")
