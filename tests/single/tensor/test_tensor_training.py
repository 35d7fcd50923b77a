"""Training over x, y, z and data equals the serial model: every layout of 2, 4 and 8 ranks."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ganglion import Plan
from ganglion.decide.topology import Mesh
from ganglion.errors import LayoutError
from ganglion.execute.comm import World, run_threads
from ganglion.execute.models import cross_entropy, mse
from ganglion.execute.tensor import WITHOUT_OVERLAP, TensorSettings, apply_tensor_parallel
from ganglion.execute.tensor.weights import StoredWeight, Weights
from tests.support.covering import cells, named
from tests.support.serial import History
from tests.support.tensors import (
    SETTINGS,
    Held,
    Task,
    assert_equals_twin,
    assert_same_bits,
    assert_same_histories,
    factorizations,
    own_random_numbers,
    train_task,
    train_twin,
    whole,
)
from tests.support.training import Case, make_batches, make_run, train_serial, train_split
from tests.support.unet import NUM_CLASSES, make_unet, unet_cuts

LAYOUTS = [plan for num_ranks in (2, 4, 8) for plan in factorizations(num_ranks)]
FOUR = list(factorizations(4))
MIXED = [Plan(x=2, y=2), Plan(x=2, z=2), Plan(y=2, z=2), Plan(z=2, data=2)]
EIGHT = [
    Plan(x=2, y=2, z=2),
    Plan(x=2, y=2, data=2),
    Plan(x=2, z=2, data=2),
    Plan(y=2, z=2, data=2),
    Plan(x=8),
    Plan(y=8),
    Plan(z=8),
]
CASE = Case(model="wide_gpt", max_grad_norm=0.5, num_steps=2)


@functools.cache
def _serial(case: Case) -> History:
    return train_serial(dataclasses.replace(case, tensor=None))


def _fit(plan: Plan, case: Case) -> Plan:
    """Cut the global batches into two microbatches where that is possible."""
    share = case.global_batch_size // plan.num_shares
    size = max(1, share // 2)
    return dataclasses.replace(plan, microbatch_size=size, num_microbatches=share // size)


def _train(plan: Plan, case: Case, *, has_common_memory: bool = False) -> list[Held]:
    plan = _fit(plan, case)
    return run_threads(
        plan.mesh(),
        lambda world: train_split(world, plan, case),
        has_common_memory=has_common_memory,
    )


def _assert_serial(plan: Plan, case: Case, *, has_common_memory: bool = False) -> list[Held]:
    """Train under a plan; losses, norms, gradients and weights must be those of one process."""
    held = _train(plan, case, has_common_memory=has_common_memory)
    assert_same_histories(held, _serial(case), case.dtype)
    return held


@cells(plan=LAYOUTS, model=["wide_gpt", "wide_gpt3", "wide_tied", "wide_mlp"])
def test_every_layout_equals_the_serial_model(plan: Plan, model: str) -> None:
    num_steps = 1 if model == "wide_gpt3" else 2
    _assert_serial(plan, dataclasses.replace(CASE, model=model, num_steps=num_steps))


@cells(plan=[p for p in LAYOUTS if p.x <= 2 and p.y <= 4])
def test_convolutions_equal_the_serial_model(plan: Plan) -> None:
    _assert_serial(plan, dataclasses.replace(CASE, model="wide_conv"))


@pytest.mark.parametrize("plan", [Plan(x=4), Plan(y=8)], ids=named)
def test_convolutions_that_do_not_divide_are_refused(plan: Plan) -> None:
    with pytest.raises(LayoutError, match=r"(conv1\.conv|linear2\.linear)\.weight: dim 0 .* has"):
        _assert_serial(plan, dataclasses.replace(CASE, model="wide_conv"))


# --- what overlaps -------------------------------------------------------------------------------


@cells(plan=[*MIXED, Plan(x=2, y=2, z=2)], model=["wide_gpt", "wide_tied"])
def test_overlap_changes_no_bit(plan: Plan, model: str) -> None:
    case = dataclasses.replace(CASE, model=model)
    overlapped = _assert_serial(plan, dataclasses.replace(case, tensor=SETTINGS["overlapped"]))
    assert_same_bits(_train(plan, dataclasses.replace(case, tensor=WITHOUT_OVERLAP)), overlapped)


@cells(plan=[p for p in FOUR if p.z > 1], model=["wide_gpt", "wide_tied"])
def test_kept_weights_equal_the_serial_model(plan: Plan, model: str) -> None:
    _assert_serial(plan, dataclasses.replace(CASE, model=model, tensor=SETTINGS["kept"]))


@cells(
    plan=[*(p for p in FOUR if p.z > 1), Plan(x=2, z=4)],
    model=["wide_gpt", "wide_tied", "wide_mlp"],
)
def test_some_kept_weights_equal_the_serial_model(plan: Plan, model: str) -> None:
    case = dataclasses.replace(CASE, model=model, tensor=TensorSettings(keep_bytes=20_000))
    waiting = dataclasses.replace(WITHOUT_OVERLAP, keep_bytes=20_000)
    overlapped = _assert_serial(plan, case)
    assert_same_bits(_train(plan, dataclasses.replace(case, tensor=waiting)), overlapped)


@pytest.mark.parametrize(("keep_bytes", "twin"), [(1 << 30, "kept"), (1, "overlapped")])
def test_a_budget_for_all_weights_or_none_changes_no_bit(keep_bytes: int, twin: str) -> None:
    budget, plain = (
        _train(Plan(z=2), dataclasses.replace(CASE, tensor=tensor))
        for tensor in (TensorSettings(keep_bytes=keep_bytes), SETTINGS[twin])
    )
    assert_same_bits(budget, plain)


@cells(plan=MIXED, model=["wide_gpt", "wide_conv"])
def test_halves_equal_the_serial_model_and_themselves_with_waits(plan: Plan, model: str) -> None:
    # 3 samples a microbatch and share: an odd number of images.
    case = dataclasses.replace(CASE, model=model, global_batch_size=6 * plan.num_shares)
    waiting = dataclasses.replace(WITHOUT_OVERLAP, halves=True)
    overlapped = _assert_serial(plan, dataclasses.replace(case, tensor=TensorSettings(halves=True)))
    assert_same_bits(_train(plan, dataclasses.replace(case, tensor=waiting)), overlapped)


@cells(plan=[p for p in LAYOUTS if p.z > 1], model=["wide_gpt", "wide_tied"])
def test_common_memory_changes_no_bit(plan: Plan, model: str) -> None:
    case = dataclasses.replace(CASE, model=model)
    read = _assert_serial(plan, case, has_common_memory=True)
    assert_same_bits(_train(plan, case), read)


@cells(tensor=["waiting", "kept"], recompute=["none", "full"], model=["wide_gpt", "wide_conv"])
def test_common_memory_goes_with_everything(tensor: str, recompute: str, model: str) -> None:
    plan = Plan(y=2, z=2, recompute=recompute)
    case = dataclasses.replace(CASE, model=model, tensor=SETTINGS[tensor])
    read = _assert_serial(plan, case, has_common_memory=True)
    assert_same_bits(_train(plan, case), read)


@pytest.mark.parametrize("share_pieces", [True, False])
def test_common_memory_is_not_gathered(share_pieces: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gathers: list[int] = []
    begin_gather = StoredWeight.begin_gather

    def logged(weight: StoredWeight) -> None:
        gathers.append(weight.number)
        begin_gather(weight)

    monkeypatch.setattr(StoredWeight, "begin_gather", logged)
    settings = TensorSettings(share_pieces=share_pieces)
    _assert_serial(Plan(z=2), dataclasses.replace(CASE, tensor=settings), has_common_memory=True)
    assert bool(gathers) == (not share_pieces)


def test_nobody_writes_what_others_still_read() -> None:
    # Rank 1 is late, with its reading and then with its writing.
    def body(world: World) -> list[float]:
        linear = nn.Linear(1, 2, bias=False)
        split = apply_tensor_parallel({"0": nn.Sequential(linear)}, world, {})
        (parameter,) = split.blocks["0"].parameters()
        split.weights.share([parameter], wholly=True)
        assert parameter.untyped_storage().nbytes() == 4  # what a rank holds is its piece
        seen = []
        for number in range(3):
            time.sleep(0.1 * world.rank)
            with torch.no_grad():
                parameter.fill_(number + world.rank / 2)
            split.weights.on_change()
            split.blocks["0"](torch.ones(1, 1))  # from here on nobody waits for anybody
            time.sleep(0.1 * world.rank)
            seen += split.blocks["0"](torch.ones(1, 1)).flatten().tolist()
            split.weights.done_reading()
        return seen

    for seen in run_threads(Mesh(z=2), body, has_common_memory=True):
        assert seen == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]


# --- recomputation, evaluation, precision --------------------------------------------------------


@cells(plan=MIXED, model=["wide_gpt", "wide_tied"])
def test_recomputation_equals_the_serial_model(plan: Plan, model: str) -> None:
    plan = dataclasses.replace(plan, recompute="full")
    case = dataclasses.replace(CASE, model=model)
    overlapped = _assert_serial(plan, case)
    assert_same_bits(_train(plan, dataclasses.replace(case, tensor=WITHOUT_OVERLAP)), overlapped)


def test_recomputation_gathers_in_a_phase_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    on_use = Weights.on_use

    def logged(weights: Weights, weight: StoredWeight, phase: str) -> None:
        if threading.current_thread().name.endswith("_0"):  # one of the ranks
            used.append(f"{phase}{weight.number}")
        on_use(weights, weight, phase)

    monkeypatch.setattr(Weights, "on_use", logged)
    case = dataclasses.replace(CASE, num_steps=1, global_batch_size=2)
    plan = dataclasses.replace(_fit(Plan(z=2), case), recompute="full")
    run_threads(plan.mesh(), lambda world: train_split(world, plan, case))
    assert " ".join(used) == (
        "F0 F1 F2 F3 F4 F5 "  # embedding, qkv, out, up, down, head
        "R5 B5 R3 R4 B4 B3 R1 R2 B2 B1 R0"
    )


@cells(plan=[Plan(x=2, y=2, z=2), Plan(y=2, z=2, data=2)], model=["wide_gpt", "wide_mlp"])
def test_outputs_and_evaluation_equal_the_serial_model(plan: Plan, model: str) -> None:
    case = dataclasses.replace(CASE, model=model)
    plan = _fit(plan, case)
    batches = make_batches(case)
    inputs, targets = batches[0]
    dataset = [(inputs[i], targets[i]) for i in range(len(inputs))]

    def body(world: World) -> tuple[Tensor, float, Tensor]:
        with make_run(world, plan, case) as run:
            before = run.outputs(inputs)
            list(run.steps([_share(batches[1], world, plan)]))
            return before, run.evaluate(dataset, 1), run.outputs(inputs)

    def serial(world: World) -> tuple[Tensor, float, Tensor]:
        with make_run(world, _fit(Plan(), case), case) as run:
            before = run.outputs(inputs)
            list(run.steps([batches[1]]))
            return before, run.evaluate(dataset, 1), run.outputs(inputs)

    ((before, loss, after),) = run_threads(Plan().mesh(), serial)
    assert not torch.allclose(before, after)
    for found in run_threads(plan.mesh(), body):
        torch.testing.assert_close(found[0], before)
        torch.testing.assert_close(found[2], after)
        assert found[1] == pytest.approx(loss, rel=1e-10)


def _share(batch: tuple[Tensor, Tensor], world: World, plan: Plan) -> tuple[Tensor, Tensor]:
    index = world.coordinates.data * plan.z + world.coordinates.z
    part = slice(index * plan.share_size, (index + 1) * plan.share_size)
    return batch[0][part], batch[1][part]


BF16_GRADIENTS = 0.04  # of the norm of each gradient: bf16 has 8 bits, sums are cut in two or four
BF16_LOSS = 0.01


@cells(plan=[*MIXED, Plan(x=2, y=2, z=2)])
def test_bf16_is_as_near_as_bf16_is(plan: Plan) -> None:
    case = dataclasses.replace(CASE, dtype=torch.float32, num_steps=1, max_grad_norm=0.0)
    plan = dataclasses.replace(_fit(plan, case), precision="bf16")
    alone = dataclasses.replace(_fit(Plan(), case), precision="bf16")
    held = run_threads(plan.mesh(), lambda world: train_split(world, plan, case))
    (wanted,) = run_threads(alone.mesh(), lambda world: train_split(world, alone, case))
    assert held[0].history.losses == pytest.approx(wanted.history.losses, rel=BF16_LOSS)
    found = whole(held, [rank.history.gradients[0] for rank in held])
    for name, gradient in wanted.history.gradients[0].items():
        assert found[name].dtype == torch.float32
        assert (found[name] - gradient).norm() <= BF16_GRADIENTS * gradient.norm(), name


# --- models of a user's own ----------------------------------------------------------------------


def image_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def _images(num_steps: int = 2, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    shapes = (size, 3, 8, 8), (size, 8, 8)
    return [
        (
            torch.randn(shapes[0], generator=generator, dtype=torch.float64),
            torch.randint(NUM_CLASSES, shapes[1], generator=generator),
        )
        for _ in range(num_steps)
    ]


UNET = Task(make_unet, image_loss, _images(), cuts=unet_cuts())


@cells(plan=[*factorizations(2), *FOUR, *EIGHT])
def test_a_unet_with_both_norms_equals_its_serial_twin(plan: Plan) -> None:
    held = assert_equals_twin(UNET.fit(plan), UNET)
    for name, placement in held[0].placements.items():
        assert held[0].history.weights[name].shape == placement.local_shape(plan.mesh()), name


@pytest.mark.parametrize("plan", [Plan(x=2, y=2), Plan(y=4), Plan(y=2, z=2)], ids=named)
def test_a_recomputed_unet_counts_its_samples_once(plan: Plan) -> None:
    assert_equals_twin(dataclasses.replace(UNET.fit(plan), recompute="full"), UNET)


@cells(plan=[*factorizations(2), *MIXED, Plan(y=4)])
def test_dropout_is_that_of_one_process(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    own_random_numbers(monkeypatch)
    make = functools.partial(make_unet, dropout=0.3)
    task = dataclasses.replace(UNET, make=make, batches=_images(num_steps=1, size=4))
    plan = task.fit(plan, microbatch_size=1)
    held = assert_equals_twin(plan, task)
    without = train_twin(plan, dataclasses.replace(task, make=make_unet))
    assert held[0].history.losses != pytest.approx(without.losses, rel=1e-3)


class Residual(nn.Module):
    """A module of somebody else."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh())
        self.out = nn.Linear(2 * width, width, bias=False)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.scale * self.out(self.inner(self.norm(x)))
        return result


def make_unknown() -> dict[str, nn.Module]:
    conv = nn.Sequential(
        nn.Unflatten(2, (2, 4)),
        nn.Conv2d(4, 8, 3, padding=1, groups=2),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Flatten(2),
    )
    residual = Residual(8)
    return {
        "table": nn.Embedding(16, 8),
        "first": residual,
        "again": residual,  # a block that runs twice
        "conv": conv,
        "head": nn.Sequential(nn.ReLU(), nn.Linear(8, 8)),
    }


def _ids(num_steps: int = 2) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(8)
    return [
        (
            torch.randint(16, (8, 4), generator=generator),
            torch.randn(8, 8, 8, generator=generator, dtype=torch.float64),
        )
        for _ in range(num_steps)
    ]


@cells(plan=[*factorizations(2), *FOUR, *EIGHT])
def test_any_module_in_blocks_equals_its_serial_twin(plan: Plan) -> None:
    task = Task(make_unknown, mse, _ids())
    assert_equals_twin(task.fit(plan), task)


def make_frozen() -> dict[str, nn.Module]:
    """Everything that can be frozen: a table, one half of a layer, a whole layer."""
    blocks = make_unknown()
    for name in ("table.weight", "first.inner.0.weight", "head.1.weight", "head.1.bias"):
        block, _, parameter = name.partition(".")
        blocks[block].get_parameter(parameter).requires_grad_(False)
    return blocks


@cells(plan=MIXED)
def test_frozen_parameters_stay_as_they_are(plan: Plan) -> None:
    task = Task(make_frozen, mse, _ids())
    held = assert_equals_twin(task.fit(plan), task)
    assert "head.1.weight" not in held[0].history.gradients[0]


def test_a_loss_of_ones_own_sees_the_whole_output() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        assert output.shape[1] == NUM_CLASSES
        return cross_entropy(output.movedim(1, -1), target)

    task = dataclasses.replace(UNET, loss_fn=loss)
    plan = task.fit(Plan(x=2))
    run_threads(plan.mesh(), lambda world: train_task(world, plan, task))
