"""The options of ElasticAverage, and which of them fit together."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ganglion.decide.plan import ASYNC_MODES, SYNC
from ganglion.decide.schedules.exchanges import ElasticRate
from ganglion.errors import ConfigError
from ganglion.execute.averaging.methods import MEAN_OF, OuterFactory, Packed
from ganglion.units import MIB

REPLICATED, DELTA, ROOT, HOST_ROOT = "replicated", "delta", "root", "host_root"
CENTERS = (REPLICATED, DELTA, ROOT, HOST_ROOT)
SERVER = "server"
# Groups of options that some modes refuse.
RATE = ("alpha", "beta", "rho", "amortise", "unsafe")
OUTER = ("q", "delay", "fragments")
ASYNCHRONOUS = ("center_momentum", "max_staleness", "servers")


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragingOptions:
    """The arguments of ElasticAverage that decide about the method, under the same names."""

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
        """Return the text that must be equal on all workers; functions cannot be compared."""
        given = dataclasses.asdict(dataclasses.replace(self, outer=None))
        return f"{given} outer={self.outer is not None}"

    def center_of_mode(self) -> str:
        """Return `center`, or the default of the mode."""
        if self.center is not None:
            return self.center
        return SERVER if self.mode in ASYNC_MODES else REPLICATED

    def rate(self) -> ElasticRate:
        """Return the elastic rate; raise ConfigError unless exactly one was given."""
        return ElasticRate(self.alpha, self.beta, self.rho, self.amortise, self.unsafe)

    def max_elements(self, packed: Packed) -> int | None:
        """Return the most elements of one message: None for all, 0 for one tensor each."""
        if not self.pack:
            return 0
        if self.bucket_mb is None:
            return None
        if self.bucket_mb <= 0:
            raise ConfigError(f"bucket_mb = {self.bucket_mb} holds nothing: give a number above 0")
        return max(1, int(self.bucket_mb * MIB) // packed.flat.element_size())

    def refuse(self, names: tuple[str, ...], and_what: str = "") -> None:
        """Raise ConfigError if one of the named options was given: none is ignored silently."""
        for name in names:
            value = getattr(self, name)
            if value != _DEFAULTS[name]:
                because = f'mode = "{self.mode}" {and_what}'.strip()
                raise ConfigError(f"{name} = {value} has no meaning with {because}: leave it out")


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(AveragingOptions)}
