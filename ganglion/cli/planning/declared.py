"""The declarations of `plan` and `why`: what typer shows and parses."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_CLUSTER_HELP = "A cluster file, or the name of a built-in one: see `ganglion clusters`."


def plan(
    context: typer.Context,
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN.toml|MODEL|RUNDIR",
            help="A run file, a model by name or as description.json, or the folder of a run.",
        ),
    ],
    cluster: Annotated[str, typer.Option(help=_CLUSTER_HELP)] = "laptop",
    gpus: Annotated[
        int | None, typer.Option(help="Ranks to use; without: the whole cluster.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Samples of a step; without: train.global_batch_size.")
    ] = None,
    top: Annotated[int, typer.Option(help="Plans to simulate and show.")] = 10,
    max_staleness: Annotated[
        int | None, typer.Option(help="Most updates that a gradient may be late; 0 for none.")
    ] = None,
    fix: Annotated[
        str,
        typer.Option(
            help="Fields of the plan that are decided: pipe=6,order=pipe-data,schedule=1f1b|2bw."
        ),
    ] = "",
    method: Annotated[
        str, typer.Option(help="full, or a published planner: axonn, pipedream_2bw.")
    ] = "full",
    tokens: Annotated[
        float | None, typer.Option(help="Tokens of a training, for its days and its price.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say what limits the plan, and what would help.")
    ] = False,
    write: Annotated[Path | None, typer.Option(help="Write the best plan to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plans as JSON.")] = False,
) -> None:
    """Plan: the best layouts of a model on a cluster, with time, memory and staleness.

    Takes --section.key VALUE as train, but for what the planner decides: see --fix.
    """
    from ganglion.cli.planning.plan import PlanRequest, plan_command

    request = PlanRequest(
        source=source,
        cluster=cluster,
        gpus=gpus,
        batch=batch,
        top=top,
        max_staleness=max_staleness,
        fix=fix,
        method=method,
        tokens=tokens,
        overrides=context.obj["overrides"],
    )
    plan_command(request, as_json=as_json, explains=explain, write=write)


def why(
    context: typer.Context,
    source: Annotated[
        Path, typer.Argument(metavar="plan.json|RUNDIR", help="A plan, or the folder of a run.")
    ],
    question: Annotated[str, typer.Argument(metavar="[slow|memory]", help="What to explain.")] = "",
    model: Annotated[
        str | None, typer.Option(help="Run file or model that the plan is for.")
    ] = None,
    cluster: Annotated[str, typer.Option(help=_CLUSTER_HELP)] = "laptop",
) -> None:
    """Explain a plan or a run in sentences: what takes its time, what takes its memory."""
    from ganglion.cli.planning.why import WhyRequest, why_command

    request = WhyRequest(
        source=source,
        question=question,
        model=model,
        cluster=cluster,
        overrides=context.obj["overrides"],
    )
    why_command(request)
