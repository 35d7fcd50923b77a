"""Pictures of part `paper`: accuracy over virtual time for each method, and where its time goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib import pyplot

from benchmarks.averaging.paper import ROWS, Curves, PaperRow, simulated, time_of

matplotlib.use("Agg")
DPI = 110
CURVES_FILE, BREAKDOWN_FILE = "averaging_accuracy.png", "averaging_breakdown.png"


def draw(rows: Sequence[PaperRow], curves: Curves, folder: Path) -> None:
    """Write both pictures into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    has_tuned = any(row.name.endswith("_tuned") for row in rows)
    endings = ["", "_tuned"] if has_tuned else [""]
    figure, axes = pyplot.subplots(
        1, len(endings), figsize=(6.5 * len(endings), 4.5), squeeze=False, sharey=True
    )
    for ending, axis in zip(endings, axes[0], strict=True):
        _draw_curves(axis, rows, curves, ending)
    _save(figure, folder / CURVES_FILE)
    figure, axis = pyplot.subplots(figsize=(8, 4.5))
    _draw_breakdown(axis, [row for row in rows if not row.name.endswith("_tuned")])
    _save(figure, folder / BREAKDOWN_FILE)


def _draw_curves(axis: pyplot.Axes, rows: Sequence[PaperRow], curves: Curves, ending: str) -> None:
    shown = [row for row in rows if row.name.endswith("_tuned") == bool(ending)]
    for number, row in enumerate(shown):
        name = row.name.removesuffix("_tuned")
        curve = curves.get(ROWS[name], row.lr, 0)
        simulation = simulated(name, curves.costs, curves.task, 0)
        times = [time_of(simulation, batches) for batches, _ in curve.points]
        style = "-" if number < 10 else "--"
        label = f"{name}, {row.lr:g}"
        axis.plot(times, [accuracy for _, accuracy in curve.points], style, label=label)
    axis.axhline(curves.task.target, color="grey", linewidth=0.8)
    axis.set_xscale("log")
    axis.set_xlabel("virtual seconds, seed 0")
    axis.set_ylabel("accuracy of the centre")
    axis.set_title("own rates" if ending else "one rate for all")
    axis.legend(fontsize=6, title="method, rate", title_fontsize=6)


def _draw_breakdown(axis: pyplot.Axes, rows: Sequence[PaperRow]) -> None:
    names = [row.name for row in rows]
    ends_ms = [0.0] * len(rows)
    for part in rows[0].shares:
        widths_ms = [1e3 * row.batch_s * row.shares[part] for row in rows]
        axis.barh(names, widths_ms, left=ends_ms, label=part)
        ends_ms = [end + width for end, width in zip(ends_ms, widths_ms, strict=True)]
    axis.invert_yaxis()
    axis.set_xlabel("virtual ms for each batch")
    axis.legend(fontsize=7)


def _save(figure: pyplot.Figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=DPI)
    pyplot.close(figure)
