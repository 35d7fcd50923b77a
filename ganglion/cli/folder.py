"""The run folder: where a run writes, prepared before anything is launched.

runs/quickstart-20260101-120000/
  run.toml plan.json          what was asked for, as resolved
  metrics.jsonl tensorboard/  what came out, step by step
  trace/ logs/                what each rank did and said
  checkpoints/                what to continue from
  model.safetensors           the weights at the end, under serial names
"""

from __future__ import annotations

import time
from pathlib import Path

from ganglion.config import RunFile, load_run_file, read_toml, render_run_file
from ganglion.errors import ConfigError
from ganglion.plan import Plan

RUNS = Path("runs")
RUN_FILE = "run.toml"
PLAN_FILE = "plan.json"
METRICS_FILE = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
MODEL_FILE = "model.safetensors"


def prepare_folder(file: RunFile, plan: Plan, name: str, *, resume: bool) -> Path:
    """Make the run folder, or take the one to resume, and write the resolved run into it."""
    folder = Path(file.output.dir) if file.output.dir else _new_folder(name)
    if not resume and (folder / RUN_FILE).exists():
        raise ConfigError(
            f"output.dir = {str(folder)!r} already holds a run: add --resume to continue it, or "
            f"name another folder"
        )
    try:
        for part in (folder, folder / "logs", folder / CHECKPOINTS):
            part.mkdir(parents=True, exist_ok=True)
        (folder / RUN_FILE).write_text(render_run_file(_as_resolved(file, plan, folder)), "utf-8")
        (folder / PLAN_FILE).write_text(plan.to_json(), "utf-8")
    except OSError as error:
        raise ConfigError(f"output.dir = {str(folder)!r} cannot be written: {error}") from error
    return folder


def read_folder(folder: Path) -> tuple[RunFile, Plan]:
    """Read a run's resolved file and plan back."""
    if not (folder / RUN_FILE).exists():
        raise ConfigError(f"{folder} holds no run: it has no {RUN_FILE}; check the path")
    file = load_run_file(read_toml(folder / RUN_FILE), source=str(folder / RUN_FILE))
    plan_path = folder / PLAN_FILE
    return file, Plan.from_json(plan_path.read_text(encoding="utf-8"), str(plan_path))


def newest_run() -> Path:
    """Return the run folder below `runs/` that was written to last."""
    found = [path.parent for path in RUNS.glob(f"*/{RUN_FILE}")]
    if not found:
        raise ConfigError(
            f"--resume found no run below {RUNS}/: name the folder with --output.dir DIR"
        )
    return max(found, key=lambda folder: (folder / RUN_FILE).stat().st_mtime)


def _new_folder(name: str) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = RUNS / f"{name}-{stamp}"
    suffix = 2
    while folder.exists():
        folder = RUNS / f"{name}-{stamp}-{suffix}"
        suffix += 1
    return folder


def _as_resolved(file: RunFile, plan: Plan, folder: Path) -> RunFile:
    """Fill in what was left open, so that resuming takes the same folder and the same layout."""
    output = file.output.model_copy(update={"dir": str(folder)})
    parallel = file.parallel.model_copy(update={"data": plan.data})
    return file.model_copy(update={"output": output, "parallel": parallel})
