"""The memory of ranks as measured, beside the prediction of the memory model.

Tensors are counted by category. The peak is that of the process above its size before the model
was made, so it holds more than tensors: see docs/memory.md.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ganglion.decide.config import MEMORY_FILE, RunFile
from ganglion.decide.costs import CATEGORIES, Memory
from ganglion.decide.plan import Plan
from ganglion.decide.predict.memory import predicted_memory, state_rules
from ganglion.decide.shapes import ModelShape

# The rest of a peak is known as a sum only.
_NOT_COUNTED = ("communication", "scratch")
_SAVED = ("activations", "recomputed")
_PREDICTED = (*CATEGORIES, "lower_tier")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of one rank by category, and in all; nothing is predicted for models of one's own."""

    measured: dict[str, int]
    measured_peak: int
    predicted: dict[str, int] | None = None
    predicted_peak: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRecord:
    """The content of `memory.json`; `keeps_freed`: the peaks include freed host memory."""

    device: str
    keeps_freed: bool
    ranks: list[RankMemory]


def write_memory(
    folder: Path,
    measured: Sequence[tuple[Memory, int]],
    *,
    file: RunFile,
    plan: Plan,
    shape: ModelShape | None,
    device: str,
) -> None:
    """Write the memory of ranks, with its prediction where there is one."""
    ranks = [
        RankMemory(
            measured=_by_category(held, counted_categories(plan)),
            measured_peak=peak,
            predicted=None if expected is None else _by_category(expected, _PREDICTED),
            predicted_peak=None if expected is None else expected.total,
        )
        for (held, peak), expected in zip(measured, _predicted(file, plan, shape), strict=True)
    ]
    keeps = file.memory.device_gib == 0 and plan.offload == "none" and device == "cpu"
    record = MemoryRecord(device=device, keeps_freed=keeps, ranks=ranks)
    (folder / MEMORY_FILE).write_text(json.dumps(asdict(record), indent=2) + "\n", "utf-8")


def read_memory(folder: Path) -> MemoryRecord:
    """Return the record that `write_memory` wrote into a run folder."""
    record = json.loads((folder / MEMORY_FILE).read_text(encoding="utf-8"))
    return MemoryRecord(**{**record, "ranks": [RankMemory(**rank) for rank in record["ranks"]]})


def counted_categories(plan: Plan) -> list[str]:
    """Return the categories that are counted by looking at tensors.

    Autograd has one hook for saved tensors: blocks that are widened, or whose activations are
    offloaded, use it themselves.
    """
    is_heard = not plan.compute_fp32 and plan.offload_activations == "none"
    unknown = (*_NOT_COUNTED, *(() if is_heard else _SAVED))
    return [name for name in CATEGORIES if name not in unknown]


def _predicted(file: RunFile, plan: Plan, shape: ModelShape | None) -> Sequence[Memory | None]:
    """Return the predicted memory of each rank, without servers."""
    mesh = plan.mesh()
    if shape is None:
        return [None] * mesh.num_ranks
    rules, places = state_rules(file), map(mesh.coordinates, range(mesh.num_ranks))
    by_worker = [predicted_memory(shape, plan, rules, worker) for worker in range(plan.data)]
    return [by_worker[at.data][at.pipe] for at in places]


def _by_category(memory: Memory, names: Sequence[str]) -> dict[str, int]:
    return {name: getattr(memory, name) for name in names}
