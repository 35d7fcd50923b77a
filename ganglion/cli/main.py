"""`ganglion`: the commands, their shared options, and how errors reach the user."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

import ganglion
from ganglion.cli.environment import LOG_LEVELS, log_to_screen
from ganglion.cli.overrides import Overrides, check_taken, split_overrides
from ganglion.cli.planning import plan, why
from ganglion.errors import GanglionError

USAGE_ERROR = 2

app = typer.Typer(
    name="ganglion",
    help="Plan, predict, run and explain parallel training of PyTorch models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help answers in half the time
    pretty_exceptions_enable=False,
)


RunFileArgument = Annotated[
    Path | None, typer.Argument(metavar="[RUN.toml]", help="Run file; without: quickstart.")
]
NprocOption = Annotated[
    int | None, typer.Option(min=1, help="Local processes; without: as many as the plan needs.")
]
PlanOption = Annotated[
    Path | None,
    typer.Option(help="Use this plan.json instead of the [parallel] section; auto: plan now."),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ganglion {ganglion.__version__}")
        raise typer.Exit


def _check_level(level: str) -> str:
    if level.lower() not in LOG_LEVELS:
        raise typer.BadParameter(f"{level!r} is not one of {', '.join(LOG_LEVELS)}")
    return level.lower()


@app.callback()
def shared_options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Version.")
    ] = False,
    log_level: Annotated[
        str, typer.Option(callback=_check_level, help="debug, info, warning or error.")
    ] = "warning",
) -> None:
    """Plan, predict, run and explain parallel training of PyTorch models."""
    check_taken(context.obj["overrides"], context.invoked_subcommand)
    log_to_screen(log_level)
    context.ensure_object(dict)["log_level"] = log_level


def _overrides(context: typer.Context, transport: str | None = None) -> Overrides:
    """Return the run-file keys set on the command line, `--transport` among them."""
    given: Overrides = context.obj["overrides"]
    return given if transport is None else (*given, ("parallel.transport", transport))


@app.command()
def train(
    context: typer.Context,
    run_file: RunFileArgument = None,
    nproc: NprocOption = None,
    plan: PlanOption = None,
    transport: Annotated[
        str | None, typer.Option(help="How ranks talk: auto, shm, torch or mpi.")
    ] = None,
    cluster: Annotated[str, typer.Option(help="Cluster file or name, for --plan auto.")] = "laptop",
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the resolved run file and stop.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in output.dir, or the newest one.")
    ] = False,
) -> None:
    """Train a model. Any key of the run file can be set as --section.key VALUE."""
    from ganglion.cli.train import TrainOptions, train_command

    options = TrainOptions(
        run_file=run_file,
        nproc=nproc,
        plan_file=plan,
        print_config=print_config,
        resume=resume,
        overrides=_overrides(context, transport),
        log_level=context.obj["log_level"],
        cluster=cluster,
    )
    raise typer.Exit(train_command(options))


@app.command()
def verify(
    context: typer.Context,
    run_file: RunFileArgument = None,
    nproc: NprocOption = None,
    plan: PlanOption = None,
    transport: Annotated[str | None, typer.Option(help="How ranks talk: auto, shm, torch.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to compare after.")] = 3,
    tolerance: Annotated[
        float,
        typer.Option(min=1e-15, help="Largest difference, relative to a value (at least 0.01)."),
    ] = 1e-6,
) -> None:
    """Check that a layout gives the weights of one process. Takes --section.key VALUE as train."""
    from ganglion.cli.train import TrainOptions
    from ganglion.cli.verify import VerifyOptions, verify_command

    layout = TrainOptions(
        run_file=run_file,
        nproc=nproc,
        plan_file=plan,
        overrides=_overrides(context, transport),
        log_level=context.obj["log_level"],
    )
    options = VerifyOptions(layout=layout, steps=steps, tolerance=tolerance)
    raise typer.Exit(verify_command(options))


@app.command()
def generate(
    run_folder: Annotated[Path, typer.Argument(metavar="RUNDIR", help="Folder of a finished run.")],
    prompt: Annotated[str, typer.Option(help="How the text begins.")] = "def ",
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens to add.")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0: always the likeliest token.")
    ] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from the likeliest K; 0: all.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of the sampling.")] = 0,
) -> None:
    """Print text written by a trained model."""
    from ganglion.cli.generate import sample_text

    typer.echo(sample_text(run_folder, prompt, tokens, temperature, top_k, seed))


@app.command()
def doctor() -> None:
    """Show what this machine offers, and that two processes can really talk."""
    from ganglion.cli.doctor import doctor_command

    raise typer.Exit(doctor_command())


@app.command()
def profile(
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Ranks; by default one for each device or core.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes, in some seconds.")] = False,
    write: Annotated[
        Path | None, typer.Option(help="Write a cluster file, for --cluster of other commands.")
    ] = None,
    cluster_name: Annotated[str, typer.Option(help="The name in that file.")] = "this machine",
    from_run: Annotated[
        Path | None,
        typer.Option("--from", metavar="RUNDIR", help="Refine a file with the trace of a run."),
    ] = None,
    base: Annotated[
        str, typer.Option(help="--from: the file to refine, or a built-in one.")
    ] = "laptop",
    as_json: Annotated[bool, typer.Option("--json", help="Print figures as JSON.")] = False,
) -> None:
    """Measure this machine and write a cluster file, or refine one with what a run has shown."""
    if from_run is not None:
        from ganglion.cli.machines import refine_command

        refine_command(from_run, base, write=write, as_json=as_json)
        return
    from ganglion.cli.machines import ProfileRequest, profile_command

    request = ProfileRequest(nproc=nproc, quick=quick, write=write, name=cluster_name)
    profile_command(request, as_json=as_json)


@app.command()
def clusters(
    name: Annotated[str | None, typer.Argument(help="Print this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print figures as JSON.")] = False,
) -> None:
    """List the built-in clusters, or print the file of one."""
    from ganglion.cli.machines import clusters_command

    clusters_command(name, as_json=as_json)


@app.command()
def schedule(
    name: Annotated[
        str,
        typer.Argument(
            help="gpipe, 1f1b, interleaved, zb (zero bubble H1), zbv, axonn (message_driven), 2bw, "
            "stash, or package.module:name of your own."
        ),
    ],
    stages: Annotated[int, typer.Option(help="Pipeline stages.")] = 4,
    microbatches: Annotated[int, typer.Option(help="Microbatches of a batch.")] = 8,
    batches: Annotated[int, typer.Option(help="Batches, one after the other.")] = 1,
    forward_s: Annotated[float, typer.Option(help="Time of a forward.")] = 1.0,
    backward_s: Annotated[float, typer.Option(help="Time of a backward: inputs.")] = 1.0,
    backward_weight_s: Annotated[float, typer.Option(help="Time of a backward: weights.")] = 1.0,
    latency_s: Annotated[float, typer.Option(help="Time a message is under way.")] = 0.0,
    jitter: Annotated[float, typer.Option(help="Sigma of a log-normal factor on times.")] = 0.0,
    limit: Annotated[
        int | None,
        typer.Option(
            help="message_driven: most microbatches in flight; by default what latency and jitter "
            "need.",
        ),
    ] = None,
    extra: Annotated[int | None, typer.Option(help="two_bw: raise the cap of every stage.")] = None,
    priority: Annotated[
        str | None, typer.Option(help="message_driven: backward, forward or arrival.")
    ] = None,
    chunks: Annotated[
        int | None, typer.Option(help="interleaved: stages a rank holds; 2 by default.")
    ] = None,
    compare: Annotated[str, typer.Option(help="Other schedules, separated by commas.")] = "",
    svg: Annotated[Path | None, typer.Option(help="Draw the first schedule to this file.")] = None,
    seed: Annotated[int, typer.Option(help="Of the jitter.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print figures as JSON.")] = False,
) -> None:
    """Draw a pipeline schedule and print its costs."""
    from ganglion.cli.schedule import ScheduleRequest, schedule_command
    from ganglion.decide.costs import StageTimes
    from ganglion.decide.schedules.pipeline import ScheduleOptions

    times = StageTimes(
        forward_s=forward_s,
        backward_s=backward_s,
        weight_s=backward_weight_s,
        latency_s=latency_s,
        jitter=jitter,
    )
    request = ScheduleRequest(
        names=(name, *(other for other in compare.split(",") if other)),
        num_stages=stages,
        num_microbatches=microbatches,
        num_batches=batches,
        times=times,
        options=ScheduleOptions(limit=limit, extra=extra, priority=priority, chunks=chunks),
        seed=seed,
    )
    schedule_command(request, svg=svg, as_json=as_json)


@app.command()
def simulate(
    context: typer.Context,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="RUN.toml|plan.json|MODEL",
            help="What to run: a run file, a plan, or a model by name or as description.json.",
        ),
    ],
    cluster: Annotated[
        str, typer.Option(help="A cluster file, or a built-in one: laptop, perlmutter or summit.")
    ],
    nproc: Annotated[
        int | None,
        typer.Option(min=1, help="Processes; by default one replica, or a full cluster."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps, one after the other.")] = 3,
    trace: Annotated[
        Path | None, typer.Option(help="Write the timeline: .jsonl, .json (Perfetto), .svg, .png.")
    ] = None,
    pause: Annotated[
        list[str] | None, typer.Option(help="RANK:START:LENGTH: a rank stands still for a while.")
    ] = None,
    slow: Annotated[
        list[str] | None,
        typer.Option(
            help="RANK:FACTOR[:START:LENGTH]: a rank takes that much longer. Under averaging, its "
            "worker does, and the others as far as they wait for it."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the jitter.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print figures as JSON.")] = False,
) -> None:
    """Run a plan on a virtual cluster: step time, idle share and timeline, before any launch.

    Takes --section.key VALUE as train.
    """
    from ganglion.cli.simulate import SimulateRequest, simulate_command

    request = SimulateRequest(
        file=file,
        cluster=cluster,
        nproc=nproc,
        steps=steps,
        pauses=pause or (),
        slow=slow or (),
        seed=seed,
        overrides=_overrides(context),
    )
    simulate_command(request, trace_file=trace, as_json=as_json)


@app.command()
def memory(
    context: typer.Context,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="RUN.toml|MODEL",
            help="What to run: a run file, or a model by name or as description.json.",
        ),
    ],
    cluster: Annotated[
        str | None,
        typer.Option(help="A cluster file, or a built-in one, to show what fits."),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(min=1, help="Processes; by default one replica, or a full cluster."),
    ] = None,
    plan: PlanOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print bytes as JSON.")] = False,
) -> None:
    """Print the memory of each rank, by category. Takes --section.key VALUE as train.

    Ends with 1 if a rank needs more than the cluster's compute.memory_gib.
    """
    from ganglion.cli.memory import MemoryRequest, memory_command

    request = MemoryRequest(
        file=file,
        cluster=cluster,
        nproc=nproc,
        plan_file=plan,
        overrides=_overrides(context),
    )
    raise typer.Exit(memory_command(request, as_json=as_json))


@app.command()
def describe(
    context: typer.Context,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="SOURCE",
            help="A run file, a model by name or as description.json, package.module:function, or "
            "hf:config.json.",
        ),
    ] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Arguments of package.module:function."),
    ] = None,
    seq: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sample (function, hf:).")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option("--input", help="Shape of a sample of numbers, as 3x224x224 (function)."),
    ] = None,
    loss: Annotated[str, typer.Option(help="As model.loss (function).")] = "cross_entropy",
    write: Annotated[Path | None, typer.Option(help="Write the description to this file.")] = None,
    list_names: Annotated[bool, typer.Option("--list", help="Print the names of models.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the description, as to a file or pipe.")
    ] = False,
) -> None:
    """Describe a model in numbers: parameters, flop, kept bytes and boundaries of its blocks.

    Prints a table to a terminal, and the description as JSON elsewhere (> model.json) or with
    --json. A run file takes --section.key VALUE as train.
    """
    from ganglion.cli.describe import DescribeRequest, describe_command

    request = DescribeRequest(
        source=source,
        arguments=arguments or (),
        seq=seq,
        shape=shape,
        loss=loss,
        overrides=_overrides(context),
    )
    describe_command(request, write=write, list_names=list_names, as_json=as_json)


@app.command()
def trace(
    path: Annotated[
        Path, typer.Argument(metavar="TRACE", help="A run's folder, or a .jsonl file of events.")
    ],
    against: Annotated[
        Path | None, typer.Option(help="A measured trace to compare this prediction with.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Write it as .json (Perfetto), .svg, .png or .jsonl."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print figures as JSON.")] = False,
) -> None:
    """Explain a trace: idle time, exposed communication, links, critical path, differences."""
    from ganglion.cli.trace import trace_command

    trace_command(path, against=against, output=output, as_json=as_json)


app.command()(plan)
app.command()(why)


def main() -> None:
    """Run the command line; errors made by the user end in one line and exit code 2."""
    try:
        arguments, overrides = split_overrides(sys.argv[1:])
        if not arguments:
            check_taken(overrides, None)
        app(args=arguments, obj={"overrides": overrides})
    except GanglionError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(USAGE_ERROR)
