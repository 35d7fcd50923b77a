"""One small harness for all benchmarks: contestants take turns, medians are compared.

A contestant is a set of processes of its own, started once and asleep while others run, so that
nobody's threads, hooks or allocator settings touch anybody else's figures. Rounds are interleaved:
a machine that drifts drifts for all. The JSON form is

    {"machine": ..., "rows": [{"name", "value", "unit", "low", "high", "ratio_to", "ratio"}]}

where `value` is the median, `low` and `high` are the quartiles, and a ratio above 1 means better
than `ratio_to`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

# Builds a contestant inside one of its processes; returns what one timed turn calls.
Build = Callable[..., Callable[[], None]]
TURN_DEADLINE_S = 600.0


@dataclass(frozen=True)
class Contestant:
    """A name, how many processes it has, and how to build it in each of them."""

    name: str
    num_ranks: int
    build: Build
    ratio_to: str | None = None


@dataclass(frozen=True)
class Row:
    """One line of the result."""

    name: str
    value: float
    unit: str
    low: float
    high: float
    ratio_to: str | None
    ratio: float | None


class Workers:
    """The processes of one contestant."""

    def __init__(self, contestant: Contestant, args: tuple[Any, ...]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="bench-")
        self._pipes: list[Connection] = []
        context = multiprocessing.get_context("spawn")
        for rank in range(contestant.num_ranks):
            ours, theirs = context.Pipe()
            context.Process(
                target=_serve,
                args=(rank, contestant, args, self._folder.name, theirs),
                daemon=True,
            ).start()
            theirs.close()
            self._pipes.append(ours)
        self._answers()

    def turn(self) -> float:
        """Run one turn on all processes; return its seconds."""
        for pipe in self._pipes:
            pipe.send("go")
        return max(self._answers())

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send("end")
        self._folder.cleanup()

    def _answers(self) -> list[float]:
        answers = []
        for pipe in self._pipes:
            if not pipe.poll(TURN_DEADLINE_S):
                raise TimeoutError(f"no answer within {TURN_DEADLINE_S} s")
            answer = pipe.recv()
            if isinstance(answer, str):
                raise RuntimeError(answer)
            answers.append(answer)
        return answers


def _serve(
    rank: int, contestant: Contestant, args: tuple[Any, ...], folder: str, pipe: Connection
) -> None:
    try:
        torch.set_num_threads(1)
        store = dist.FileStore(str(Path(folder) / "store"), contestant.num_ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=contestant.num_ranks)
        turn = contestant.build(*args)
        pipe.send(0.0)
        while pipe.recv() == "go":
            dist.barrier()
            start_s = time.perf_counter()
            turn()
            dist.barrier()
            pipe.send(time.perf_counter() - start_s)
        dist.destroy_process_group()
    except Exception:
        pipe.send(traceback.format_exc())


def measure(
    contestants: Sequence[Contestant], args: tuple[Any, ...], rounds: int, warm_ups: int = 1
) -> dict[str, list[float]]:
    """Return the seconds of every contestant's turns, taken in interleaved rounds."""
    workers = {c.name: Workers(c, args) for c in contestants}
    seconds: dict[str, list[float]] = {c.name: [] for c in contestants}
    for number in range(warm_ups + rounds):
        for name, group in workers.items():
            elapsed = group.turn()
            if number >= warm_ups:
                seconds[name].append(elapsed)
    for group in workers.values():
        group.close()
    return seconds


def rate_rows(
    contestants: Sequence[Contestant],
    seconds: Mapping[str, Sequence[float]],
    amounts: Mapping[str, float],
    unit: str,
) -> list[Row]:
    """Turn seconds into rates (amount a turn / seconds), and rates into rows with ratios."""
    rates = {name: [amounts[name] / s for s in taken] for name, taken in seconds.items()}
    return [_row(c, rates, unit) for c in contestants]


def _row(contestant: Contestant, rates: Mapping[str, Sequence[float]], unit: str) -> Row:
    value, low, high = spread(rates[contestant.name])
    peer = contestant.ratio_to
    ratio = None if peer is None else value / statistics.median(rates[peer])
    return Row(contestant.name, value, unit, low, high, peer, ratio)


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and the quartiles."""
    middle = statistics.median(values)
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (middle,) * 3
    return middle, low, high


def arguments(description: str) -> argparse.Namespace:
    """Read the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print the JSON form, nothing else")
    parser.add_argument("--quick", action="store_true", help="a smaller model, under 90 s")
    parser.add_argument(
        "--rounds", type=int, default=None, help="rounds of turns (default 7, quick 5)"
    )
    parsed = parser.parse_args()
    if parsed.rounds is not None and parsed.rounds < 1:
        parser.error(f"--rounds {parsed.rounds}: at least 1 is needed")
    return parsed


def report(title: str, rows: Sequence[Row], *, as_json: bool, notes: Mapping[str, Any]) -> None:
    """Print the rows, as a table for people or in the one JSON form."""
    if as_json:
        record = {"machine": {**machine(), **notes}, "rows": [asdict(row) for row in rows]}
        print(json.dumps(record, indent=2))
        return
    table = Table(title=title)
    for column in ("name", "median", "quartiles", "unit", "ratio"):
        table.add_column(column, justify="left" if column in ("name", "unit") else "right")
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.3f} of {row.ratio_to}"
        spread = f"{row.low:.0f} - {row.high:.0f}"
        table.add_row(row.name, f"{row.value:.0f}", spread, row.unit, ratio)
    console = Console()
    console.print(table)
    console.print(", ".join(f"{key}: {value}" for key, value in {**machine(), **notes}.items()))


def machine() -> dict[str, Any]:
    """Say what the figures were measured on, without naming the host."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
