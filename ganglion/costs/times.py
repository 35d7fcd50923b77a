"""How long each action of a stage takes, and how long a message is under way."""

from __future__ import annotations

from dataclasses import dataclass

from ganglion.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Times of one stage, alike for all its microbatches.

    `jitter` is the sigma of a log-normal factor on every computation, with median 1.
    """

    forward_s: float
    backward_s: float
    reduce_s: float = 0.0
    update_s: float = 0.0
    latency_s: float = 0.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; a time cannot be negative")
