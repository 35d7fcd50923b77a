"""Every layout begins with the same weights, and each rank makes only its own piece of them."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ganglion import Plan, RunSettings, parallelize
from ganglion.decide.config import Override, load_run_file, resolve
from ganglion.decide.topology import Launch
from ganglion.errors import ConfigError
from ganglion.execute.comm import World, open_world, run_threads
from ganglion.execute.models import (
    InitialWeights,
    build_model,
    cross_entropy,
    named_blocks,
    named_parameters,
)
from ganglion.execute.models.small_nets import torch_defaults
from ganglion.execute.train import Run, build_blocks, build_job
from tests.support.covering import Values, by_name, cells
from tests.support.serial import History, assert_same_by_name
from tests.support.tensors import Held, whole
from tests.support.training import OPTIMIZERS, SHAPES, Case, make_batches, share_of

SEED = 1234
LAYOUTS = {
    "one": Plan(),
    "data2": Plan(data=2),
    "x2": Plan(x=2),
    "y2": Plan(y=2),
    "z2": Plan(z=2),
    "x2-y2": Plan(x=2, y=2),
    "x2-y2-z2": Plan(x=2, y=2, z=2),
    "pipe2": Plan(pipe=2, num_microbatches=2),
    "pipe2-z2": Plan(pipe=2, z=2, num_microbatches=2),
    "pipe2-x2": Plan(pipe=2, x=2, num_microbatches=2),
    "pipe2-two_bw": Plan(pipe=2, num_microbatches=2, schedule="two_bw"),
}
MODELS = ["wide_gpt", "wide_tied", "wide_mlp", "wide_conv"]


def some_of(*names: str) -> Values:
    return by_name({name: LAYOUTS[name] for name in names})


def outlined(model: str, seed: int = SEED) -> tuple[dict[str, nn.Module], InitialWeights]:
    """Return a model without memory; nothing is drawn from the generator that threads share."""
    with torch.device("meta"):
        made = build_model(SHAPES[model])
    return named_blocks(made), InitialWeights(made.initial_values(), seed)


@functools.cache
def serial_weights(model: str) -> dict[str, Tensor]:
    made = build_model(SHAPES[model])
    made.initialize(SEED)
    return {name: p.detach() for name, p in named_parameters(made.blocks()).items()}


def make_run(
    world: World, plan: Plan, model: str, seed: int = SEED, **settings: Any
) -> tuple[Run, dict[str, nn.Module]]:
    blocks, initial = outlined(model, seed)
    run = parallelize(
        blocks,
        cross_entropy,
        OPTIMIZERS["sgd"],
        dataclasses.replace(plan, bucket_mib=0.002),
        RunSettings(initial=initial, **settings),
        world=world,
    )
    return run, blocks


def begin(world: World, plan: Plan, model: str) -> Held:
    run, _ = make_run(world, plan, model)
    weights = {name: tensor.clone() for name, tensor in run.model_tensors().items()}
    return Held(History(weights=weights), run.placements(), world.coordinates, world.mesh)


@cells(layout=by_name(LAYOUTS), model=MODELS)
def test_every_layout_begins_with_the_weights_of_one_process(layout: str, model: str) -> None:
    plan = LAYOUTS[layout]
    held = run_threads(plan.mesh(), lambda world: begin(world, plan, model))
    found = whole(held, [rank.history.weights for rank in held])
    assert_same_by_name(found, serial_weights(model), exactly=True)


# --- memory --------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Remembers the largest tensor with memory that any operation of this thread saw or made."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        self._see(args)
        self._see((kwargs or {}).values())
        self._see([result])
        return result

    def _see(self, values: Any) -> None:
        for value in values:
            if isinstance(value, list | tuple):
                self._see(value)
            elif isinstance(value, Tensor) and not value.is_meta:
                size = value.untyped_storage().nbytes() // value.element_size()
                self.num_elements = max(self.num_elements, size)


def largest_made(world: World, plan: Plan, model: str) -> int:
    with Largest() as largest:
        make_run(world, plan, model)
    return largest.num_elements


@cells(
    layout=some_of("x2", "y2", "z2", "x2-y2", "x2-y2-z2", "pipe2-z2"),
    model=["wide_gpt", "wide_tied", "wide_gpt3"],
)
def test_no_rank_makes_a_whole_matrix(layout: str, model: str) -> None:
    plan = LAYOUTS[layout]
    matrices = [t.numel() for t in serial_weights(model).values() if t.ndim > 1]
    share = plan.x * plan.y * plan.z
    largest = max(run_threads(plan.mesh(), lambda world: largest_made(world, plan, model)))
    # Two pieces may share a gradient bucket; a whole matrix never exists.
    assert max(matrices) // share <= largest < max(matrices)


def test_the_counting_of_memory_would_see_a_whole_matrix() -> None:
    with Largest() as largest:
        build_model(SHAPES["wide_gpt"])
    assert largest.num_elements == max(t.numel() for t in serial_weights("wide_gpt").values())


def real_blocks(world: World, plan: Plan, model: str) -> list[bool]:
    _, blocks = make_run(world, plan, model)
    return [any(not p.is_meta for p in block.parameters()) for block in blocks.values()]


@pytest.mark.parametrize("layout", ["pipe2", "pipe2-z2", "pipe2-two_bw"])
def test_a_rank_makes_only_the_blocks_of_its_stages(layout: str) -> None:
    plan = LAYOUTS[layout]
    for mine in run_threads(plan.mesh(), lambda world: real_blocks(world, plan, "wide_gpt3")):
        assert any(mine) and not all(mine)


# --- what follows --------------------------------------------------------------------------------


def train(world: World, plan: Plan, case: Case, by_shard: bool, with_sample: bool) -> History:
    """Train from weights that were made by shard, or from a whole model of the same seed."""
    batches = make_batches(case)
    sample = tuple(part[: plan.microbatch_size] for part in batches[0]) if with_sample else None
    if by_shard:
        run, _ = make_run(world, plan, case.model, sample=sample)
    else:
        model = build_model(SHAPES[case.model])
        model.initialize(SEED)
        run = parallelize(
            model,
            cross_entropy,
            OPTIMIZERS["sgd"],
            dataclasses.replace(plan, bucket_mib=0.002),
            world=world,
        )
    history = History()
    for batch in batches:
        for result in run.steps([share_of(batch, world, plan)]):
            history.losses.append(result.loss)
    history.weights = {name: tensor.clone() for name, tensor in run.model_tensors().items()}
    return history


@cells(
    layout=some_of("one", "x2-y2", "z2", "pipe2", "pipe2-z2", "pipe2-two_bw"),
    model=["wide_gpt", "wide_tied"],
    with_sample=Values([False, True], name=lambda measured: "measured" if measured else "guessed"),
)
def test_training_goes_on_as_from_a_whole_model(layout: str, model: str, with_sample: bool) -> None:
    """Also after blocks were measured: what they were lent for it leaves no trace."""
    plan = LAYOUTS[layout]
    case = Case(model=model, dtype=torch.float32, global_batch_size=4 * plan.z, num_steps=2)
    size = case.global_batch_size // (plan.num_shares * plan.num_microbatches)
    cut = (2,) if plan.pipe > 1 and not with_sample else ()
    plan = dataclasses.replace(plan, microbatch_size=size, stage_boundaries=cut)
    body = functools.partial(train, plan=plan, case=case, with_sample=with_sample)
    by_shard, from_whole = (
        run_threads(plan.mesh(), functools.partial(body, by_shard=way)) for way in (True, False)
    )
    for mine, other in zip(by_shard, from_whole, strict=True):
        assert mine.losses == pytest.approx(other.losses, rel=1e-5)
        if cut or plan.pipe == 1:  # else the stages may be cut in other places
            assert mine.losses == other.losses
            assert_same_by_name(mine.weights, other.weights, exactly=True)


def test_ranks_draw_with_the_seed_of_the_first() -> None:
    def body(world: World) -> dict[str, Tensor]:
        run, _ = make_run(world, Plan(data=2), "wide_mlp", seed=SEED + world.rank)
        return {name: tensor.clone() for name, tensor in run.model_tensors().items()}

    for weights in run_threads(Plan(data=2).mesh(), body):
        assert_same_by_name(weights, serial_weights("wide_mlp"), exactly=True)


# --- buffers and refusals ------------------------------------------------------------------------


def small(device: str) -> dict[str, nn.Module]:
    with torch.device(device):
        return {
            "in": nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)),
            "out": nn.Linear(6, 2),
        }


def start(blocks: dict[str, nn.Module], initial: InitialWeights | None, world: World) -> Run:
    return parallelize(
        blocks, cross_entropy, torch.optim.SGD, Plan(), RunSettings(initial=initial), world=world
    )


def alone() -> World:
    return open_world(Launch(), Plan().mesh())


def test_buffers_get_memory_and_values_too() -> None:
    blocks = small("meta")
    run = start(blocks, InitialWeights(torch_defaults(blocks), 0), alone())
    with run:
        wanted = dict(small("cpu")["in"].named_buffers(prefix="in"))
        for name, buffer in wanted.items():
            found = run.model_tensors()[name]
            assert found.dtype == buffer.dtype and torch.equal(found, buffer), name


def test_blocks_without_memory_need_initial_weights() -> None:
    with pytest.raises(ConfigError, match=r"in\.0\.weight is on the meta device and has no values"):
        start(small("meta"), None, alone())


def test_blocks_with_values_are_not_overwritten() -> None:
    blocks = small("cpu")
    with pytest.raises(ConfigError, match=r"in\.0\.weight has values already, but `initial`"):
        start(blocks, InitialWeights(torch_defaults(blocks), 0), alone())


def test_a_buffer_that_nobody_describes_is_refused() -> None:
    blocks = small("meta")
    initial = InitialWeights(torch_defaults(blocks), 0)
    blocks["out"].register_buffer("mask", torch.ones(2, device="meta"), persistent=False)
    with pytest.raises(ConfigError, match=r"no initial value is known for 'out\.mask'"):
        start(blocks, initial, alone())


# --- run files -----------------------------------------------------------------------------------


def settings_of(kind: str) -> dict[str, str]:
    sizes = {"model.layers": "1", "model.hidden": "16", "model.heads": "2", "data.seq_len": "8"}
    data = "synthetic" if kind == "gpt" else "images"
    return {"model.kind": kind, "data.kind": data, "train.seed": "7", **sizes}


@pytest.mark.parametrize("kind", ["gpt", "mlp", "conv"])
def test_a_run_file_begins_with_the_weights_of_its_whole_model(kind: str, tmp_path: Path) -> None:
    file = load_run_file({}, [Override(key, text) for key, text in settings_of(kind).items()])
    plan = resolve(file, 1)
    job = build_job(file, plan, alone(), Launch(), tmp_path, tmp_path / "cache")
    with job.run:
        blocks = build_blocks(file, job.source.num_classes, job.source.input_shape)
        wanted = named_parameters(blocks)
        found = job.run.model_tensors()
        assert_same_by_name(found, {name: p.detach() for name, p in wanted.items()}, exactly=True)
        assert job.num_parameters == sum(p.numel() for p in wanted.values())
