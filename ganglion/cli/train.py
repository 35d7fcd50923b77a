"""`ganglion train`: resolve and check without torch, then train here or in local processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import typer

from ganglion.cli.environment import cache_folder
from ganglion.cli.folder import newest_run, prepare_folder
from ganglion.cli.launch import forwarded_signals, rank_processes, start_rank_server
from ganglion.cli.summary import print_summary
from ganglion.decide.config import (
    QUICKSTART,
    RUN_FILE,
    AveragingSection,
    MemorySection,
    Override,
    ParallelSection,
    RunFile,
    check_plan,
    check_trainable,
    load_run_file,
    read_toml,
    recipe,
    render_run_file,
    resolve,
)
from ganglion.decide.costs import find_cluster
from ganglion.decide.plan import Plan
from ganglion.decide.predict import decide_activations, fit_budget
from ganglion.decide.schedules.pipeline import canonical_schedule
from ganglion.decide.topology import Launch, read_launch
from ganglion.errors import ConfigError
from ganglion.units import format_bytes, format_time

# Keys that a plan file decides: the values of the run file are not used beside it.
_DECIDED_BY_PLAN = (
    "parallel.",
    "memory.",
    "averaging.",
    "train.microbatch_size",
    "train.precision",
)
_RANK = "ganglion.cli.launch.rank_main"
AUTO = Path("auto")  # of --plan
_PLAN_FIELDS = {field.name for field in fields(Plan)}
_NOT_IN_A_PLAN = (
    *(f"parallel.{key}" for key in {*ParallelSection.model_fields} - _PLAN_FIELDS),
    *(f"averaging.{key}" for key in {*AveragingSection.model_fields} - {"method", "servers"}),
    *(f"memory.{key}" for key in {*MemorySection.model_fields} - _PLAN_FIELDS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """The options of the command line."""

    run_file: Path | None
    nproc: int | None
    plan_file: Path | None
    print_config: bool = False
    resume: bool = False
    overrides: tuple[tuple[str, str], ...]
    log_level: str
    cluster: str = "laptop"


def train_command(options: TrainOptions) -> int:
    """Train and return the exit code."""
    launch = read_launch(os.environ)
    file = read_run_file(options, launch)
    if options.print_config:
        typer.echo(render_run_file(file))
        return 0
    check_trainable(file)
    file, plan = fitted_plan(options, file, launch)
    if launch.launcher == "alone" and plan.num_ranks > 1:
        _prepare_launch(file)
    if launch.rank == 0:
        warn_of_late_gradients(file, plan)
    if launch.local_rank == 0:
        prepare_data(file)
    if launch.launcher == "alone":
        return _train_alone(options, file, plan)
    if launch.launcher == "mpiexec":
        from ganglion.cli.launch import train_as_mpi_rank

        return train_as_mpi_rank(file, plan, _name(options), launch, options)
    from ganglion.cli.launch import train_under_launcher

    return train_under_launcher(file, plan, _name(options), launch, options) or 0


def _prepare_launch(file: RunFile) -> None:
    """Start the server that imports torch for ranks, or raise LaunchError without an mpiexec."""
    if file.parallel.transport == "mpi":
        from ganglion.cli.launch import require_mpiexec

        require_mpiexec()
    else:
        start_rank_server(_RANK)


def _train_alone(options: TrainOptions, file: RunFile, plan: Plan) -> int:
    """Train in this process, or in ranks that it starts; return the exit code."""
    folder = prepare_folder(file, plan, _name(options), resume=options.resume)
    launched = (folder, plan.num_ranks, options.resume, options.log_level)
    if plan.num_ranks == 1:
        from ganglion.cli.launch import train_in_folder

        code = train_in_folder(folder, Launch(), resume=options.resume)
    elif file.parallel.transport == "mpi":
        from ganglion.cli.launch import run_under_mpiexec

        with forwarded_signals() as received:
            code = run_under_mpiexec(*launched, received)
    else:
        with forwarded_signals(find=rank_processes) as received:
            from ganglion.cli.launch import run_processes  # torch: importing it takes a while

            code = run_processes(*launched, received, module=_RANK)
    print_summary(folder, code)
    return code


def warn_of_late_gradients(file: RunFile, plan: Plan) -> None:
    """Print a warning if the schedule makes gradients late and the optimizer suffers from it."""
    optimizer, is_late = file.optimizer, canonical_schedule(plan.schedule) == "two_bw"
    if is_late and optimizer.name == "adamw" and not optimizer.error_feedback:
        typer.echo(
            'warning: parallel.schedule = "two_bw" makes every gradient one update late, and '
            'optimizer.name = "adamw" can end at a higher loss for it than under a schedule that '
            "flushes: optimizer.error_feedback = true can win a part of it back",
            err=True,
        )


def prepare_data(file: RunFile) -> None:
    """Raise DataError for missing data, and tokenize text, before any rank waits for another."""
    from ganglion.execute.data import find_idx_folder, prepare_tokens

    data = file.data
    if data.kind == "text":
        prepare_tokens(data.source, data.tokenizer, data.bpe_vocab_size, cache_folder())
    elif data.kind == "images" and data.source not in ("", "generated"):
        find_idx_folder(data.source)


def read_run_file(options: TrainOptions, launch: Launch) -> RunFile:
    """Return the run file with its overrides; that of a resumed run is in its folder."""
    overrides = [Override(key, text) for key, text in options.overrides]
    if options.resume:
        return _read_resumed(options, overrides, launch)
    if options.run_file is not None:
        return load_run_file(read_toml(options.run_file), overrides, str(options.run_file))
    return load_run_file(recipe(QUICKSTART), overrides, QUICKSTART)


def _read_resumed(options: TrainOptions, overrides: list[Override], launch: Launch) -> RunFile:
    """Return the run file of the folder to resume, or the given one, with the overrides."""
    given = read_toml(options.run_file) if options.run_file is not None else {}
    folder = _resumed_folder(options, overrides, given)
    tables = given or read_toml(folder / RUN_FILE)
    softened = [Override("train.stop_at", "0")]  # the run goes on past its last stop
    if options.nproc is not None or launch.launcher != "alone":
        softened.append(Override("parallel.data", "auto"))
    source = str(options.run_file or folder / RUN_FILE)
    base = [] if given else softened
    return load_run_file(tables, [*base, *overrides, Override("output.dir", str(folder))], source)


def _resumed_folder(
    options: TrainOptions, overrides: list[Override], given: Mapping[str, Any]
) -> Path:
    named = [o.text for o in overrides if o.key == "output.dir"]
    in_file = given.get("output", {}).get("dir", "")
    if not named and not in_file:
        return newest_run(f"{options.run_file.stem}-" if options.run_file else "")
    folder = Path(named[-1] if named else in_file)
    if not (folder / RUN_FILE).exists():
        raise ConfigError(
            f"--resume: output.dir = {str(folder)!r} holds no run; leave out --resume to start one"
        )
    return folder


def fitted_plan(
    options: TrainOptions, file: RunFile, launch: Launch, *, is_told: bool = True
) -> tuple[RunFile, Plan]:
    """Return the run and its plan, changed by its memory budget; raise if they cannot run."""
    if file.memory.device_gib == 0:
        plan = make_plan(options, file, launch)
        plan.require_built()
        return file, plan
    # A device file shows without torch that there is a GPU: its state may wait on the host.
    tier = "host" if Path("/dev/nvidiactl").exists() else "disk"
    fit = fit_budget(file, lambda run: make_plan(options, run, launch), tier=tier)
    if is_told and launch.rank == 0:
        typer.echo(fit.describe())
    return fit.run, fit.plan


def make_plan(options: TrainOptions, file: RunFile, launch: Launch) -> Plan:
    """Return the plan of the file or of `--plan`, checked against the number of processes."""
    started = options.nproc
    if launch.launcher != "alone":
        if options.nproc is not None and options.nproc != launch.num_ranks:
            raise ConfigError(
                f"--nproc {options.nproc}, but {launch.launcher} started {launch.num_ranks} "
                f"processes: leave out --nproc"
            )
        started = launch.num_ranks
    if options.plan_file is None:
        return decide_activations(file, resolve(file, started))
    _refuse_twice(options)
    if options.plan_file == AUTO:
        return _best_plan(options, file, started, is_told=launch.rank == 0)
    try:
        text = options.plan_file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--plan {options.plan_file} cannot be read: {error}") from error
    plan = Plan.from_json(text, str(options.plan_file))
    check_plan(file, plan, started)
    return decide_activations(file, plan)


def _refuse_twice(options: TrainOptions) -> None:
    """Refuse run-file keys beside --plan that the plan decides."""
    for key, _ in options.overrides:
        is_kept = options.plan_file == AUTO and key == "train.precision"
        if key.startswith(_DECIDED_BY_PLAN) and key not in _NOT_IN_A_PLAN and not is_kept:
            raise ConfigError(f"--plan and --{key} contradict each other: leave out one of them")


def _best_plan(
    options: TrainOptions, file: RunFile, num_ranks: int | None, *, is_told: bool
) -> Plan:
    """Return what the planner chooses for these processes."""
    if num_ranks is None:
        raise ConfigError("--plan auto needs the number of processes: add --nproc N")
    from ganglion.decide.planner import best_plan  # most trainings do not plan

    cluster = find_cluster(options.cluster)
    best = best_plan(file, cluster, num_ranks)
    if is_told:
        typer.echo(
            f"--plan auto: {best.layout}, {best.plan.schedule}, {best.plan.num_microbatches} x "
            f"{best.plan.microbatch_size} samples; {format_time(best.step_s)} a step and "
            f"{format_bytes(best.memory_bytes)} a rank predicted for {cluster.name}"
        )
    return best.plan


def _name(options: TrainOptions) -> str:
    return QUICKSTART if options.run_file is None else options.run_file.stem
