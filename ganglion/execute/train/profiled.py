"""Times of forward, backward, update and engine of small models, for a profile of the machine.

The models train as any run does, each rank by itself and all at the same time. Two marks are taken
of each microbatch, both when the device has finished: before the first block and behind the loss.

    mark     0          1           2          3            0 of the next step
             | forward  | backward  | forward  | backward, update |

What the engine takes is timed in a pipeline of blocks that do next to nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from ganglion.decide.config import OptimizerSection
from ganglion.decide.costs import (
    Cluster,
    Compute,
    StageTimes,
    Timing,
    compute_terms,
    model_work,
    stage_times,
)
from ganglion.decide.plan import Plan
from ganglion.decide.shapes import BuiltShape, GPTShape, MLPShape
from ganglion.decide.topology import Mesh
from ganglion.execute.comm import SoloGroup, World
from ganglion.execute.measure import (
    Mark,
    ModelCase,
    ProfileSizes,
    Taken,
    Watch,
    since,
    undisturbed,
)
from ganglion.execute.models import build_model, cross_entropy, named_blocks
from ganglion.execute.train.parallelize import parallelize
from ganglion.execute.train.run import Run
from ganglion.execute.train.settings import RunSettings
from ganglion.execute.update import optimizer_factory
from ganglion.trace import BACKWARD, FORWARD, Event, Recorder

_WARM_UPS = 2
_ENGINE_WIDTH = 8
_ENGINE_MICROBATCHES = (16, 32)
_SHORTEST_S = 1e-6


def time_models(world: World, watch: Watch, sizes: ProfileSizes) -> list[Timing]:
    """Return this rank's times of the models, while every rank trains the same by itself."""
    found: list[Timing] = []
    for case in sizes.models:
        world.barrier()
        found += _time_model(case, watch, sizes)
    return found


def time_engine(
    open_world: Callable[[Mesh], World], num_stages: int, watch: Watch, num_steps: int
) -> list[Timing]:
    """Return the time that the engine takes for an action, in a pipeline over all ranks.

    `open_world` opens a world of a mesh; all ranks must call this.
    """
    return [
        _time_actions(open_world, num_stages, n, watch, num_steps) for n in _ENGINE_MICROBATCHES
    ]


# --- models --------------------------------------------------------------------------------------


def _time_model(case: ModelCase, watch: Watch, sizes: ProfileSizes) -> Iterator[Timing]:
    plan = Plan(microbatch_size=case.microbatch_size, num_microbatches=sizes.num_microbatches)
    world = World(0, Mesh(), lambda axes: SoloGroup(0))
    marks: list[Mark] = []
    blocks = named_blocks(build_model(case.shape))

    def mark() -> None:
        marks.append(watch.mark())

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        loss = cross_entropy(output, target)
        mark()
        return loss

    next(iter(blocks.values())).register_forward_pre_hook(lambda block, given: mark())
    settings = RunSettings(max_grad_norm=1.0)
    make = optimizer_factory(OptimizerSection())
    with parallelize(
        blocks, loss_fn, make, plan, settings, world=world, device=watch.device
    ) as run:
        _train(run, case.shape, sizes.num_steps + _WARM_UPS + 1)
    yield from _timings(case, plan, marks)


def _timings(case: ModelCase, plan: Plan, marks: list[Mark]) -> Iterator[Timing]:
    """Return the times of the three parts of a step."""
    taken: dict[str, list[Taken]] = {"forward": [], "backward": [], "update": []}
    per_step = 2 * plan.num_microbatches
    for start in range(_WARM_UPS * per_step, len(marks) - per_step, per_step):
        lengths = [since(a, b) for a, b in itertools.pairwise(marks[start:][: per_step + 1])]
        taken["forward"] += lengths[0::2]
        taken["backward"] += lengths[1:-1:2]
        backward_s = undisturbed(lengths[1:-1:2])
        last_s, waited_s = lengths[-1]
        taken["update"].append((max(last_s - backward_s, waited_s + _SHORTEST_S), waited_s))
    parts: dict[str, Callable[[StageTimes], float]] = {
        "forward": lambda one: one.forward_s,
        "backward": _backward_s,
        "update": lambda one: one.update_s,
    }
    for kind, part in parts.items():
        yield Timing(
            kind=kind,
            label=case.label,
            seconds=undisturbed(taken[kind]),
            terms=compute_terms(partial(_seconds_on, case.shape, plan, part)),
        )


def _train(run: Run, shape: BuiltShape, num_steps: int) -> None:
    for _ in run.steps(itertools.repeat(_batch(shape, run.plan)), until=num_steps):
        pass


def _batch(shape: BuiltShape, plan: Plan) -> tuple[Tensor, Tensor]:
    count = plan.microbatch_size * plan.num_microbatches
    if isinstance(shape, GPTShape):
        ids = torch.randint(0, shape.vocab_size, (count, shape.seq_len + 1))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    assert isinstance(shape, MLPShape), "profiles train these two"
    return torch.randn(count, shape.num_inputs), torch.randint(0, shape.num_outputs, (count,))


# --- the engine ----------------------------------------------------------------------------------


def _time_actions(
    open_world: Callable[[Mesh], World],
    num_stages: int,
    num_microbatches: int,
    watch: Watch,
    num_steps: int,
) -> Timing:
    width = _ENGINE_WIDTH
    shape = MLPShape(num_inputs=width, num_outputs=width, num_layers=num_stages, hidden=width)
    plan = Plan(
        pipe=num_stages,
        schedule="gpipe",
        num_microbatches=num_microbatches,
        stage_boundaries=tuple(range(1, num_stages)),
    )
    world = open_world(plan.mesh())
    recorder = Recorder(world.rank)
    marks = [watch.mark()]
    with parallelize(
        named_blocks(build_model(shape)),
        cross_entropy,
        optimizer_factory(OptimizerSection()),
        plan,
        RunSettings(max_grad_norm=1.0),
        world=world,
        device=watch.device,
        recorder=recorder,
    ) as run:
        batches = itertools.repeat(_batch(shape, plan))
        for _ in run.steps(batches, until=num_steps + _WARM_UPS):
            marks.append(watch.mark())
        spans = [_span(events) for events in _by_step(recorder.events())]
    waits = [since(a, b)[1] / (2 * num_microbatches) for a, b in itertools.pairwise(marks)]
    taken = list(zip(spans, waits, strict=True))[_WARM_UPS:]
    alone = Plan(num_microbatches=num_microbatches)
    return Timing(
        kind="action",
        label=f"{num_stages} stages, {num_microbatches} microbatches",
        seconds=undisturbed(taken),
        terms=compute_terms(partial(_slowest_action_s, shape, alone)),
    )


def _by_step(events: list[Event]) -> list[list[Event]]:
    """Return the forwards and backwards of every step."""
    found: dict[int, list[Event]] = {}
    for event in sorted(events, key=lambda event: event.start_s):
        if event.kind in (FORWARD, BACKWARD):
            found.setdefault(event.step, []).append(event)
    return [found[step] for step in sorted(found)]


def _span(events: list[Event]) -> float:
    """Return the time from the begin of one action to that of the next."""
    return (events[-1].end_s - events[0].start_s) / len(events)


# --- what the cost model says --------------------------------------------------------------------


def _seconds_on(
    shape: BuiltShape, plan: Plan, part: Callable[[StageTimes], float], compute: Compute
) -> float:
    return part(stage_times(model_work(shape, plan), plan, _cluster(compute))[0])


def _slowest_action_s(shape: BuiltShape, plan: Plan, compute: Compute) -> float:
    """Return the mean of forward and backward on the stage, of one block, that is slowest."""
    blocks = model_work(shape, plan)
    times = (stage_times([block], plan, _cluster(compute))[0] for block in blocks)
    return max((one.forward_s + _backward_s(one)) / 2 for one in times)


def _cluster(compute: Compute) -> Cluster:
    return Cluster(source="a profile", name="profile", compute=compute)


def _backward_s(times: StageTimes) -> float:
    return times.backward_s + times.weight_s
