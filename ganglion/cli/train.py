"""`ganglion train`: resolve and check without torch, then train here or in local processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from ganglion.cli.folder import RUN_FILE, newest_run, prepare_folder
from ganglion.cli.summary import print_summary
from ganglion.config import (
    Override,
    RunFile,
    check_plan,
    load_run_file,
    read_toml,
    render_run_file,
    resolve,
)
from ganglion.config.recipes import QUICKSTART, recipe
from ganglion.errors import ConfigError
from ganglion.plan import Plan
from ganglion.topology import Launch, read_launch


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """What the user typed."""

    run_file: Path | None
    nproc: int | None
    plan_file: Path | None
    print_config: bool
    resume: bool
    overrides: tuple[tuple[str, str], ...]
    log_level: str


def train_command(options: TrainOptions) -> int:
    """Train as the options say; return the exit code."""
    launch = read_launch(os.environ)
    file = read_run_file(options)
    if options.print_config:
        typer.echo(render_run_file(file))
        return 0
    plan = make_plan(options, file, launch)
    plan.require_built()
    if launch.launcher == "alone":
        return _train_alone(options, file, plan)
    from ganglion.cli.worker import train_under_launcher

    return train_under_launcher(file, plan, _name(options), launch, options) or 0


def _train_alone(options: TrainOptions, file: RunFile, plan: Plan) -> int:
    folder = prepare_folder(file, plan, _name(options), resume=options.resume)
    if plan.num_ranks == 1:
        from ganglion.cli.worker import train_in_folder

        code = train_in_folder(folder, Launch(), resume=options.resume)
    else:
        from ganglion.cli.launcher import run_processes

        code = run_processes(folder, plan.num_ranks, options.resume, options.log_level)
    print_summary(folder, code)
    return code


def read_run_file(options: TrainOptions) -> RunFile:
    """Return the run file with its overrides; a resumed run starts from its own."""
    overrides = [Override(key, text) for key, text in options.overrides]
    if options.run_file is not None:
        tables: Mapping[str, Any] = read_toml(options.run_file)
        source = str(options.run_file)
    elif options.resume:
        folder = _resumed_folder(overrides)
        tables, source = read_toml(folder / RUN_FILE), str(folder / RUN_FILE)
        if options.nproc is not None:  # a resumed run may change its number of replicas
            overrides.insert(0, Override("parallel.data", "auto"))
    else:
        tables, source = recipe(QUICKSTART), QUICKSTART
    return load_run_file(tables, overrides, source)


def _resumed_folder(overrides: list[Override]) -> Path:
    named = [Path(o.text) for o in overrides if o.key == "output.dir"]
    folder = named[-1] if named else newest_run()
    if not (folder / RUN_FILE).exists():
        raise ConfigError(
            f"--resume: output.dir = {str(folder)!r} holds no run; leave out --resume to start one"
        )
    return folder


def make_plan(options: TrainOptions, file: RunFile, launch: Launch) -> Plan:
    """Return the plan of the file or of `--plan`, checked against the processes there will be."""
    started = options.nproc
    if launch.launcher != "alone":
        if options.nproc is not None and options.nproc != launch.num_ranks:
            raise ConfigError(
                f"--nproc {options.nproc}, but {launch.launcher} started {launch.num_ranks} "
                f"processes: leave out --nproc"
            )
        started = launch.num_ranks
    if options.plan_file is None:
        return resolve(file, started)
    if any(key.startswith("parallel.") for key, _ in options.overrides):
        raise ConfigError("--plan and --parallel.* contradict each other: leave out one of them")
    try:
        text = options.plan_file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--plan {options.plan_file} cannot be read: {error}") from error
    plan = Plan.from_json(text, str(options.plan_file))
    check_plan(file, plan, started)
    return plan


def _name(options: TrainOptions) -> str:
    return QUICKSTART if options.run_file is None else options.run_file.stem
