"""Half-precision weights with fp32 masters equal a plain torch loop, to the last bit where it can.

Pipelines and replicas round and add as the loop does. Tensor axes and ties add in another order:
there the tolerance is stated, as a share of how far the weights moved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ganglion import Plan, RunSettings, parallelize
from ganglion.decide.plan import BF16_MASTER, FP16_MASTER
from ganglion.errors import ConfigError
from ganglion.execute.comm import World, run_threads
from ganglion.execute.models import cross_entropy
from ganglion.execute.offload.activations import Hooks
from ganglion.execute.pipeline import Chain, WidenedCall
from ganglion.execute.pipeline.pipeline_executor import PipelineExecutor
from ganglion.execute.update.precision import take_masters
from tests.single.models.test_memory_model import allocated_peak
from tests.support.covering import Values, cells
from tests.support.halves import HALVES, train_in_half
from tests.support.pipelines import FLUSHING, merged, plan_for, train_at_once
from tests.support.serial import History, assert_same_by_name, copies
from tests.support.tensors import whole
from tests.support.training import (
    FACTORIES,
    OPTIMIZERS,
    Case,
    make_batches,
    make_model,
    make_run,
    train_split_at_once,
    train_traced,
)

CASE = Case(num_steps=4, global_batch_size=16, dtype=torch.float32)
MASTERS = (BF16_MASTER, FP16_MASTER)
# What one rounding may move, as a share of all movement: eight and eleven bits, a few steps.
SHARE = {BF16_MASTER: 3e-2, FP16_MASTER: 5e-3}


def twin(plan: Plan, case: Case) -> History:
    """Return what the loop does with the microbatches of a plan."""
    return train_in_half(
        case,
        plan.precision,
        plan.num_microbatches,
        num_replicas=plan.num_shares,
        delay=int(plan.schedule == "two_bw"),
        compute_fp32=plan.compute_fp32,
    )


def assert_same_bits(plan: Plan, case: Case) -> None:
    found = merged(run_threads(plan.mesh(), lambda w: train_at_once(w, plan, case)), plan)
    wanted = twin(plan, case)
    assert found.losses == pytest.approx(wanted.losses, rel=1e-6)
    assert found.norms == pytest.approx(wanted.norms, rel=1e-6)
    assert_same_by_name(found.weights, wanted.weights, exactly=True)


def assert_close(plan: Plan, case: Case) -> None:
    """Compare every weight with the loop; SGD, as AdamW's first steps are nothing but signs."""
    case = dataclasses.replace(case, optimizer="sgd")
    held = run_threads(plan.mesh(), lambda world: train_split_at_once(world, plan, case))
    found, wanted = whole(held, [rank.history.weights for rank in held]), twin(plan, case)
    start, share = dict(make_model(case).named_parameters()), SHARE[plan.precision]
    assert set(found) == set(wanted.weights)
    assert held[0].history.losses == pytest.approx(wanted.losses, rel=share / 10)
    assert held[0].history.norms == pytest.approx(wanted.norms, rel=share)
    for name, weight in wanted.weights.items():
        moved = torch.linalg.vector_norm(weight - start[name])
        assert torch.linalg.vector_norm(found[name] - weight) < share * moved, name


# --- one process -------------------------------------------------------------------------------


WIDENED = Values([False, True], name=lambda widened: "widened" if widened else "half")


@cells(precision=MASTERS, optimizer=FACTORIES, recompute=["none", "full"], compute_fp32=WIDENED)
def test_one_process(precision: str, optimizer: str, recompute: str, compute_fp32: bool) -> None:
    case = dataclasses.replace(CASE, optimizer=optimizer)
    plan = plan_for(case, "one_f_one_b", 1, 1, 4, precision=precision, recompute=recompute)
    assert_same_bits(dataclasses.replace(plan, compute_fp32=compute_fp32), case)


@pytest.mark.parametrize("precision", MASTERS)
@pytest.mark.parametrize("model", ["mlp", "conv", "tied"])
def test_other_models(model: str, precision: str) -> None:
    case = dataclasses.replace(CASE, model=model, num_steps=2)
    assert_same_bits(plan_for(case, "one_f_one_b", 1, 1, 4, precision=precision), case)


@pytest.mark.parametrize("precision", MASTERS)
def test_clipping_multiplies_in_fp32(precision: str) -> None:
    """A factor applied in half would differ by a thousandth, not by rounding of fp32.

    Weights move far enough for that: rounding a weight is much less than 1e-5 of its movement.
    """
    case = dataclasses.replace(CASE, optimizer="sgd", max_grad_norm=0.3)
    plan = plan_for(case, "one_f_one_b", 1, 1, 4, precision=precision)
    (found,) = run_threads(plan.mesh(), lambda world: train_at_once(world, plan, case))
    wanted = twin(plan, case)
    assert found.norms == pytest.approx(wanted.norms, rel=1e-6)
    assert min(found.norms) > case.max_grad_norm, "nothing was clipped"
    assert_moved_alike(found.weights, wanted.weights, case, 1e-5)


def assert_moved_alike(
    found: dict[str, Tensor], wanted: dict[str, Tensor], case: Case, share: float
) -> None:
    start = dict(make_model(case).named_parameters())
    for name, weight in wanted.items():
        moved = torch.linalg.vector_norm(weight - start[name])
        assert torch.linalg.vector_norm(found[name] - weight) <= share * moved, name


def test_masters_begin_before_rounding() -> None:
    plan = plan_for(CASE, "one_f_one_b", 1, 1, 4, precision=BF16_MASTER)

    def body(world: World) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        run = make_run(world, plan, CASE)
        return copies(run.model_tensors()), copies(run._parts.parameters)

    ((masters, parameters),) = run_threads(plan.mesh(), body)
    start = dict(make_model(CASE).named_parameters())
    assert_same_by_name(masters, copies(start), exactly=True)
    rounded = {name: p.detach().bfloat16() for name, p in start.items()}
    assert_same_by_name(parameters, rounded, exactly=True)


def test_outputs_and_evaluation_are_wide() -> None:
    plan = plan_for(CASE, "one_f_one_b", 2, 1, 4, precision=BF16_MASTER)
    inputs, targets = make_batches(CASE)[0]

    def body(world: World) -> tuple[Tensor, float | None]:
        run = make_run(world, plan, CASE)
        return run.outputs(inputs), run._parts.executor.evaluate((inputs, targets))

    found = run_threads(plan.mesh(), body)
    model = make_model(CASE).bfloat16()
    for outputs, _ in found:
        assert outputs.dtype == torch.float32
        assert torch.equal(outputs, model(inputs).float())
    pairs = zip(inputs.chunk(4), targets.chunk(4), strict=True)
    losses = [cross_entropy(model(part).float(), target).item() for part, target in pairs]
    assert found[1][1] == pytest.approx(sum(losses) / 4, rel=1e-6)


class Normed(nn.Module):
    """A convolution with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class Flat(nn.Module):
    """A frozen projection and a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.linear = nn.Linear(4 * 36, 16), nn.Linear(16, 5)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.frozen(x.flatten(1)))


@pytest.mark.parametrize("compute_fp32", [False, True], ids=["half", "widened"])
@pytest.mark.parametrize("precision", MASTERS)
def test_running_statistics_stay_wide_and_frozen_weights_get_no_master(
    precision: str, compute_fp32: bool
) -> None:
    plan = Plan(microbatch_size=8, num_microbatches=2, precision=precision)
    plan = dataclasses.replace(plan, compute_fp32=compute_fp32)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(16, 1, 8, 8, generator=generator)
    labels = torch.arange(16) % 5

    def body(world: World) -> tuple[list[float], dict[str, torch.dtype], set[str]]:
        torch.manual_seed(0)
        run = parallelize([Normed(), Flat()], cross_entropy, OPTIMIZERS["adamw"], plan, world=world)
        losses = [result.loss for result in run.steps([(images, labels)] * 12)]
        named = {**run._parts.parameters, **run._parts.buffers}
        dtypes = {name: tensor.dtype for name, tensor in named.items()}
        return losses, dtypes, set(run._parts.updates[0].weights())

    ((losses, dtypes, mastered),) = run_threads(plan.mesh(), body)
    assert losses[-1] < losses[0] - 0.2
    wide = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert wide == {f"0.norm.{n}" for n in ("weight", "bias", "running_mean", "running_var")}
    assert dtypes["1.frozen.weight"] == HALVES[precision]
    assert mastered == {name for name in dtypes if name.endswith(("weight", "bias"))} - {
        "1.frozen.weight",
        "1.frozen.bias",
    }


# --- layouts -----------------------------------------------------------------------------------


@cells(precision=MASTERS, schedule=FLUSHING)
def test_flushing_pipelines(precision: str, schedule: str) -> None:
    assert_same_bits(plan_for(CASE, schedule, 2, 1, 4, precision=precision), CASE)


@pytest.mark.parametrize(("pipe", "data"), [(1, 2), (2, 2), (3, 1)])
@pytest.mark.parametrize("schedule", ["one_f_one_b", "zero_bubble"])
def test_replicas_and_depth(schedule: str, pipe: int, data: int) -> None:
    assert_same_bits(plan_for(CASE, schedule, pipe, data, 4, precision=BF16_MASTER), CASE)


@cells(precision=MASTERS, pipe=[1, 2, 3], recompute=["none", "full"])
def test_two_bw_with_its_delay(precision: str, pipe: int, recompute: str) -> None:
    plan = plan_for(CASE, "two_bw", pipe, 1, 4, precision=precision, recompute=recompute)
    assert_same_bits(plan, CASE)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble_v", "two_bw"])
def test_pipelines_that_widen(schedule: str, recompute: str) -> None:
    """Under two_bw, backward must widen the weights of the version that the forward had."""
    more = {"precision": BF16_MASTER, "compute_fp32": True, "recompute": recompute}
    assert_same_bits(plan_for(CASE, schedule, 2, 1, 4, **more), CASE)


@pytest.mark.parametrize("schedule", ["one_f_one_b", "two_bw", "interleaved"])
@pytest.mark.parametrize("precision", MASTERS)
def test_tied_embeddings(precision: str, schedule: str) -> None:
    """Both holders must agree to the last bit; the loop adds the two uses in another order."""
    case = dataclasses.replace(CASE, model="tied", optimizer="sgd", max_grad_norm=0.5)
    plan = plan_for(case, schedule, 2, 1, 4, precision=precision)
    found = merged(run_threads(plan.mesh(), lambda w: train_at_once(w, plan, case)), plan)
    assert_moved_alike(found.weights, twin(plan, case).weights, case, SHARE[precision])


AXES: list[dict[str, object]] = [
    {"x": 2},
    {"y": 2},
    {"z": 2},
    {"x": 2, "z": 2},
    {"z": 2, "pipe": 2, "recompute": "full"},
    {"x": 2, "pipe": 2, "schedule": "two_bw"},
]


@cells(precision=MASTERS, axes=AXES, compute_fp32=WIDENED)
def test_tensor_axes(precision: str, axes: dict[str, object], compute_fp32: bool) -> None:
    case = dataclasses.replace(CASE, model="wide_gpt", num_steps=3, max_grad_norm=0.5)
    plan = Plan(**axes, precision=precision, compute_fp32=compute_fp32, num_microbatches=4)  # type: ignore[arg-type]
    plan = dataclasses.replace(plan, microbatch_size=4 // plan.z)
    assert_close(plan, case)


def test_messages_travel_in_half() -> None:
    sent = []
    for precision in ("fp32", BF16_MASTER):
        plan = plan_for(CASE, "one_f_one_b", 2, 1, 4, precision=precision)
        found = run_threads(plan.mesh(), lambda world, plan=plan: train_traced(world, plan, CASE))
        sent.append(
            sum(e.bytes for _, events in found for e in events if e.kind.startswith("send"))
        )
    assert sent[0] == 2 * sent[1] > 0


# --- what is held ------------------------------------------------------------------------------


def test_two_bw_holds_two_halves_and_one_master() -> None:
    plan = plan_for(CASE, "two_bw", 1, 1, 4, precision=BF16_MASTER)

    def body(world: World) -> list[dict[str, float]]:
        run = make_run(world, plan, CASE)
        executor = run._parts.executor
        assert isinstance(executor, PipelineExecutor)
        found = []
        for part in executor._parts.values():
            size = sum(p.numel() for p in part.parameters.values())
            assert part.versions is not None
            found.append(
                {
                    "versions": _bytes(f for flats in part.versions._flat for f in flats.values()),
                    "gradients": _bytes(b for i in range(2) for b in part.buckets.buffers(i)),
                    "masters": _bytes(part.update.weights().values()),
                    "wide gradients": _bytes(part.update.gradients().values()),
                }
            )
            found[-1] = {name: num_bytes / size for name, num_bytes in found[-1].items()}
        return found

    ((held,),) = run_threads(plan.mesh(), body)
    assert held == {"versions": 4, "gradients": 4, "masters": 4, "wide gradients": 4}


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Return the memory of tensors, each piece once."""
    storages = [t.untyped_storage() for t in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class Wide(nn.Module):
    """A block with much more weights than activations."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(size), nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


@pytest.mark.parametrize("recompute", [False, True])
def test_widened_weights_are_not_kept(recompute: bool) -> None:
    """At any moment the fp32 copies of one block are alive, never those of all six."""
    size, num_blocks = 256, 6
    blocks = [Wide(size).bfloat16() for _ in range(num_blocks)]
    for block in blocks:
        for parameter in block.parameters():
            parameter.grad = torch.zeros_like(parameter)
    spans = [range(number, number + 1) for number in range(num_blocks)] if recompute else []
    chain = Chain(blocks, loss_fn=_mean, call=WidenedCall(), segments=spans)
    hidden, target = torch.ones(2, size), torch.zeros(2, size)

    def step() -> None:
        chain.forward(hidden, target, lambda block: None).backward()  # type: ignore[no-untyped-call]

    step()
    one = 4 * size * size
    # One copy in forward; a copy, its fp32 gradient and that in half in backward.
    assert allocated_peak(step) < 3.2 * one
    plain = Chain([Wide(size) for _ in blocks], loss_fn=_mean, call=_keeping)
    assert allocated_peak(lambda: plain.forward(hidden, target, lambda block: None)) > 5 * one


def _mean(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def _keeping(block: nn.Module, hidden: Tensor, hooks: Hooks | None) -> Tensor:
    """Run with widened copies as a plain functional call keeps them."""
    copied = {name: p.double().float() for name, p in block.named_parameters()}
    output: Tensor = torch.func.functional_call(block, copied, (hidden,))
    return output


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "error_feedback", "words"),
    [
        (Plan(pipe=2, schedule="two_bw", num_microbatches=4), True, "optimizer.error_feedback"),
        (Plan(data=2, averaging="sync_easgd"), False, "averaging.method"),
        (Plan(pipe=3, schedule="stash", num_microbatches=4), False, "stash.*bf16_master"),
    ],
)
def test_what_is_not_built_is_refused_by_name(plan: Plan, error_feedback: bool, words: str) -> None:
    plan = dataclasses.replace(plan, precision=FP16_MASTER)
    with pytest.raises(ConfigError, match=words):
        parallelize(
            make_model(CASE),
            cross_entropy,
            OPTIMIZERS["sgd"],
            plan,
            RunSettings(error_feedback=error_feedback),
        )


def test_stash_runs_in_bf16() -> None:
    plan = plan_for(CASE, "stash", 2, 1, 4, precision=BF16_MASTER)
    found = merged(run_threads(plan.mesh(), lambda w: train_at_once(w, plan, CASE)), plan)
    assert found.losses[-1] < found.losses[0]


def test_widening_needs_masters() -> None:
    with pytest.raises(ConfigError, match=r"memory.compute_fp32 = true.*stores them in fp32"):
        Plan(compute_fp32=True)


def test_doubles_have_no_master() -> None:
    model = make_model(dataclasses.replace(CASE, dtype=torch.float64))
    with pytest.raises(ConfigError, match=r"embedding.tokens.weight is of torch.float64"):
        take_masters([model], dict(model.named_parameters()), BF16_MASTER)
