"""Times of a stage, and how many microbatches a message-driven pipeline lets in.

A microbatch travels to the last stage and back. The slowest stage spends one slot on each, so it
is busy if as many are under way as slots fit into the journey. Inside the stages that is at most
one slot a stage: AxoNN's own limit, the number of stages. Every hop adds its share:

    latency there and back, in slots      2 latency / slot
    rounded up, for the most part         a message that comes a little late finds the stage at
                                          other work, and the rhythm slips by up to a whole slot
    or else, under jitter                 2 latency / slot + JITTER_SLOTS * sigma

The constants were fitted to the simulator: stages alike, 2 to 16 of them, a backward of 1 to 3
forwards, latencies of up to 3 forwards. Against a limit as long as the batch, this one loses 1 %
on average without jitter and 2 % with a sigma of 0.05 to 0.2 (at worst 7 %); the number of stages
as the limit loses 40 %. Where forward and backward take exactly the same time and messages none,
everything ties, and the limit (the number of stages) loses 20 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ganglion.errors import ConfigError, LayoutError


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Times of one stage, alike for all its microbatches.

    `backward_s` computes the gradients of the inputs, `weight_s` those of the weights; a schedule
    that does not split the backward takes both at once. `jitter` is the sigma of a log-normal
    factor on every computation, with median 1. `message_bytes` go to the next stage and, as
    gradients, back from it; `gradient_bytes` are summed over the replicas of the stage.
    `collective_s` is the part of forward and backward that waits: for collectives inside layers,
    and for messages if the engine stops for them;
    `late_sums_s` is the part of the update that waits for the last of them.
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
    late_sums_s: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} is {value}; it must be finite and not negative")

    @property
    def slot_s(self) -> float:
        """Time that the stage spends on one microbatch."""
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
            late_sums_s=self.late_sums_s / parts,
        )


# --- the limit of microbatches in flight ---------------------------------------------------------


# Slots a hop needs as soon as messages take any time at all, and how fast that rises to a whole
# slot: without the former, 16 stages lose 16 % to a latency of a millionth of a slot.
SLIP_SLOTS = 0.25
SLIP_SLOPE = 3.0

# Slots a hop needs for each unit of sigma, over both directions.
JITTER_SLOTS = 8.0


def injection_limit(times: Sequence[StageTimes], num_microbatches: int | None = None) -> int:
    """Return how many microbatches may be in flight, at most those of a batch if it is given.

    `latency_s` of a stage is the whole time that a message to the next stage is under way.
    """
    if not times:
        raise LayoutError("a pipeline of 0 stages has nothing to do; use 1 or more")
    slot_s = max(one.slot_s for one in times)
    # A sum of slots that is whole but for rounding must not gain one.
    hops = math.ceil(sum(_hop_slots(one, slot_s) for one in times[:-1]) - 1e-9)
    limit = len(times) + hops
    return limit if num_microbatches is None else max(1, min(limit, num_microbatches))


def _hop_slots(times: StageTimes, slot_s: float) -> float:
    """Return the slots that a microbatch spends on the hop behind a stage, there and back."""
    if slot_s == 0:
        return 0.0
    slots = 2 * times.latency_s / slot_s
    return max(_with_slip(slots), slots + JITTER_SLOTS * times.jitter)


def _with_slip(slots: float) -> float:
    whole = math.floor(slots)
    part = slots - whole
    return whole + (min(1.0, SLIP_SLOTS + SLIP_SLOPE * part) if part > 1e-9 else 0.0)
