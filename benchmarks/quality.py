"""What a delay of one update costs: validation loss under two_bw against a schedule that flushes.

    python -m benchmarks.quality [--json] [--quick] [--seeds N] [--steps N] [--results FILE]

Trains the quickstart model on two processes, each time on the same samples: SGD, AdamW and Muon
under one_f_one_b, under two_bw, and under two_bw with error feedback. Each optimizer has the
learning rate of its grid that gives one_f_one_b the lowest loss with the first seed; everything
else is the quickstart's, with its cosine ending at the last step. A seed decides weights, held-out
part and order of the samples, so differences are taken seed by seed. The losses of finished runs
go to FILE: started again with the same FILE, the benchmark goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.harness import Contestant, Workers, machine, program
from ganglion import RunSettings, parallelize
from ganglion.cli.environment import cache_folder
from ganglion.cli.train import prepare_data
from ganglion.decide.config import Override, RunFile, load_run_file, resolve
from ganglion.decide.config.files import QUICKSTART, recipe
from ganglion.execute.comm import torch_world
from ganglion.execute.models import loss_function
from ganglion.execute.train.job import build_blocks, open_source
from ganglion.execute.update.optimizers import optimizer_factory, warmup_cosine

PIPE = 2
STEPS, QUICK_STEPS = 140, 25
SEEDS = 3
EVAL_BATCHES = 16
TIMEOUT_S = 300.0
WIDTH = 100
FLUSH, LATE = "one_f_one_b", "two_bw"
WAYS = ((FLUSH, False), (LATE, False), (LATE, True))
GRIDS: dict[str, tuple[float, ...]] = {
    "sgd": (0.05, 0.1, 0.2),
    "adamw": (1e-3, 2e-3, 4e-3),
    "muon": (1.6e-2, 3.2e-2, 6.4e-2),
}


@dataclass(frozen=True)
class Cell:
    """One training."""

    optimizer: str
    schedule: str
    error_feedback: bool
    lr: float
    seed: int
    steps: int

    def file(self) -> RunFile:
        """Return the quickstart with the settings of this cell."""
        wishes = {
            "optimizer.name": self.optimizer,
            "optimizer.lr": self.lr,
            "optimizer.error_feedback": str(self.error_feedback).lower(),
            "parallel.schedule": self.schedule,
            "parallel.pipe": PIPE,
            "train.seed": self.seed,
            "train.steps": self.steps,
        }
        overrides = [Override(key, str(value)) for key, value in wishes.items()]
        return load_run_file(recipe(QUICKSTART), overrides, QUICKSTART)


@dataclass(frozen=True)
class Row:
    """One line of the result: mean, least and greatest over the seeds."""

    name: str
    lr: float
    value: float | None
    low: float | None
    high: float | None
    unit: str
    difference_to: str | None
    difference: float | None
    difference_low: float | None
    difference_high: float | None
    losses: list[float | None]


# --- in the two processes ------------------------------------------------------------------------


def build(folder: str) -> Callable[[], None]:
    """Return a turn: train the cell that the folder holds; rank 0 leaves the loss there."""

    def turn() -> None:
        cell = Cell(**json.loads((Path(folder) / "cell.json").read_text()))
        loss = trained(cell)
        if dist.get_rank() == 0:
            (Path(folder) / "loss.json").write_text(json.dumps(loss))

    return turn


def trained(cell: Cell) -> float | None:
    """Return the validation loss at the end of a training; None if it is not a number."""
    file = cell.file()
    plan = resolve(file, PIPE)
    source = open_source(file, cache_folder())
    assert source.held_out is not None
    settings = file.optimizer
    with parallelize(
        build_blocks(file, source.num_classes, source.input_shape),
        loss_function(file.model.loss),
        optimizer_factory(settings),
        plan,
        RunSettings(
            max_grad_norm=settings.max_grad_norm,
            error_feedback=settings.error_feedback,
            lr_factor=warmup_cosine(settings.warmup_steps, cell.steps, settings.min_lr_fraction),
            seed=cell.seed,
            timeout_s=TIMEOUT_S,
        ),
        world=torch_world(dist.get_rank(), plan.mesh(), timeout_s=TIMEOUT_S),
    ) as run:
        for _ in run.steps(run.batches(source.train), until=cell.steps):
            pass
        loss = run.evaluate(source.held_out, EVAL_BATCHES)
    return loss if math.isfinite(loss) else None


# --- in the parent -------------------------------------------------------------------------------


class Trainings:
    """Trains cells one after the other, and remembers those that are done."""

    def __init__(self, results: Path) -> None:
        self._results = results
        self._folder = tempfile.TemporaryDirectory(prefix="quality-")
        self._workers: Workers | None = None
        self._known: dict[Cell, float | None] = {}
        for line in results.read_text().splitlines() if results.exists() else ():
            record = json.loads(line)
            self._known[Cell(**record["cell"])] = record["loss"]

    def loss(self, cell: Cell) -> float | None:
        """Return the validation loss of a cell, training it if nobody has yet."""
        if cell not in self._known:
            self._known[cell] = self._train(cell)
            with self._results.open("a") as file:
                file.write(json.dumps({"cell": asdict(cell), "loss": self._known[cell]}) + "\n")
        print(f"{cell}: {self._known[cell]}", file=sys.stderr, flush=True)
        return self._known[cell]

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()
        self._folder.cleanup()

    def _train(self, cell: Cell) -> float | None:
        folder = Path(self._folder.name)
        (folder / "cell.json").write_text(json.dumps(asdict(cell)))
        if self._workers is None:
            prepare_data(cell.file())
            self._workers = Workers(Contestant("quality", PIPE, build), (str(folder),))
        self._workers.turn()
        loss: float | None = json.loads((folder / "loss.json").read_text())
        return loss


def best_lr(trainings: Trainings, optimizer: str, steps: int) -> float:
    """Return the rate that gives the flushing schedule the lowest loss with the first seed."""
    losses = {
        lr: trainings.loss(Cell(optimizer, FLUSH, False, lr, 0, steps)) for lr in GRIDS[optimizer]
    }
    return min((loss, lr) for lr, loss in losses.items() if loss is not None)[1]


def rows_of(trainings: Trainings, optimizer: str, lr: float, seeds: int, steps: int) -> list[Row]:
    rows: list[Row] = []
    for schedule, error_feedback in WAYS:
        losses = [
            trainings.loss(Cell(optimizer, schedule, error_feedback, lr, seed, steps))
            for seed in range(seeds)
        ]
        name = f"{optimizer}_{schedule}" + ("_error_feedback" if error_feedback else "")
        rows.append(_row(name, lr, losses, rows[0] if rows else None))
    return rows


def _row(name: str, lr: float, losses: list[float | None], flush: Row | None) -> Row:
    pairs = zip(losses, flush.losses, strict=True) if flush else ()
    differences = [None if a is None or b is None else a - b for a, b in pairs]
    value, low, high = _spread(losses)
    difference, least, greatest = _spread(differences)
    peer = flush.name if flush else None
    unit = "nats a token"
    return Row(name, lr, value, low, high, unit, peer, difference, least, greatest, losses)


def _spread(values: Sequence[float | None]) -> tuple[float | None, float | None, float | None]:
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None, None, None  # a training that diverged has no mean
    return statistics.fmean(known), min(known), max(known)


def report(rows: Sequence[Row], notes: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        record = {"machine": {**machine(), **notes}, "rows": [asdict(row) for row in rows]}
        print(json.dumps(record, indent=2))
        return
    table = Table(title="validation loss, nats a token: mean (least to greatest of the seeds)")
    for column in ("name", "rate", "loss", "against flush"):
        table.add_column(column, justify="left" if column == "name" else "right", no_wrap=True)
    for row in rows:
        loss = _shown(row.value, row.low, row.high, ".4f")
        gap = _shown(row.difference, row.difference_low, row.difference_high, "+.4f")
        table.add_row(row.name, f"{row.lr:g}", loss, gap if row.difference_to else "")
    console = Console(width=max(WIDTH, Console().width))
    console.print(table)
    console.print(", ".join(f"{key}: {value}" for key, value in {**machine(), **notes}.items()))


def _shown(value: float | None, low: float | None, high: float | None, form: str) -> str:
    if value is None or low is None or high is None:
        return "diverged"
    return f"{value:{form}} ({low:{form}} to {high:{form}})"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        program(), description="Validation loss under a delay of one update."
    )
    parser.add_argument("--json", action="store_true", help="print the JSON form, nothing else")
    parser.add_argument("--quick", action="store_true", help="few steps, one seed, one rate each")
    parser.add_argument("--seeds", type=int, default=None, help=f"how many (default {SEEDS})")
    parser.add_argument("--steps", type=int, default=None, help=f"updates (default {STEPS})")
    parser.add_argument("--results", type=Path, default=None, help="losses of finished runs")
    parsed = parser.parse_args()
    for key in ("seeds", "steps"):
        if getattr(parsed, key) is not None and getattr(parsed, key) < 1:
            parser.error(f"--{key} {getattr(parsed, key)}: at least 1 is needed")
    return parsed


def main() -> None:
    options = arguments()
    steps = options.steps or (QUICK_STEPS if options.quick else STEPS)
    seeds = options.seeds or (1 if options.quick else SEEDS)
    with tempfile.TemporaryDirectory(prefix="quality-") as folder:
        trainings = Trainings(options.results or Path(folder) / "results.jsonl")
        rates = {
            name: grid[len(grid) // 2] if options.quick else best_lr(trainings, name, steps)
            for name, grid in GRIDS.items()
        }
        rows = [
            row for name, lr in rates.items() for row in rows_of(trainings, name, lr, seeds, steps)
        ]
        trainings.close()
    size = Cell("sgd", FLUSH, False, 1.0, 0, steps).file().train.global_batch_size
    notes = {
        "model": f"quickstart, pipe={PIPE}",
        "steps": steps,
        "samples": steps * size,
        "validation_samples": EVAL_BATCHES * size,
        "seeds": seeds,
        "rates": "the middle of each grid" if options.quick else "best for flush with seed 0",
        "grids": {name: list(grid) for name, grid in GRIDS.items()},
        "load_at_end": f"{os.getloadavg()[0]:.1f}",
    }
    report(rows, notes, as_json=options.json)


if __name__ == "__main__":
    main()
