"""From a run file, a model description or a name to a question, and to its answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ganglion.decide.config import Override, RunFile, check_plan, expected_shape, own_code_key
from ganglion.decide.costs import Cluster, find_cluster
from ganglion.decide.plan import Plan
from ganglion.decide.planner.answer import Answer, PlannedLayout
from ganglion.decide.planner.methods import METHODS
from ganglion.decide.planner.question import Fixed, Question, device_bytes, parse_fixed
from ganglion.decide.planner.search import NUM_CONFIRMED, Check, search
from ganglion.decide.predict import read_source, state_rules
from ganglion.decide.shapes import describe_shape
from ganglion.errors import ConfigError, LayoutError
from ganglion.units import GIB

_FEW = 3  # plans that a quick answer simulates


def plan(
    source: str | Path | RunFile,
    *,
    cluster: str | Path | Cluster,
    gpus: int | None = None,
    batch: int | None = None,
    fix: str | Fixed = "",
    max_staleness: int | None = None,
    method: str = "full",
    top: int = NUM_CONFIRMED,
    overrides: Mapping[str, Any] | None = None,
) -> Answer:
    """Return the best layouts of a model on a cluster, without torch and without a launch.

    `source` is a run file, a model description or the name of a model; `cluster` a cluster file or
    the name of a built-in one. `gpus` are the ranks to use (by default the whole cluster), `batch`
    the samples of a step. `fix` pins fields of the plan, as in "pipe=6,schedule=1f1b|2bw".
    `method` is "full", or that of a paper: "axonn", "pipedream_2bw". `top` plans are returned.
    """
    run = read_run(source, overrides or {})
    question = question_of(
        run, str(source), cluster, gpus=gpus, batch=batch, fix=fix, max_staleness=max_staleness
    )
    return answer_of(question, run, method=method, top=top)


def read_run(source: str | Path | RunFile, overrides: Mapping[str, Any]) -> RunFile:
    """Return the run of a source; refuse a plan, and keys that the planner decides."""
    if isinstance(source, RunFile):
        return source
    for key in overrides:
        if key.startswith(("parallel.", "memory.")):
            name = key.partition(".")[2]
            raise ConfigError(
                f"--{key} is what the planner decides: write --fix {name}=VALUE to decide it "
                f"yourself"
            )
    given = [
        Override(key, value if isinstance(value, str) else json.dumps(value))
        for key, value in overrides.items()
    ]
    found = read_source(Path(source), given)
    if isinstance(found, Plan):
        raise ConfigError(
            f"{source} is a plan already, which does not name a model: give the run file or a "
            f"model, and pin the plan's fields with --fix"
        )
    return found


def question_of(
    run: RunFile,
    name: str,
    cluster: str | Path | Cluster,
    *,
    gpus: int | None = None,
    batch: int | None = None,
    fix: str | Fixed = "",
    max_staleness: int | None = None,
) -> Question:
    """Return the question that a run file asks of a cluster."""
    key = own_code_key(run)
    if key is not None:
        raise ConfigError(
            f"{name}: {key} is code of your own, whose cost is not known: write model.description "
            f'= "model.json", made by `ganglion describe`'
        )
    on = cluster if isinstance(cluster, Cluster) else find_cluster(str(cluster))
    shape = describe_shape(expected_shape(run))
    fixed = dict(parse_fixed(fix) if isinstance(fix, str) else fix)
    if "precision" in run.train.model_fields_set:
        fixed.setdefault("precision", (run.train.precision,))
    return Question(
        shape=shape,
        name=name,
        cluster=on,
        num_ranks=_num_ranks(on) if gpus is None else gpus,
        global_batch_size=run.train.global_batch_size if batch is None else batch,
        memory_bytes=round(run.memory.device_gib * GIB) or device_bytes(on),
        rules=state_rules(run),
        fixed=fixed,
        max_staleness=max_staleness,
        sample_tokens=shape.tokens,
    )


def answer_of(
    question: Question, run: RunFile | None = None, *, method: str = "full", top: int = 10
) -> Answer:
    """Return the answer to a question by one of the methods; `run` may refuse plans."""
    if method not in METHODS:
        raise ConfigError(f"--method {method!r} is not one of {list(METHODS)}: choose one of them")
    if top < 1:
        raise LayoutError(f"--top {top}: ask for at least 1 plan")
    return METHODS[method](question, top, _check(question, run))


def quick_answer(question: Question, run: RunFile | None = None) -> Answer:
    """Return an answer with few plans confirmed, for questions that are asked by the dozen."""
    return search(question, num_confirmed=_FEW, check=_check(question, run))


def best_plan(run: RunFile, cluster: Cluster, num_ranks: int) -> PlannedLayout:
    """Return the best plan of a run on so many ranks; gradients are never late."""
    one_node = replace(cluster, num_nodes=None, ranks_per_node=max(cluster.ranks_per_node, 1))
    question = question_of(run, "the run", one_node, gpus=num_ranks, max_staleness=0)
    precision = {"precision": (run.train.precision,)}
    question = replace(question, fixed={**question.fixed, **precision})
    return answer_of(question, run, top=1).best


def _check(question: Question, run: RunFile | None) -> Check:
    """Return the checks that a run file makes of a plan."""
    if run is None:
        return lambda plan: None
    train = run.train.model_copy(update={"global_batch_size": question.global_batch_size})
    asked = run.model_copy(update={"train": train})
    return lambda plan: check_plan(asked, plan, None)


def _num_ranks(cluster: Cluster) -> int:
    if cluster.num_nodes is None:
        raise LayoutError(
            f"{cluster.source} has no cluster.num_nodes, so its size is open: write --gpus N"
        )
    return cluster.num_nodes * cluster.ranks_per_node
