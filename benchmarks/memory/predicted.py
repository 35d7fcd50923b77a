"""What the memory model foretells against what processes really took, layout by layout.

Every layout is trained by `ganglion train` in processes of its own for a few steps. Each rank notes
its resident memory before it makes the model, and the peak while it trains; a rank's error is the
difference to its prediction as a share of what was measured. The worst rank of a layout counts.
Memory that is freed goes back to the kernel at once, as it does in every run with a budget.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEADLINE_S = 900
STATE = ("weights", "versions", "gradients", "master", "moments", "center", "lower_tier")
_COMMAND = "import sys; from ganglion.cli.main import main; sys.exit(main())"


@dataclass(frozen=True)
class LayoutCase:
    """A layout by name: how many processes, and its keys of a run file."""

    name: str
    nproc: int = 1
    keys: Mapping[str, object] = field(default_factory=dict)
    layers: int = 6


@dataclass(frozen=True)
class LayoutFigure:
    """Bytes of the rank whose prediction is worst; `error` is below 0 if it needed more."""

    name: str
    state_bytes: int
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


@dataclass(frozen=True)
class Size:
    """How large the models are."""

    hidden: int
    vocab_size: int
    seq_len: int
    steps: int = 3

    def keys(self) -> dict[str, object]:
        return {
            "model.hidden": self.hidden,
            "model.heads": 8,
            "model.vocab_size": self.vocab_size,
            "data.kind": "synthetic",
            "data.seq_len": self.seq_len,
            "train.steps": self.steps,
            "train.microbatch_size": 1,
            "train.global_batch_size": 4,
            "train.threads": 1,
            "train.eval_batches": 1,
            "output.sample_tokens": 0,
            "output.tensorboard": False,
            "memory.device_gib": 64,
            "memory.recompute": "none",
        }


FULL = Size(hidden=512, vocab_size=4096, seq_len=64)
QUICK = Size(hidden=64, vocab_size=256, seq_len=32)


def _pipeline(schedule: str, **keys: object) -> LayoutCase:
    named = {key.replace("__", "."): value for key, value in keys.items()}
    name = "-".join(["pipe2", schedule, *(str(v) for k, v in named.items() if v != 0)])
    return LayoutCase(
        name, 2, {"parallel.pipe": 2, "parallel.schedule": schedule, **named}, layers=14
    )


def _split(name: str, nproc: int, layers: int = 14, **axes: object) -> LayoutCase:
    return LayoutCase(name, nproc, {f"parallel.{k}": v for k, v in axes.items()}, layers)


MASTERS = {"train.precision": "bf16_master", "memory.compute_fp32": True}
ON_DISK = {"memory.offload": "disk", "memory.bucket_size": 2**20}

LAYOUTS: Sequence[LayoutCase] = (
    LayoutCase("one"),
    LayoutCase("one-full", keys={"memory.recompute": "full"}),
    LayoutCase("one-sgd", keys={"optimizer.name": "sgd"}, layers=10),
    LayoutCase("one-2bw", keys={"parallel.schedule": "2bw"}),
    LayoutCase("one-tied", keys={"model.tied_embedding": True, "model.vocab_size": 16384}),
    LayoutCase("one-vocabulary", keys={"model.vocab_size": 16384}, layers=4),
    LayoutCase("one-batch", keys={"train.microbatch_size": 4}),
    LayoutCase("one-disk", keys=ON_DISK, layers=10),
    LayoutCase("one-masters", keys=MASTERS),
    LayoutCase("one-masters-disk", keys={**MASTERS, **ON_DISK}, layers=20),
    LayoutCase(
        "one-masters-disk-full",
        keys={**MASTERS, **ON_DISK, "memory.recompute": "full"},
        layers=20,
    ),
    LayoutCase("data2", 2, {"train.global_batch_size": 4}),
    LayoutCase("data2-easgd", 2, {"averaging.method": "sync_easgd", "averaging.tau": 1}),
    _pipeline("gpipe"),
    _pipeline("gpipe", memory__recompute="full"),
    _pipeline("1f1b"),
    _pipeline("interleaved"),
    _pipeline("zero_bubble"),
    _pipeline("zero_bubble_v"),
    _pipeline("axonn"),
    _pipeline("2bw"),
    _pipeline("2bw", memory__recompute="full"),
    _pipeline("2bw", optimizer__error_feedback=True),
    _pipeline("stash", optimizer__name="sgd", optimizer__max_grad_norm=0),
    LayoutCase(
        "pipe2-2bw-masters-disk",
        2,
        {"parallel.pipe": 2, "parallel.schedule": "2bw", **MASTERS, **ON_DISK},
        layers=30,
    ),
    _split("x2", 2, x=2),
    _split("y2", 2, y=2),
    _split("z2", 2, z=2),
    _split("z2-kept", 2, z=2, keep_gathered=True),
    _split("x2-pipe2", 4, 28, x=2, pipe=2),
    _split("data2-pipe2-2bw", 4, data=2, pipe=2, schedule="2bw"),
)
QUICK_NAMES = ("one", "pipe2-2bw", "x2")


def measured_layout(case: LayoutCase, size: Size) -> LayoutFigure:
    """Train a layout and return its figures."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        keys = {**size.keys(), "model.layers": case.layers, **case.keys, "output.dir": "run"}
        record = _trained(folder, case.nproc, keys)
    ranks = [
        LayoutFigure(
            case.name,
            sum(rank["predicted"].get(name, 0) for name in STATE),
            rank["predicted_peak"],
            rank["measured_peak"],
        )
        for rank in record["ranks"]
    ]
    return max(ranks, key=lambda rank: abs(rank.error))


def _trained(folder: str, nproc: int, keys: Mapping[str, object]) -> Any:
    options = [text for key, value in keys.items() for text in (f"--{key}", _toml(value))]
    command = [sys.executable, "-c", _COMMAND, "train", "--nproc", str(nproc), *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    return json.loads((Path(folder) / "run" / "memory.json").read_text(encoding="utf-8"))


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
