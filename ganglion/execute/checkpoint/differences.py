"""Compare the losses, gradient norms and parameters of two short trainings.

    |found - wanted| <= tolerance * (|wanted| + 0.01)

The constant is the size of a small weight, for parameters near zero.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from ganglion.decide.config import CHECKPOINTS, MODEL_FILE
from ganglion.execute.checkpoint.layout import latest_checkpoint

NUMBERS_FILE = "verify.json"
SMALL_WEIGHT = 0.01


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest difference of a tensor, and the largest relative to the tolerance."""

    name: str
    largest: float
    of_tolerance: float

    @property
    def is_small(self) -> bool:
        """Whether every value is within the tolerance; NaN never is."""
        return self.of_tolerance <= 1


@dataclass(frozen=True, slots=True)
class TrainingNumbers:
    """Losses and gradient norms of the steps of a training, and the names of its parameters."""

    losses: list[float]
    grad_norms: list[float]
    parameters: list[str]

    def write(self, folder: Path) -> None:
        """Write them to the folder of the training."""
        (folder / NUMBERS_FILE).write_text(json.dumps(asdict(self)), "utf-8")

    @classmethod
    def read(cls, folder: Path) -> TrainingNumbers:
        """Read them from the folder of a training."""
        return cls(**json.loads((folder / NUMBERS_FILE).read_text(encoding="utf-8")))


def formula(tolerance: float) -> str:
    """Return the tolerance as shown to a user."""
    return f"{tolerance:g} * (|value| + {SMALL_WEIGHT:g})"


def compare(name: str, found: Tensor, wanted: Tensor, tolerance: float) -> Difference:
    """Compare two tensors element by element."""
    if found.shape != wanted.shape:
        return Difference(name, math.inf, math.inf)
    if not wanted.numel():
        return Difference(name, 0.0, 0.0)
    gap = (found.double() - wanted.double()).abs()
    allowed = tolerance * (wanted.double().abs() + SMALL_WEIGHT)
    return Difference(name, float(gap.max()), float((gap / allowed).max()))


def compare_folders(found: Path, wanted: Path, tolerance: float) -> list[Difference]:
    """Compare the trainings in two folders; parameters come in the order of the model."""
    told, expected = TrainingNumbers.read(found), TrainingNumbers.read(wanted)
    numbers = {
        "loss": (told.losses, expected.losses),
        "gradient norm": (told.grad_norms, expected.grad_norms),
    }
    differences = [
        compare(name, _numbers(a), _numbers(b), tolerance) for name, (a, b) in numbers.items()
    ]
    with (
        safe_open(_exported(found), framework="pt") as mine,
        safe_open(_exported(wanted), framework="pt") as other,
    ):
        names = set(mine.keys())
        for name in expected.parameters:
            weight = mine.get_tensor(name) if name in names else torch.empty(0)
            differences.append(compare(name, weight, other.get_tensor(name), tolerance))
    return differences


def _numbers(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _exported(folder: Path) -> Path:
    newest = latest_checkpoint(folder / CHECKPOINTS)
    assert newest is not None, "the training has saved its weights"
    return newest / MODEL_FILE
