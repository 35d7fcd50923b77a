"""The run folder: prepared before ranks start, and unchanged by a resume that is refused.

A resumed run may change its settings. They are written as `run.toml.next` and `plan.json.next` and
get their final names only when the checkpoint has accepted them.
"""

from __future__ import annotations

import time
from pathlib import Path

from ganglion.decide.config import (
    CHECKPOINTS,
    LOGS,
    METRICS_FILE,
    PLAN_FILE,
    RUN_FILE,
    RUNS,
    RunFile,
    load_run_file,
    read_toml,
    render_run_file,
)
from ganglion.decide.plan import Plan
from ganglion.errors import ConfigError
from ganglion.execute.checkpoint import latest_checkpoint

_NEXT = ".next"


def prepare_folder(file: RunFile, plan: Plan, name: str, *, resume: bool) -> Path:
    """Create the run folder, or reuse the one to resume, and write the resolved run into it."""
    folder = Path(file.output.dir) if file.output.dir else _new_folder(name)
    if not resume and _has_results(folder):
        raise ConfigError(
            f"output.dir = {str(folder)!r} already holds a run: add --resume to continue it, or "
            f"name another folder"
        )
    ending = _NEXT if resume else ""
    try:
        for part in (folder, folder / LOGS, folder / CHECKPOINTS):
            part.mkdir(parents=True, exist_ok=True)
        text = render_run_file(_as_resolved(file, plan, folder))
        (folder / (RUN_FILE + ending)).write_text(text, "utf-8")
        (folder / (PLAN_FILE + ending)).write_text(plan.to_json(), "utf-8")
    except OSError as error:
        raise ConfigError(f"output.dir = {str(folder)!r} cannot be written: {error}") from error
    return folder


def accept_resumed(folder: Path) -> None:
    """Give the settings of a resumed run their final names."""
    for name in (RUN_FILE, PLAN_FILE):
        (folder / (name + _NEXT)).replace(folder / name)


def read_folder(folder: Path, *, resumed: bool = False) -> tuple[RunFile, Plan]:
    """Return the resolved run file and plan of a folder; `resumed`: those not accepted yet."""
    ending = _NEXT if resumed else ""
    run_path, plan_path = (folder / (name + ending) for name in (RUN_FILE, PLAN_FILE))
    if not run_path.exists():
        raise ConfigError(f"{folder} holds no run: it has no {run_path.name}; check the path")
    file = load_run_file(read_toml(run_path), source=str(run_path))
    return file, Plan.from_json(plan_path.read_text(encoding="utf-8"), str(plan_path))


def newest_run(name: str = "") -> Path:
    """Return the run below `runs/` with the newest checkpoint whose name begins with `name`."""
    folders = [path.parent for path in Path(RUNS).glob(f"{name}*/{RUN_FILE}")]
    newest = {f: p for f in folders if (p := latest_checkpoint(f / CHECKPOINTS)) is not None}
    if not newest:
        raise ConfigError(
            f"--resume found no run with a checkpoint below {RUNS}/: name the folder with "
            f"--output.dir DIR"
        )
    return max(newest, key=lambda folder: newest[folder].stat().st_mtime)


def _has_results(folder: Path) -> bool:
    metrics = folder / METRICS_FILE
    trained = metrics.exists() and metrics.stat().st_size > 0
    return trained or latest_checkpoint(folder / CHECKPOINTS) is not None


def _new_folder(name: str) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = Path(RUNS) / f"{name}-{stamp}"
    suffix = 2
    while folder.exists():
        folder = Path(RUNS) / f"{name}-{stamp}-{suffix}"
        suffix += 1
    return folder


def _as_resolved(file: RunFile, plan: Plan, folder: Path) -> RunFile:
    """Return the file with every decision of the plan, so that it alone gives the same run."""
    changes: dict[str, dict[str, object]] = {
        "parallel": {
            **plan.mesh().sizes(),
            "schedule": plan.schedule,
            "limit": plan.limit,
            "extra": plan.extra,
            "chunks": plan.chunks,
            "priority": plan.priority,
            "stage_boundaries": list(plan.stage_boundaries),
            "rank_order": list(plan.rank_order),
        },
        "train": {"microbatch_size": plan.microbatch_size, "precision": plan.precision},
        "memory": {
            "recompute": plan.recompute,
            "recompute_every": plan.recompute_every,
            "recompute_blocks": list(plan.recompute_blocks),
            "activation_mib": plan.activation_mib,
            "compute_fp32": plan.compute_fp32,
            "offload": plan.offload,
            "offload_activations": plan.offload_activations,
        },
        "averaging": {"method": plan.averaging, "servers": plan.servers},
        "output": {"dir": str(folder)},
    }
    sections = {
        name: getattr(file, name).model_copy(update=values) for name, values in changes.items()
    }
    return file.model_copy(update=sections)
