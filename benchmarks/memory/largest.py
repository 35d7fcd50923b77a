"""The deepest GPT that a process with little memory can train, with and without the disk tier.

A child process has the limit on its data (RLIMIT_DATA: everything it writes to that is not a shared
mapping of a file, whether touched or not), builds a model of so many layers and trains two steps on
a short sequence, blocks computed again in backward. Whether it can is found by halving the interval
between a depth that can be trained and one that cannot.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist

from benchmarks.memory.task import StateTask, make_run, mixed_plan

DEADLINE_S = 1200
NO_ROOM = 3  # exit code


@dataclass(frozen=True)
class Largest:
    """The deepest model that was trained, and the least deep that was not."""

    layers: int
    num_parameters: int
    refused_layers: int


def largest(task: StateTask, offload: str, limit_bytes: int, guess: int) -> Largest:
    """Return the deepest model that trains within a limit; the search begins at `guess` layers."""
    fits: dict[int, int] = {}

    def tried(layers: int) -> bool:
        found = _num_trained(replace(task, layers=layers), offload, limit_bytes)
        told = "fit" if found else "do not fit"
        print(f"largest, offload {offload}: {layers} layers {told}", file=sys.stderr)
        if found:
            fits[layers] = found
        return bool(found)

    low, high = _bracket(tried, guess)
    while high - low > max(1, low // 32):
        middle = (low + high) // 2
        low, high = (middle, high) if tried(middle) else (low, middle)
    return Largest(low, fits[low], high)


def _bracket(tried: Callable[[int], bool], guess: int) -> tuple[int, int]:
    """Return a depth that fits and one that does not, by steps of a fifth."""
    low = high = guess
    if tried(guess):
        while tried(high := high + max(1, high // 5)):
            low = high
        return low, high
    while not tried(low := low - max(1, low // 5)):
        high = low
        if low < 2:
            raise RuntimeError("not even two layers fit")
    return low, high


def _num_trained(task: StateTask, offload: str, limit_bytes: int) -> int:
    """Return the parameters of a model that a child trained; 0 if it had no room."""
    arguments = json.dumps([asdict(task), offload, limit_bytes])
    command = [sys.executable, "-m", "benchmarks.memory.largest", arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    if done.returncode == NO_ROOM:
        return 0
    if done.returncode:
        raise RuntimeError(f"{command} failed:\n{done.stderr}")
    return int(done.stdout)


def train_limited(task: StateTask, offload: str, limit_bytes: int) -> int:
    """Train two steps in this process under a limit; return the number of parameters."""
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    run = make_run(task, mixed_plan(offload, recompute="full"))
    for _ in run.steps([task.batch(1)] * 2):
        pass
    return sum(p.numel() for p in run.tensors()["weights"])


def main() -> None:
    task, offload, limit_bytes = json.loads(sys.argv[1])
    try:
        print(train_limited(StateTask(**task), offload, limit_bytes))
    except (MemoryError, RuntimeError) as error:
        if "memory" not in str(error).lower() and not isinstance(error, MemoryError):
            raise
        sys.exit(NO_ROOM)


if __name__ == "__main__":
    main()
