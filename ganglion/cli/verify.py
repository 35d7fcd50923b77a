"""`ganglion verify`: the same few steps on a layout and on one process, compared by parameter.

Both are computed in fp64, where the order of a sum moves a weight by about 1e-15 and an error in a
gradient moves it by as much as a step does.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ganglion.cli.folder import prepare_folder
from ganglion.cli.launch import forwarded_signals, rank_processes, start_rank_server
from ganglion.cli.train import TrainOptions, make_plan, prepare_data, read_run_file
from ganglion.decide.config import RunFile, check_trainable
from ganglion.decide.plan import Plan
from ganglion.decide.schedules.pipeline import planned_schedule
from ganglion.decide.topology import Launch, read_launch
from ganglion.errors import ConfigError

if TYPE_CHECKING:
    from ganglion.execute.checkpoint import Difference

_RANK = "ganglion.cli.launch.verify_rank"
_FAILED = 1
_STOPPING = "\nstopping"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """The options of the command line; `layout` holds those of `train`."""

    layout: TrainOptions
    steps: int
    tolerance: float


def verify_command(options: VerifyOptions) -> int:
    """Train twice and compare; return 0 if every parameter is the same, else 1."""
    launch = read_launch(os.environ)
    file = _shortened(read_run_file(options.layout, launch), options.steps)
    check_trainable(file)
    plan = make_plan(options.layout, file, launch)
    plan = replace(plan, precision="fp32", compute_fp32=False)
    plan.require_built()
    _check(file, plan, launch)
    serial = serial_plan(plan)
    prepare_data(file)
    folder, code = Path(tempfile.mkdtemp(prefix="ganglion-verify-")), _FAILED
    try:
        code = _train_both(file, {"layout": plan, "serial": serial}, folder, options)
        return code or _compare(folder, options)
    finally:
        if code != _FAILED:  # after a failure the logs are kept
            shutil.rmtree(folder)


def serial_plan(plan: Plan) -> Plan:
    """Return the plan of one process that must give the same weights as `plan`."""
    late = {planned_schedule(plan, rank).staleness for rank in range(plan.pipe)}
    if not late <= {0, 1} or len(late) > 1:
        raise ConfigError(
            f'parallel.schedule = "{plan.schedule}" has stages whose gradients are late by '
            f"{sorted(late)} updates, which no training on one process is: verify the layout with "
            f'--parallel.schedule 1f1b or "two_bw"'
        )
    return Plan(
        schedule="two_bw" if late == {1} else "one_f_one_b",
        # As large as those of the layout: dropout and batch norms depend on it.
        microbatch_size=plan.microbatch_size,
        num_microbatches=plan.num_microbatches * plan.num_shares,
        recompute=plan.recompute,
        recompute_every=plan.recompute_every,
        recompute_blocks=plan.recompute_blocks,
        activation_mib=plan.activation_mib,
    )


def _check(file: RunFile, plan: Plan, launch: Launch) -> None:
    if launch.launcher != "alone":
        raise ConfigError(
            f"verify starts its processes itself, but {launch.launcher} started this one: call "
            f"`ganglion verify` directly"
        )
    if plan.num_ranks == 1:
        raise ConfigError(
            "the layout is one process, so there is nothing to compare it with: add --nproc 2, "
            "--parallel.pipe 2 or --parallel.x 2"
        )
    if file.parallel.transport == "mpi":
        raise ConfigError(
            'verify does not start mpiexec: parallel.transport = "mpi" cannot be verified; add '
            "--transport shm or torch"
        )
    if plan.averages:
        raise ConfigError(
            f'averaging.method = "{plan.averaging}" trains {plan.data} models, which no training '
            f"on one process is: add --averaging.method none"
        )
    if file.optimizer.name == "muon":
        raise ConfigError(
            'optimizer.name = "muon" rounds to bf16 inside, which hides errors of a layout: add '
            "--optimizer.name adamw"
        )


def _shortened(file: RunFile, steps: int) -> RunFile:
    """Return the run file for some steps at the beginning of its run, learning rates included."""
    train = {"stop_at": steps, "steps": max(steps, file.train.steps), "precision": "fp32"}
    changes = {
        "train": file.train.model_copy(update=train),
        "memory": file.memory.model_copy(update={"compute_fp32": False}),
        "trace": file.trace.model_copy(update={"enabled": False}),
    }
    return file.model_copy(update=changes)


def _train_both(file: RunFile, plans: dict[str, Plan], folder: Path, options: VerifyOptions) -> int:
    start_rank_server(_RANK)
    with forwarded_signals(_STOPPING, rank_processes) as received:
        from ganglion.cli.launch import run_processes  # torch: importing it takes a while

        for name, plan in plans.items():
            typer.echo(f"{options.steps} steps in fp64 on {_described(plan)}")
            output = file.output.model_copy(update={"dir": str(folder / name)})
            place = file.model_copy(update={"output": output})
            here = prepare_folder(place, plan, name, resume=False)
            level = options.layout.log_level
            code = run_processes(here, plan.num_ranks, False, level, received, module=_RANK)
            if code:
                return code
    return 0


def _described(plan: Plan) -> str:
    if plan.num_ranks == 1:
        return "1 process"
    axes = (f"{axis}={size}" for axis, size in plan.mesh().sizes().items() if size > 1)
    return f"{plan.num_ranks} processes ({' x '.join(axes)})"


def _compare(folder: Path, options: VerifyOptions) -> int:
    from ganglion.execute.checkpoint import compare_folders, formula

    found = compare_folders(folder / "layout", folder / "serial", options.tolerance)
    _print_table(found)
    wrong = [difference for difference in found if not difference.is_small]
    within = f"{formula(options.tolerance)} of one process after {options.steps} steps"
    if not wrong:
        typer.echo(f"equal: all {len(found)} are within {within}")
        return 0
    worst = max(wrong, key=lambda difference: difference.of_tolerance)
    typer.echo(
        f"DIFFERENT: {len(wrong)} of {len(found)} are not within {within}; the farthest is "
        f"{worst.name}, {worst.of_tolerance:.1e} times the tolerance"
    )
    return _FAILED


def _print_table(found: Sequence[Difference]) -> None:
    width = max(len(difference.name) for difference in found)
    typer.echo(f"\n{'':{width}}  largest difference  of the tolerance")
    for difference in found:
        mark = "" if difference.is_small else "  DIFFERENT"
        typer.echo(
            f"{difference.name:{width}}  {difference.largest:18.1e}  "
            f"{difference.of_tolerance:16.1e}{mark}"
        )
    typer.echo()
