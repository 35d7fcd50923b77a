"""What processes of tests about offloading run: a short training, killed or starved on the way."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from ganglion import Plan, Run, RunSettings, parallelize
from ganglion.errors import OffloadError

WIDTH = 96
NUM_STEPS = 6
Batch = tuple[torch.Tensor, torch.Tensor]


def make_run(folder: Path, offload: str = "disk") -> Run:
    """Return a run whose update has several buckets."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    blocks = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    return parallelize(
        blocks,
        nn.functional.cross_entropy,
        lambda named: torch.optim.AdamW(named, lr=1e-2, fused=True),
        Plan(microbatch_size=4, offload=offload, precision="bf16_master", bucket_size=4096),
        RunSettings(offload_dir=folder),
    )


def batches(first: int = 0) -> list[Batch]:
    made = []
    for step in range(first, NUM_STEPS):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(4, WIDTH, generator=generator)
        made.append((inputs, torch.randint(WIDTH, (4,), generator=generator)))
    return made


def train(run: Run, saved: Path) -> list[float]:
    """Train to the end, with a checkpoint after every step; return the losses."""
    losses = []
    for batch in batches(run.step):
        losses += [result.loss for result in run.steps([batch])]
        run.save(saved)
    return losses


def die_in_write(count: int) -> Callable[..., int]:
    """Return a pwritev that kills the process in the middle of its nth write."""
    pwritev, left = os.pwritev, count

    def write(file: int, parts: list[memoryview], position: int) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            pwritev(file, [parts[0][:4096]], position)
            os.kill(os.getpid(), signal.SIGKILL)
        return pwritev(file, parts, position)

    return write


def main(kind: str, folder: Path) -> None:
    """Train until killed, or until the disk is full."""
    if kind == "killed":
        run = make_run(folder / "tier")
        # Three entries of seven buckets are written a step: this is in the third step.
        os.pwritev = die_in_write(50)  # type: ignore[assignment]
        train(run, folder / "saved")
    elif kind == "full at once":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            make_run(folder / "tier")
        except OffloadError as error:
            print(f"refused: {error}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
