"""The trace event: one thing a rank did, or waited for, with when and how many bytes.

Real and simulated runs emit the same record, so a predicted timeline can be laid over a measured
one. Times are seconds on the clock of rank 0 (a rank adds its measured offset).
"""

from __future__ import annotations

from typing import NamedTuple

COMPUTE = "compute"
COMM = "comm"
HOST = "host"
LANES: tuple[str, ...] = (COMPUTE, COMM, HOST)

# What a number field holds where it has no meaning: a reduction has no microbatch, say.
NONE = -1


class Event(NamedTuple):
    """One interval on one lane of one rank.

    A tuple, because a trace has hundreds of thousands of them. `step` counts from 0: the update
    being worked on, so events of step 0 lead to the metrics record of step 1.
    """

    rank: int
    lane: str
    kind: str
    start_s: float
    end_s: float
    step: int = NONE
    stage: int = NONE
    block: int = NONE
    microbatch: int = NONE
    version: int = NONE
    axis: str = ""
    bytes: int = 0
    flow: int = NONE

    @property
    def duration_s(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s
