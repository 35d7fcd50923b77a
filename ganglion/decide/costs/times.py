"""How long each action of a stage takes, how long a message is under way, and what it carries."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ganglion.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Times of one stage, alike for all its microbatches.

    `backward_s` computes the gradients of the inputs, `weight_s` those of the weights; a schedule
    that does not split the backward takes both at once. `jitter` is the sigma of a log-normal
    factor on every computation, with median 1. `message_bytes` go to the next stage and, as
    gradients, back from it; `gradient_bytes` are summed over the replicas of the stage.
    `collective_s` is what a microbatch waits for collectives inside layers, a part of its times.
    """

    forward_s: float
    backward_s: float
    weight_s: float = 0.0
    reduce_s: float = 0.0
    update_s: float = 0.0
    latency_s: float = 0.0
    jitter: float = 0.0
    message_bytes: int = 0
    gradient_bytes: int = 0
    collective_s: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} is {value}; it must be finite and not negative")

    @property
    def slot_s(self) -> float:
        """What one microbatch costs the stage."""
        return self.forward_s + self.backward_s + self.weight_s

    def divided(self, parts: int) -> StageTimes:
        """Return the times of one of `parts` equal chunks of this stage; messages stay whole."""
        return StageTimes(
            forward_s=self.forward_s / parts,
            backward_s=self.backward_s / parts,
            weight_s=self.weight_s / parts,
            reduce_s=self.reduce_s / parts,
            update_s=self.update_s / parts,
            latency_s=self.latency_s,
            jitter=self.jitter,
            message_bytes=self.message_bytes,
            gradient_bytes=self.gradient_bytes // parts,
            collective_s=self.collective_s / parts,
        )
