"""The prediction of a run on a cluster: step time, idle share, memory by rank, and whether it fits.

run file or plan -> plan -> simulated steps
                         -> memory model    -> Prediction
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ganglion.decide.config import (
    AveragingSection,
    Override,
    RunFile,
    check_vocabulary,
    expected_shape,
    load_run_file,
    own_code_key,
    read_model,
    read_toml,
    resolve,
)
from ganglion.decide.costs import (
    CATEGORIES,
    Cluster,
    Memory,
    StateRules,
    batch_flops,
    find_cluster,
)
from ganglion.decide.plan import Plan
from ganglion.decide.predict.budget import decide_activations, fit_budget
from ganglion.decide.predict.memory import predicted_memory, server_memory, state_rules
from ganglion.decide.predict.step_time import (
    StepFigures,
    StepSetting,
    file_times,
    model_times,
    planned_times,
    predict_figures,
)
from ganglion.decide.schedules.pipeline import check_planned
from ganglion.decide.shapes import (
    GPTShape,
    ModelShape,
    is_description,
    is_model_name,
    nearest_model,
)
from ganglion.decide.simulator import TensorOverlap
from ganglion.decide.topology import Mesh
from ganglion.errors import ConfigError, LayoutError
from ganglion.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """Ranks that hold the same, their pipe coordinates, and bytes by category."""

    ranks: list[int]
    pipe: list[int]
    bytes: dict[str, int]
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFigures:
    """The memory of the ranks of a plan; `fits` is None without a budget."""

    schedule: str
    num_ranks: int
    recompute: str
    precision: str
    budget_key: str | None
    budget_bytes: int | None
    fits: bool | None
    rows: list[MemoryRow]

    @property
    def worst(self) -> MemoryRow:
        """The row that needs most."""
        return max(self.rows, key=lambda row: row.total_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A plan, the time of its steps, and the memory of its ranks.

    `memory` is None where the size of the model is not known: of a plan without a run file, and of
    models and data sets of your own; so are the shares of the cluster's peak. `peak_share` counts
    the forward that a plan computes again, as papers do; `model_peak_share` does not.
    """

    plan: Plan
    step: StepFigures
    memory: MemoryFigures | None
    peak_share: float | None = None
    model_peak_share: float | None = None

    @property
    def step_s(self) -> float:
        """Seconds from the end of one step to the end of the next."""
        return self.step.step_s

    @property
    def idle_share(self) -> float:
        """Share of the time in which ranks do not compute, in the mean of all."""
        return self.step.bubble

    @property
    def exposed_s(self) -> float:
        """Seconds of a step in which a rank waits for communication, in the mean of pipe ranks."""
        return self.step.exposed_s

    @property
    def memory_by_rank(self) -> list[dict[str, int]] | None:
        """Bytes by category of every rank; servers of elastic averaging come last."""
        if self.memory is None:
            return None
        by_rank = {rank: row.bytes for row in self.memory.rows for rank in row.ranks}
        return [by_rank[rank] for rank in range(self.plan.num_ranks)]

    @property
    def fits(self) -> bool | None:
        """Whether every rank fits into its memory; None if either is not known."""
        return None if self.memory is None else self.memory.fits


def predict(
    source: str | Path | RunFile | Plan,
    *,
    cluster: str | Path | Cluster,
    nproc: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    steps: int = 3,
    seed: int = 0,
) -> Prediction:
    """Predict a run on a cluster, without torch and without launching anything.

    `source` is a run file or a plan, as a path or as a record, or a model: the path of its
    description, or its name; `cluster` is a cluster file or the
    name of a built-in one. `nproc` is the number of processes: by default one replica, or a full
    cluster. `overrides` sets keys of a run file, as in `{"parallel.pipe": 4}`. `steps` are
    simulated; `seed` decides their jitter. A run with `memory.device_gib` is fitted to it first.
    """
    on = cluster if isinstance(cluster, Cluster) else find_cluster(str(cluster))
    given = [Override(key, _as_text(value)) for key, value in (overrides or {}).items()]
    name = "the plan" if isinstance(source, Plan) else "the run file"
    if isinstance(source, str | Path):
        source, name = read_source(Path(source), given), str(source)
    elif given:
        raise ConfigError("overrides need the path of a run file: change the record itself instead")
    run, plan = planned_run(source, on, nproc, name)
    plan.require_built()
    averaging = AveragingSection() if run is None else run.averaging
    setting = StepSetting(num_steps=steps, seed=seed, averaging=averaging)
    step = predict_figures(plan, planned_times(plan, on, run, name), on, setting)
    if run is None or own_code_key(run) is not None:
        return Prediction(plan=plan, step=step, memory=None)
    shares = _peak_shares(expected_shape(run), plan, on, step.step_s)
    return Prediction(plan=plan, step=step, memory=predict_memory(run, plan, on), **shares)


def predict_layout(
    shape: ModelShape,
    plan: Plan,
    cluster: Cluster,
    *,
    rules: StateRules | None = None,
    num_steps: int = 3,
    seed: int = 0,
    overlap: TensorOverlap | None = None,
) -> Prediction:
    """Predict a plan for a model on a cluster, without a run file.

    `rules` say how the optimizer keeps parameters, by default AdamW. `num_steps` are simulated;
    `seed` decides their jitter. `overlap` says which collectives of split layers overlap with
    computation, where that is not what the plan says. Times come from [stages] of the cluster
    file, if it has them.
    """
    plan.require_built()
    check_planned(plan)
    in_file = cluster.stages is not None
    times = file_times(plan, cluster) if in_file else model_times(shape, plan, cluster, overlap)
    step = predict_figures(plan, times, cluster, StepSetting(num_steps=num_steps, seed=seed))
    memory = shape_memory(shape, plan, rules or StateRules(), _device_budget(cluster))
    return Prediction(
        plan=plan, step=step, memory=memory, **_peak_shares(shape, plan, cluster, step.step_s)
    )


def _peak_shares(
    shape: ModelShape, plan: Plan, cluster: Cluster, step_s: float
) -> dict[str, float]:
    """Return both shares of the peak, where the peak is known."""
    if cluster.compute is None:
        return {}
    flops = batch_flops(shape, plan)
    possible = step_s * plan.mesh().num_ranks * cluster.compute.peak_flops(plan.computes_in)
    return {"peak_share": flops.hardware / possible, "model_peak_share": flops.model / possible}


def _as_text(value: Any) -> str:
    """Return a value as the command line has it."""
    return value if isinstance(value, str) else json.dumps(value)


def read_source(path: Path, overrides: Iterable[Override] = ()) -> RunFile | Plan:
    """Read a run file, a plan, a model description, or the name of a model, with overrides.

    A .json file is a plan or a description. A model alone gives a run file with default sections
    and `model.description`.
    """
    text = str(path)
    if path.suffix == ".json":
        return _read_record(path, overrides)
    if is_model_name(text) and not path.exists():
        return _described_run(text, overrides)
    if path.suffix != ".toml" and not path.exists():
        raise ConfigError(
            f"{text!r} is neither a file nor the name of a model: {nearest_model(text)}"
        )
    return load_run_file(read_toml(path), overrides, text)


def _read_record(path: Path, overrides: Iterable[Override]) -> RunFile | Plan:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if is_description(text):
        return _described_run(str(path), overrides)
    for override in overrides:
        raise ConfigError(
            f"--{override.key} is a key of a run file, but {path} is a plan: leave it out, or give "
            f"the run file instead"
        )
    return Plan.from_json(text, str(path))


def _described_run(source: str, overrides: Iterable[Override]) -> RunFile:
    """Return a run of a described model; its samples are as long as the description says."""
    given = list(overrides)
    for override in given:
        if override.key.startswith("model."):
            raise ConfigError(
                f"--{override.key} changes nothing of {source}, which is a whole model: name "
                f"another one, as in gpt:layers=24,hidden=1024,heads=16, or give a run file"
            )
    data = {"kind": "synthetic", "seq_len": read_model(source).tokens}
    return load_run_file({"model": {"description": source}, "data": data}, given, source)


def planned_run(
    source: RunFile | Plan,
    cluster: Cluster,
    nproc: int | None,
    name: str,
    *,
    fits_budget: bool = True,
) -> tuple[RunFile | None, Plan]:
    """Return the run, None of a plan, and its checked plan; `name` is that of the source.

    With `fits_budget` the settings that memory.device_gib leaves open are chosen to fit.
    """
    if isinstance(source, Plan):
        if nproc not in (None, source.num_ranks):
            raise LayoutError(
                f"--nproc {nproc}, but {name} needs {source.num_ranks} processes: leave out --nproc"
            )
        check_planned(source)
        return None, source
    num_processes = nproc or num_cluster_ranks(source, cluster)

    def make_plan(run: RunFile) -> Plan:
        return decide_activations(run, resolve(run, num_processes))

    if source.memory.device_gib == 0 or not fits_budget:
        return source, make_plan(source)
    fit = fit_budget(source, make_plan)
    return fit.run, fit.plan


def num_cluster_ranks(run: RunFile, cluster: Cluster) -> int | None:
    """Return the ranks of a cluster of known size, which a plan must fill; else None."""
    if cluster.num_nodes is None:
        return None
    num_ranks = cluster.num_nodes * cluster.ranks_per_node - run.averaging.servers
    parallel = run.parallel
    needed = parallel.pipe * parallel.x * parallel.y * parallel.z
    if parallel.data != "auto":
        needed *= parallel.data
    if needed > num_ranks or num_ranks % needed:
        raise LayoutError(
            f"{cluster.source} has cluster.num_nodes * ranks_per_node = {cluster.num_nodes} * "
            f"{cluster.ranks_per_node} = {num_ranks} ranks, which layouts of {needed} ranks "
            f"(parallel.data * pipe * x * y * z) do not fill: change either"
        )
    return num_ranks + run.averaging.servers if parallel.data == "auto" else None


# --- memory --------------------------------------------------------------------------------------


def predict_memory(run: RunFile, plan: Plan, cluster: Cluster | None = None) -> MemoryFigures:
    """Return the memory of a built-in model's ranks, with the budget of the run or cluster."""
    return shape_memory(expected_shape(run), plan, state_rules(run), _budget(run, cluster))


_Budget = tuple[str, int] | None  # the key that limits the memory of a rank, and its bytes


def shape_memory(
    shape: ModelShape, plan: Plan, rules: StateRules, budget: _Budget = None
) -> MemoryFigures:
    """Return the memory of a model's ranks, and whether they fit a budget if there is one."""
    if isinstance(shape, GPTShape):
        check_vocabulary(shape.vocab_size, plan)
    rows = _rows(shape, plan, rules)
    worst = max(row.total_bytes for row in rows)
    return MemoryFigures(
        schedule=plan.schedule,
        num_ranks=plan.num_ranks,
        recompute=plan.recompute,
        precision=plan.precision,
        budget_key=None if budget is None else budget[0],
        budget_bytes=None if budget is None else budget[1],
        fits=None if budget is None else worst <= budget[1],
        rows=rows,
    )


def _budget(run: RunFile, cluster: Cluster | None) -> _Budget:
    if run.memory.device_gib > 0:
        return "device_gib", round(run.memory.device_gib * GIB)
    return None if cluster is None else _device_budget(cluster)


def _device_budget(cluster: Cluster) -> _Budget:
    if cluster.compute is None:
        return None
    return "memory_gib", round(cluster.compute.memory_gib * GIB)


def _rows(shape: ModelShape, plan: Plan, rules: StateRules) -> list[MemoryRow]:
    """Return a row for every different memory, in the order of the pipeline; servers come last.

    Only the first worker of elastic averaging may differ from the others: it may serve their
    centre.
    """
    num_kinds = min(2, plan.data) if plan.averages else 1
    kinds = [predicted_memory(shape, plan, rules, worker) for worker in range(num_kinds)]
    order = list(dict.fromkeys(memory for kind in kinds for memory in kind))
    number = {memory: place for place, memory in enumerate(order)}
    mesh = plan.mesh()
    pipes = _digits(mesh, "pipe")
    workers = _digits(mesh, "data") if num_kinds > 1 else [0] * mesh.num_ranks
    held = [[number[memory] for memory in kind] for kind in kinds]
    ranks: list[list[int]] = [[] for _ in order]
    for rank, (worker, pipe) in enumerate(zip(workers, pipes, strict=True)):
        ranks[held[min(worker, num_kinds - 1)][pipe]].append(rank)
    rows = [_row(memory, mine, pipes) for memory, mine in zip(order, ranks, strict=True)]
    if plan.servers:
        servers = list(range(mesh.num_ranks, plan.num_ranks))
        rows.append(_row(server_memory(shape, plan, rules), servers, ()))
    return rows


def _digits(mesh: Mesh, axis: str) -> list[int]:
    """Return the coordinate of every rank along an axis."""
    inner = mesh.rank_order[: mesh.rank_order.index(axis)]
    stride, size = math.prod(mesh.size(one) for one in inner), mesh.size(axis)
    return [rank // stride % size for rank in range(mesh.num_ranks)]


def _row(memory: Memory, ranks: list[int], pipes: Sequence[int]) -> MemoryRow:
    """Return the row of ranks; those beyond `pipes` are in no pipeline."""
    return MemoryRow(
        ranks=ranks,
        pipe=sorted({pipes[rank] for rank in ranks if rank < len(pipes)}),
        bytes={name: getattr(memory, name) for name in CATEGORIES},
        total_bytes=memory.total,
    )
