"""Step metrics: the record that a run writes once a step, in every topology."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from ganglion.trace.event import is_json


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One step; `step` counts finished updates, so the first record has step 1.

    `val_loss` is present only on steps that evaluated. Under elastic averaging it is that of the
    centre, and each step has numbers of worker 0: exchanges so far, its distance from the centre as
    a share of the centre's norm, the seconds it has waited for exchanges, how many of its writes
    had missed 0, 1, 2 ... versions of the centre (`staleness`), and those of the last exchange
    (docs/averaging.md). Under fp16 each step has its loss scale and whether an overflow skipped it.
    """

    step: int
    loss: float
    grad_norm: float
    tokens_per_s: float
    step_s: float
    lr: float
    peak_bytes: int
    val_loss: float | None = None
    exchanges: int | None = None
    consensus: float | None = None
    exchange_wait_s: float | None = None
    staleness: list[int] | None = None
    staleness_p99: int | None = None
    staleness_max: int | None = None
    center_move: float | None = None
    center_speed: float | None = None
    center_age_s: float | None = None
    force: float | None = None
    step_norm: float | None = None
    workers: int | None = None
    exchanges_discarded: int | None = None
    exchange_bytes: int | None = None
    exchange_comm_s: float | None = None
    exchange_exposed_s: float | None = None
    exchange_concurrency: int | None = None
    exchange_queue: int | None = None
    exchange_retries: int | None = None
    lost_update: float | None = None
    loss_scale: float | None = None
    skipped: bool | None = None

    def to_json(self) -> str:
        """Return one line of JSON; non-finite numbers, which JSON lacks, become null."""
        known = {key: value for key, value in asdict(self).items() if value is not None}
        for key, value in known.items():
            if not isinstance(value, list) and not math.isfinite(value):
                known[key] = None
        return json.dumps(known)


def read_metrics(path: Path) -> list[StepMetrics]:
    """Return the records of a metrics file; a null number becomes NaN.

    A last line that a crash left incomplete is ignored; any other bad line is an error.
    """
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line]
    if lines and not is_json(lines[-1]):
        lines.pop()
    return [_from_record(json.loads(line)) for line in lines]


def _from_record(record: dict[str, float | None]) -> StepMetrics:
    values = {
        key: math.nan if value is None and key != "val_loss" else value
        for key, value in record.items()
    }
    return StepMetrics(**values)  # type: ignore[arg-type]


class MetricsFile:
    """`metrics.jsonl`, appended and flushed once a step, so that a crash loses at most a line."""

    def __init__(self, path: Path, first_step: int) -> None:
        """Open for the steps after `first_step`; drop later lines, which a resumed run repeats."""
        if path.exists():
            kept = [r for r in read_metrics(path) if r.step <= first_step]
            # Replaced in one step: a crash leaves the old file or the new one.
            beside = path.with_name(path.name + ".tmp")
            beside.write_text("".join(r.to_json() + "\n" for r in kept), encoding="utf-8")
            beside.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: StepMetrics) -> None:
        """Append one record."""
        self._file.write(record.to_json() + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; further writes are errors."""
        self._file.close()
