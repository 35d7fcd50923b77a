"""Messages and collectives between ranks of one host: Ganglion, Gloo and MPICH.

    python -m benchmarks.comm [--json [FILE]] [--quick]
                              [--rounds N] [--repetitions N] [--largest SIZE]

Who takes part, the last two if mpi4py and an mpiexec are installed:

    shm     Ganglion, shared memory         gloo    torch.distributed itself, a peer
    torch   Ganglion over torch.distributed mpich   mpi4py itself, a peer
    mpi     Ganglion over MPI

Rows, in microseconds, smaller is better:

    shm_send_1mb                  one way: half of there and back, both main threads waiting
    shm_send_1mb_read             the same, and the receiver reads every number that arrived
    shm_send_1mb_computing        what one message each way adds to a loop of small matmuls
    shm_all_reduce_1mb_2          a call of two ranks; the size is that of the whole tensor
    shm_all_reduce_1mb_2_allocated   the same on a tensor from `group.allocate`

`ratio_to_gloo` and `ratio_to_mpich` are their time over ours: above 1, ours is shorter. In each
round everyone has a turn of some messages of one size while the ranks of the others sleep.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.comm.crew import open_crews
from benchmarks.comm.ranks import ALLOCATED, COMPUTING, MATMUL_SIZE, READ, Task
from benchmarks.comm.ways import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from benchmarks.harness import Row, machine, program
from ganglion.cli.launch.mpi import require_mpiexec
from ganglion.errors import LaunchError

KB, MB = 1 << 10, 1 << 20
# Of each size: messages or calls in a turn; loops in a turn while computing, messages in a loop.
REPETITIONS = {64: 200, KB: 200, 64 * KB: 150, MB: 50, 16 * MB: 8, 64 * MB: 4, 256 * MB: 2}
LOOPS, HUGE_LOOPS = 3, 2
MESSAGES = {64: 20, KB: 20, 64 * KB: 20, MB: 20, 16 * MB: 5, 64 * MB: 2, 256 * MB: 1}
LARGE, HUGE = 16 * MB, 64 * MB  # from 64 MB on, only every other round
COLLECTIVES = (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER)
COLLECTIVE_SIZES = {2: (KB, MB, 64 * MB), 4: (KB, MB, 16 * MB)}
SENDERS = ("shm", "gloo", "torch", "mpich", "mpi")
PEERS = ("gloo", "mpich")
# The bars, in microseconds; 1 MB between 4 ranks must be so many times faster than Gloo.
SEND_BARS_US = {KB: 60.0, MB: 150.0}
COLLECTIVE_BARS_US = {KB: 100.0, MB: 600.0, 64 * MB: 60_000.0}
FOUR_RANKS_RATIO = 3.0


@dataclass(frozen=True)
class Case:
    """One line of the table: a task that all its ways take turns at."""

    ways: tuple[str, ...]
    num_ranks: int
    task: Task

    def name(self, way: str) -> str:
        task = self.task
        parts = [way, task.verb, size_name(task.num_bytes)]
        parts += [str(self.num_ranks)] if task.verb != "send" else []
        return "_".join([*parts, task.variant] if task.variant else parts)


@dataclass(frozen=True)
class CommRow(Row):
    """A row with both peers; `ratio` is that to Gloo."""

    repetitions: int
    ratio_to_gloo: float | None
    ratio_to_mpich: float | None


@dataclass(frozen=True)
class Bar:
    """What a row must reach."""

    row: str
    measure: str  # "value", at most the bar, or "ratio_to_gloo", at least the bar
    bar: float
    measured: float
    met: bool


def size_name(num_bytes: int) -> str:
    """Return `64b`, `1kb` or `16mb`."""
    for unit, size in (("mb", MB), ("kb", KB)):
        if num_bytes >= size:
            return f"{num_bytes // size}{unit}"
    return f"{num_bytes}b"


# --- what is measured --------------------------------------------------------------------------


def all_cases() -> list[Case]:
    """Return every case of a full run."""
    cases = [
        Case(SENDERS, 2, make_task("send", variant, num_bytes))
        for num_bytes in REPETITIONS
        for variant in ("", READ, COMPUTING)
    ]
    for num_ranks, sizes in COLLECTIVE_SIZES.items():
        for num_bytes in sizes:
            for verb in COLLECTIVES:
                cases.append(Case(("shm", *PEERS), num_ranks, make_task(verb, "", num_bytes)))
            if num_bytes > KB:
                task = make_task(ALL_REDUCE, ALLOCATED, num_bytes)
                cases.append(Case(("shm",), num_ranks, task))
    return cases


def make_task(verb: str, variant: str, num_bytes: int) -> Task:
    is_large = num_bytes >= LARGE
    loops = HUGE_LOOPS if num_bytes >= HUGE else LOOPS
    return Task(
        way="",
        verb=verb,
        variant=variant,
        num_bytes=num_bytes,
        repetitions=loops if variant == COMPUTING else REPETITIONS[num_bytes],
        warm_ups=0 if variant == COMPUTING else 1 if is_large else 3,
        messages=MESSAGES[num_bytes],
        matmuls=100 if is_large else 10,
    )


def chosen_cases(options: argparse.Namespace) -> list[Case]:
    """Return what the user wants of the cases, with as many repetitions."""
    divisor = 4 if options.quick else 1
    sizes = [size_name(num_bytes) for num_bytes in REPETITIONS]
    largest = [*REPETITIONS][sizes.index(options.largest or sizes[-1])]
    result = []
    for case in all_cases():
        repetitions = max(1, case.task.repetitions // divisor)
        if options.repetitions is not None:
            repetitions = min(repetitions, options.repetitions)
        if case.task.num_bytes <= largest:
            result.append(replace(case, task=replace(case.task, repetitions=repetitions)))
    return result


# --- measuring ---------------------------------------------------------------------------------


def measure(cases: Sequence[Case], rounds: int, mpiexec: str | None) -> dict[str, list[float]]:
    """Return the seconds of all repetitions by row; every round has each way at each case."""
    seconds: dict[str, list[float]] = {}
    for num_ranks in sorted({case.num_ranks for case in cases}):
        mine = [case for case in cases if case.num_ranks == num_ranks]
        ways = {way for case in mine for way in case.ways}
        with open_crews(num_ranks, ways, mpiexec) as crews:
            for number in range(rounds):
                print(f"{num_ranks} ranks: round {number + 1} of {rounds}", file=sys.stderr)
                for case in mine:
                    if number % 2 and case.task.num_bytes >= HUGE:
                        continue
                    present = [way for way in case.ways if way in crews]
                    first = number % len(present)  # nobody always comes after the same
                    for way in present[first:] + present[:first]:
                        taken = crews[way].run(replace(case.task, way=way))
                        seconds.setdefault(case.name(way), []).extend(taken)
    return seconds


def make_rows(cases: Sequence[Case], seconds: Mapping[str, Sequence[float]]) -> list[CommRow]:
    """Turn seconds into rows, case by case."""
    return [
        make_row(case, way, seconds)
        for case in cases
        for way in case.ways
        if case.name(way) in seconds
    ]


def make_row(case: Case, way: str, seconds: Mapping[str, Sequence[float]]) -> CommRow:
    taken = [1e6 * s for s in seconds[case.name(way)]]
    value = statistics.median(taken)
    low, _, high = statistics.quantiles(taken, n=4) if len(taken) > 1 else (value,) * 3
    # Who can be asked for memory is compared with peers that can not.
    plain = replace(case, task=replace(case.task, variant=case.task.variant.replace(ALLOCATED, "")))
    ratios = {
        peer: _ratio(seconds.get(plain.name(peer)), value) if way not in PEERS else None
        for peer in PEERS
    }
    return CommRow(
        name=case.name(way),
        value=value,
        unit="us",
        low=low,
        high=high,
        ratio_to=plain.name("gloo") if ratios["gloo"] is not None else None,
        ratio=ratios["gloo"],
        repetitions=len(taken),
        ratio_to_gloo=ratios["gloo"],
        ratio_to_mpich=ratios["mpich"],
    )


def _ratio(peer_seconds: Sequence[float] | None, value_us: float) -> float | None:
    """Return how many times longer the peer takes; None if noise has hidden one of them."""
    if peer_seconds is None:
        return None
    peer_us = 1e6 * statistics.median(peer_seconds)
    return peer_us / value_us if peer_us > 0 and value_us > 0 else None


def make_bars(rows: Sequence[CommRow]) -> list[Bar]:
    """Compare the rows that were measured with what they must reach."""
    at_most = {f"shm_send_{size_name(n)}": us for n, us in SEND_BARS_US.items()}
    at_least = {f"shm_send_{size_name(n)}": 1.0 for n in REPETITIONS}
    for verb in COLLECTIVES:
        for num_bytes, us in COLLECTIVE_BARS_US.items():
            at_most[f"shm_{verb}_{size_name(num_bytes)}_2"] = us
        at_least[f"shm_{verb}_{size_name(MB)}_4"] = FOUR_RANKS_RATIO
    bars = [
        Bar(row.name, "value", at_most[row.name], row.value, row.value <= at_most[row.name])
        for row in rows
        if row.name in at_most
    ]
    for row in rows:
        if row.name in at_least:
            ratio = row.ratio_to_gloo or 0.0
            bar = at_least[row.name]
            bars.append(Bar(row.name, "ratio_to_gloo", bar, ratio, ratio >= bar))
    return bars


# --- telling -----------------------------------------------------------------------------------


def print_tables(cases: Sequence[Case], rows: Sequence[CommRow], bars: Sequence[Bar]) -> None:
    """Print one line for each case, then the bars."""
    console = Console(width=max(Console().width, 140))
    console.print(row_table(cases, {row.name: row for row in rows}))
    table = Table(title="bars")
    for column in ("row", "bar", "measured", "met"):
        table.add_column(column, justify="left" if column == "row" else "right")
    for bar in bars:
        if bar.measure == "value":
            wanted, measured = f"at most {time_text(bar.bar)}", time_text(bar.measured)
        else:
            wanted, measured = f"at least {bar.bar:g} x gloo", f"{bar.measured:.2f} x"
        table.add_row(bar.row, wanted, measured, "yes" if bar.met else "NO")
    console.print(table)


def row_table(cases: Sequence[Case], rows: Mapping[str, CommRow]) -> Table:
    table = Table(title="time of one message or call: median and quartiles")
    table.add_column("", no_wrap=True)
    for column in (*SENDERS, "gloo/shm", "mpich/shm"):
        table.add_column(column, justify="right", no_wrap=True)
    for case in cases:
        found = [rows.get(case.name(way)) for way in SENDERS]
        cells = ["" if row is None else time_text(row.value, row.low, row.high) for row in found]
        ours = rows[case.name("shm")]
        ratios = (ours.ratio_to_gloo, ours.ratio_to_mpich)
        cells += ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        table.add_row(case.name("").lstrip("_"), *cells)
    return table


def time_text(us: float, *quartiles_us: float) -> str:
    """Return `12.3 ms`, with quartiles below it."""
    unit, size = ("us", 1) if abs(us) < 1000 else ("ms", 1000)
    first = f"{_digits(us / size)} {unit}"
    if not quartiles_us:
        return first
    return first + "\n" + " - ".join(_digits(quartile / size) for quartile in quartiles_us)


def _digits(number: float) -> str:
    places = 2 if abs(number) < 10 else 1 if abs(number) < 100 else 0
    return f"{number:.{places}f}"


def find_mpiexec() -> str | None:
    try:
        return require_mpiexec()
    except LaunchError:
        return None


def notes_of(options: argparse.Namespace, rounds: int, mpiexec: str | None) -> dict[str, Any]:
    """Say how it was measured."""
    mpi = "not installed"
    if mpiexec is not None:
        mpi = f"mpi4py {importlib.metadata.version('mpi4py')}"
    return {
        **machine(),
        "mpi": mpi,
        "rounds": rounds,
        "threads_a_process": 1,
        "computing": f"10 matmuls of {MATMUL_SIZE} x {MATMUL_SIZE} a message, 100 from 16 MB on",
        "quick": options.quick,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(program(), description="Messages and collectives of one host.")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write JSON; - prints nothing else"
    )
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, about 30 s")
    parser.add_argument("--rounds", type=int, help="rounds of turns (default 5, quick 2)")
    parser.add_argument("--repetitions", type=int, help="at most so many in a turn")
    sizes = [size_name(num_bytes) for num_bytes in REPETITIONS]
    parser.add_argument("--largest", choices=sizes, help="leave out what is larger")
    parsed = parser.parse_args()
    for name in ("rounds", "repetitions"):
        number = getattr(parsed, name)
        if number is not None and number < 1:
            parser.error(f"--{name} {number}: at least 1 is needed")
    return parsed


def main() -> None:
    options = arguments()
    rounds = options.rounds or (2 if options.quick else 5)
    mpiexec = find_mpiexec()
    cases = chosen_cases(options)
    rows = make_rows(cases, measure(cases, rounds, mpiexec))
    bars = make_bars(rows)
    notes = notes_of(options, rounds, mpiexec)
    if options.json is not None:
        record = {"machine": notes, "rows": [*map(asdict, rows)], "bars": [*map(asdict, bars)]}
        text = json.dumps(record, indent=2) + "\n"
        if options.json == "-":
            sys.stdout.write(text)
            return
        Path(options.json).write_text(text, encoding="utf-8")
    print_tables(cases, rows, bars)
    print(", ".join(f"{key}: {value}" for key, value in notes.items()))


if __name__ == "__main__":
    main()
