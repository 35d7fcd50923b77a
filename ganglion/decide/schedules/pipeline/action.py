"""Actions that a rank does, and messages that it receives, as frozen data.

The text of an action is its stage, kind and index, and parses back: `2F0` is stage 2, forward,
microbatch 0.

    F forward   B backward   W weight gradients      on the compute lane
    R reduce                                         on the comm lane
    U update                                         on the host lane
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from ganglion.errors import ConfigError

FORWARD = "F"
BACKWARD = "B"
WEIGHT = "W"
REDUCE = "R"
UPDATE = "U"

COMPUTE = "compute"
COMM = "comm"
HOST = "host"
LANES = (COMPUTE, COMM, HOST)

_TEXT = re.compile(r"(\d+)([FBWRU])(\d+)")
_LANE = {FORWARD: COMPUTE, BACKWARD: COMPUTE, WEIGHT: COMPUTE, REDUCE: COMM, UPDATE: HOST}


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do: a kind, its stage, and a microbatch or (R, U) a batch as `index`.

    It occupies its `lane` while it runs; the lanes of a rank run concurrently.
    """

    kind: str
    stage: int
    index: int
    lane: str = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lane", _LANE[self.kind])

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.index}"


@lru_cache(maxsize=1 << 16)
def action(kind: str, stage: int, index: int) -> Action:
    """Return an action, cached: equal actions are mostly the same object."""
    return Action(kind, stage, index)


def parse_action(text: str) -> Action:
    """Return the action of a text such as "2F0"; raise ConfigError if it is not one."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r} is not an action; write stage, kind and number, such as 2F0")
    return action(match[2], int(match[1]), int(match[3]))


class Message(NamedTuple):
    """An activation (F) or a gradient (B) that reached a stage, and the version that made it.

    A tuple, because a simulation makes a hundred thousand of them a second.
    """

    kind: str
    stage: int
    microbatch: int
    version: int


class Order(NamedTuple):
    """The action that the leader of a tensor group started, and that its followers start too."""

    action: Action
