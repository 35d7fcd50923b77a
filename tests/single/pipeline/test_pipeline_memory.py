"""What a pipeline holds: live microbatches and weight versions as declared, and no growth."""

from __future__ import annotations

import gc
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ganglion import Plan, RunSettings, parallelize
from ganglion.decide.schedules.pipeline import planned_schedule
from ganglion.decide.schedules.pipeline.action import Action
from ganglion.execute.comm import World, run_threads
from ganglion.execute.pipeline import Stage
from ganglion.execute.pipeline.pipeline_executor import PipelineExecutor
from ganglion.execute.train import Run
from ganglion.execute.train.settings import ActivationSettings
from tests.support.serial import Batch
from tests.support.training import OPTIMIZERS

LISTED = ("gpipe", "one_f_one_b", "interleaved", "zero_bubble", "zero_bubble_v")
SCHEDULES = (*LISTED, "message_driven", "two_bw", "stash")
WIDTHS = (23, 29, 31, 37, 41, 43, 19)  # odd sizes: nothing else is as large as a version


@pytest.fixture(scope="module", autouse=True)
def _only_what_is_new() -> Iterator[None]:
    """Hide from the collector what lives already: to go through all of torch takes a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def blocks() -> list[nn.Module]:
    return [nn.Linear(*pair) for pair in itertools.pairwise(WIDTHS)]


def batches(plan: Plan, count: int) -> list[Batch]:
    size = plan.share_size
    return [(torch.ones(size, WIDTHS[0]), torch.zeros(size, WIDTHS[-1])) for _ in range(count)]


def run_of(world: World, plan: Plan) -> Run:
    return parallelize(
        blocks(),
        F.mse_loss,
        OPTIMIZERS["adamw"],
        replace(plan, bucket_mib=1e-4),
        RunSettings(activations=ActivationSettings(min_bytes=0)),
        world=world,
    )


def stages_of(run: Run) -> list[Stage]:
    executor = run._parts.executor
    assert isinstance(executor, PipelineExecutor)
    return [part.stage for part in executor._parts.values()]


# --- live microbatches ---------------------------------------------------------------------------


def peak_live(world: World, plan: Plan, num_steps: int) -> int:
    """Train, and return the most stages x microbatches that this rank had in flight at once."""
    run, peak = run_of(world, plan), 0
    stages = stages_of(run)

    def watched(forward: Callable[[int, Tensor], Tensor | None]) -> Callable[..., Tensor | None]:
        def count(microbatch: int, hidden: Tensor) -> Tensor | None:
            nonlocal peak
            output = forward(microbatch, hidden)
            peak = max(peak, sum(stage.num_in_flight for stage in stages))
            return output

        return count

    for stage in stages:
        stage.forward = watched(stage.forward)  # type: ignore[method-assign]
    with run:
        list(run.steps(batches(plan, num_steps)))
    assert sum(stage.num_in_flight for stage in stages) == 0
    return peak


@pytest.mark.parametrize("pipe", [2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_live_microbatches_are_as_the_schedule_declares(schedule: str, pipe: int) -> None:
    m = 3 * pipe
    plan = Plan(pipe=pipe, schedule=schedule, num_microbatches=m)
    peaks = run_threads(plan.mesh(), lambda world: peak_live(world, plan, 3))
    for rank, peak in enumerate(peaks):
        declared = planned_schedule(plan, rank)
        bound = declared.live_bound
        allowed = m * len(declared.stage_map.stages_of(rank)) if bound is None else bound
        assert 1 <= peak <= allowed
        if schedule in ("gpipe", "one_f_one_b", "interleaved"):
            assert peak == allowed, "a listed schedule reaches what it declares"


# --- weight versions -----------------------------------------------------------------------------


def flat_bytes(stage: Stage) -> int:
    return sum(p.nbytes for block in stage.blocks for p in block.parameters())


def storages(num_bytes: int) -> int:
    """Count the pieces of memory of this size that any tensor of the process lives in."""
    pieces = set()
    for thing in gc.get_objects():
        # By type: to ask some objects of torch for their class is deprecated.
        if issubclass(type(thing), Tensor) and thing.untyped_storage().nbytes() == num_bytes:
            pieces.add(thing.untyped_storage().data_ptr())
    return len(pieces)


@pytest.mark.parametrize(("schedule", "m"), [("two_bw", 3), ("two_bw", 6), ("stash", 1)])
def test_as_many_versions_live_as_declared_and_not_one_more(schedule: str, m: int) -> None:
    """Every parameter is seen at as many addresses as versions, and no other copy is alive."""
    plan = Plan(pipe=3, schedule=schedule, num_microbatches=m, stage_boundaries=(1, 3))
    addresses: dict[int, set[int]] = {stage: set() for stage in range(3)}

    def body(world: World) -> Run:
        run = run_of(world, plan)
        (stage,) = stages_of(run)
        weight = stage.blocks[0].weight

        def look(*arguments: object) -> None:
            addresses[stage.number].add(weight.data_ptr())

        stage.blocks[0].register_forward_pre_hook(look)
        weight.register_hook(look)  # in backward
        list(run.steps(batches(plan, 12)))
        return run

    runs = run_threads(plan.mesh(), body)
    gc.collect()
    for rank, run in enumerate(runs):
        declared = planned_schedule(plan, rank)
        declared.admit(m)
        expected = max(2, declared.version_bound)
        (stage,) = stages_of(run)
        assert len(addresses[stage.number]) == expected
        assert storages(flat_bytes(stage)) == expected
    for run in runs:
        run.close()  # or their parameters live on, held by hooks, and the next test counts them


def test_the_sizes_that_are_counted_are_those_of_versions_alone() -> None:
    sizes = [sum(p.nbytes for p in block.parameters()) for block in blocks()]
    cuts = [sizes[:1], sizes[1:3], sizes[3:]]
    flats = [sum(part) for part in cuts]
    single = {p.nbytes for block in blocks() for p in block.parameters()}
    assert len(set(flats)) == 3 and not single & set(flats)


# --- growth --------------------------------------------------------------------------------------


def census() -> Counter[str]:
    """Count everything the collector knows, by type; actions are interned, up to a bound."""
    gc.collect()
    kinds = (type(thing) for thing in gc.get_objects())
    return Counter(kind.__qualname__ for kind in kinds if kind is not Action)


WARM_UP, MORE = 10, 30


def counted(plan: Plan) -> list[Counter[str]]:
    """Count after some steps and twice after `MORE` of them, while all ranks wait."""
    counts: list[Counter[str]] = []
    gate = threading.Barrier(plan.num_ranks)

    def body(world: World) -> None:
        with run_of(world, plan) as run:
            for num_steps in (WARM_UP, MORE, MORE):
                for _ in run.steps(batches(plan, 1)[0] for _ in range(num_steps)):
                    pass
                if gate.wait(timeout=60) == 0:
                    counts.append(census())
                gate.wait(timeout=60)

    run_threads(plan.mesh(), body)
    return counts


def growth(counts: list[Counter[str]]) -> Counter[str]:
    """Return what grew each time: threads and caches of the interpreter grow once."""
    grown = [after - before for before, after in itertools.pairwise(counts)]
    return min(grown, key=Counter.total)


@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [
        *((schedule, "none") for schedule in SCHEDULES),
        *((schedule, "full") for schedule in ("one_f_one_b", "zero_bubble_v", "two_bw")),
    ],
)
def test_nothing_grows_from_step_to_step(schedule: str, recompute: str) -> None:
    plan = Plan(pipe=2, schedule=schedule, num_microbatches=2, recompute=recompute)
    counts = counted(plan)
    assert len({each["Tensor"] for each in counts}) == 1
    assert growth(counts).total() < MORE / 3, growth(counts)  # one thing a step would be MORE


@pytest.mark.parametrize("recompute", ["none", "sqrt"])
@pytest.mark.parametrize("schedule", ["one_f_one_b", "zero_bubble", "two_bw"])
def test_offloaded_activations_leave_nothing_behind(schedule: str, recompute: str) -> None:
    plan = Plan(pipe=2, schedule=schedule, num_microbatches=2, recompute=recompute)
    counts = counted(replace(plan, offload_activations="disk"))
    for kind in ("Tensor", "_Memory", "_Part", "SavedTensors", "StorageWeakRef", "Future"):
        # What is under way when all stop may differ by a part or two; one a step would be MORE.
        assert counts[-1][kind] <= counts[0][kind] + 8, kind
    assert growth(counts).total() < MORE, growth(counts)


def test_a_plain_replica_does_not_grow_either() -> None:
    plan = Plan(num_microbatches=2, recompute="full")
    counts = counted(plan)
    assert len({each["Tensor"] for each in counts}) == 1
    assert growth(counts).total() < MORE / 3, growth(counts)
