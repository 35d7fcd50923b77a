"""A small U-Net, and how it is split: channels go y -> x -> y on every level.

stem -> | enter -> down -> [ the level below ] -> up -> join -> |  -> head
        |   over x, kept ---------------------------^           |
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ganglion.decide.topology import (
    BATCH,
    GROUP,
    NORMAL,
    TRANSPOSED,
    Cut,
    DropoutCut,
    LinearCut,
    ModelCuts,
    NormCut,
)

NUM_CLASSES = 8
WIDTH = 8


class Level(nn.Module):
    """One level: half the size below, the input joined again above."""

    def __init__(self, width: int, below: nn.Module, dropout: float) -> None:
        super().__init__()
        # No bias where a batch norm would take it away: only noise would train it.
        self.enter = nn.Conv2d(width, width, 3, padding="same", bias=False)
        self.enter_norm = nn.BatchNorm2d(width)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.down_norm = nn.GroupNorm(2, 2 * width)
        self.below = below
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2, bias=False)
        self.up_norm = nn.BatchNorm2d(width)
        self.join = nn.Conv2d(2 * width, width, 3, padding=1)
        self.join_norm = nn.GroupNorm(4, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        kept = F.relu(self.enter_norm(self.enter(x)))
        below: Tensor = self.below(F.relu(self.down_norm(self.down(kept))))
        back = F.relu(self.up_norm(self.up(below)))
        joined = self.join(torch.cat((back, kept), dim=1))
        result: Tensor = self.drop(F.relu(self.join_norm(joined)))
        return x + result


def make_unet(dropout: float = 0.0) -> dict[str, nn.Module]:
    """Images of (3, 8, 8) to scores of each place, (classes, 8, 8)."""
    wide, wider = 4 * WIDTH, 8 * WIDTH
    bottom = nn.Sequential(nn.Conv2d(wide, wider, 1), nn.ReLU(), nn.Conv2d(wider, wide, 1))
    inner = Level(2 * WIDTH, bottom, dropout)
    return {
        "stem": nn.Conv2d(3, WIDTH, 3, padding=1),
        "level": Level(WIDTH, inner, dropout),
        "head": nn.Conv2d(WIDTH, NUM_CLASSES, 1),
    }


def unet_cuts() -> ModelCuts:
    cuts: dict[str, Cut] = {
        "stem": LinearCut(None, "y"),
        "level.below.below.0": NORMAL,
        "level.below.below.2": TRANSPOSED,
        "head": NORMAL,
    }
    for level in ("level", "level.below"):
        cuts |= {
            f"{level}.enter": NORMAL,
            f"{level}.enter_norm": NormCut("x", BATCH),
            f"{level}.down": TRANSPOSED,
            f"{level}.down_norm": NormCut("y", GROUP),
            f"{level}.up": NORMAL,
            f"{level}.up_norm": NormCut("x", BATCH),
            f"{level}.join": LinearCut("x", "y", in_sections=2),
            f"{level}.join_norm": NormCut("y", GROUP),
            f"{level}.drop": DropoutCut("y", dim=1),
        }
    return ModelCuts(cuts, output_axis="x", output_dim=1)
