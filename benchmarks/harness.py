"""One small harness for all benchmarks: contestants take turns, medians are compared.

A contestant is a set of processes of its own, started once and asleep while others run, so that
nobody's threads, hooks or allocator settings touch anybody else's figures. Rounds are interleaved:
a machine that drifts drifts for all. The JSON form is

    {"machine": ..., "rows": [{"name", "value", "unit", "low", "high", "ratio_to", "ratio"}]}

where `value` is the median, `low` and `high` are the quartiles, and a ratio above 1 means better
than `ratio_to`.

A turn is timed from its start to the end of its slowest process. It may return figures of its own,
which `measure_figures` hands out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
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

# What a process has to say about a turn; the harness adds its SECONDS.
Figures = Mapping[str, float]
SECONDS = "seconds"
# Builds a contestant inside one of its processes; returns what one timed turn calls.
Build = Callable[..., Callable[[], Figures | None]]
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

    def __init__(
        self, contestant: Contestant, args: tuple[Any, ...], preloaded: Sequence[str] = ()
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="bench-")
        self._pipes: list[Connection] = []
        context = multiprocessing.get_context("forkserver" if preloaded else "spawn")
        if preloaded:
            context.set_forkserver_preload(list(preloaded))
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

    def turn(self) -> list[Figures]:
        """Run one turn on all processes; return what each says about it."""
        for pipe in self._pipes:
            pipe.send("go")
        return self._answers()

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send("end")
        self._folder.cleanup()

    def _answers(self) -> list[Figures]:
        answers = []
        for pipe in self._pipes:
            if not pipe.poll(TURN_DEADLINE_S):
                raise TimeoutError(f"no answer within {TURN_DEADLINE_S} s")
            answers.append(pipe.recv())
        errors = [answer for answer in answers if isinstance(answer, str)]
        if errors:  # of all: the first to be read may only say that another one is gone
            raise RuntimeError("\n".join(errors))
        return answers


def _serve(
    rank: int, contestant: Contestant, args: tuple[Any, ...], folder: str, pipe: Connection
) -> None:
    try:
        torch.set_num_threads(1)
        store = dist.FileStore(str(Path(folder) / "store"), contestant.num_ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=contestant.num_ranks)
        turn = contestant.build(*args)
        pipe.send({})
        while pipe.recv() == "go":
            dist.barrier()
            start_s = time.perf_counter()
            figures = turn() or {}
            dist.barrier()
            pipe.send({SECONDS: time.perf_counter() - start_s, **figures})
        dist.destroy_process_group()
    except EOFError:
        os._exit(1)  # nobody asks for turns any more: the benchmark ended early
    except Exception:
        pipe.send(traceback.format_exc())


def measure(
    contestants: Sequence[Contestant], args: tuple[Any, ...], rounds: int, warm_ups: int = 1
) -> dict[str, list[float]]:
    """Return the seconds of every contestant's turns, taken in interleaved rounds."""
    figures = measure_figures(contestants, args, rounds, warm_ups)
    return {
        name: [max(said[SECONDS] for said in turn) for turn in turns]
        for name, turns in figures.items()
    }


def measure_figures(
    contestants: Sequence[Contestant],
    args: tuple[Any, ...],
    rounds: int,
    warm_ups: int = 1,
    *,
    preloaded: Sequence[str] = (),
    title: str = "",
) -> dict[str, list[list[Figures]]]:
    """Return what every process said about each turn: by name, then turn, then rank.

    Processes import everything anew, or begin as forks of one that has imported the modules
    `preloaded` and run nothing. With a `title`, the rounds are counted on the error output.
    """
    workers = {c.name: Workers(c, args, preloaded) for c in contestants}
    figures: dict[str, list[list[Figures]]] = {c.name: [] for c in contestants}
    for number in range(warm_ups + rounds):
        if title:
            print(f"{title}: round {number + 1} of {warm_ups + rounds}", file=sys.stderr)
        for name, group in workers.items():
            said = group.turn()
            if number >= warm_ups:
                figures[name].append(said)
    for group in workers.values():
        group.close()
    return figures


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


def program() -> str | None:
    """Return the command that started this process, for the usage: `python -m benchmarks.NAME`."""
    spec = sys.modules["__main__"].__spec__
    return spec and f"python -m {spec.name.removesuffix('.__main__')}"


def arguments(
    description: str, add: Callable[[argparse.ArgumentParser], None] = lambda parser: None
) -> argparse.Namespace:
    """Read the options that every benchmark has, and those that `add` adds."""
    parser = argparse.ArgumentParser(program(), description=description)
    add(parser)
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
