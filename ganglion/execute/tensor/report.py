"""The report: what was split, how, and what was left whole and why."""

from __future__ import annotations

from dataclasses import dataclass, field

from ganglion.decide.topology import Placement


@dataclass(frozen=True, slots=True)
class Entry:
    """One module: what became of it, in a few words."""

    module: str
    kind: str
    how: str


@dataclass(slots=True)
class TensorReport:
    """What `apply_tensor_parallel` did; `placements` go by the names of the parameters.

    `kept` has the parameters of this rank whose blocks stay gathered along z until they change.
    """

    split: list[Entry] = field(default_factory=list)
    whole: list[Entry] = field(default_factory=list)
    placements: dict[str, Placement] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """One line a module."""
        rows = [f"split  {e.module} ({e.kind}): {e.how}" for e in self.split]
        rows += [f"whole  {e.module} ({e.kind}): {e.how}" for e in self.whole]
        rows += [f"kept   {name}: gathered once, until it changes" for name in self.kept]
        return "\n".join(rows)
