"""Running statistics on pipelines: a microbatch counts once, in order; the first replica wins."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ganglion import Plan, parallelize
from ganglion.comm import World, run_threads
from tests.pipelines import FLUSHING
from tests.serial import Batch, assert_same_by_name, copies, load_weights
from tests.training import OPTIMIZERS, share_of

NUM_STEPS, WIDTH = 4, 6


def make_blocks() -> nn.Sequential:
    model = nn.Sequential(
        nn.Linear(WIDTH, 8),
        nn.BatchNorm1d(8),
        nn.Linear(8, 8),
        nn.BatchNorm1d(8, momentum=None),
        nn.GELU(),
        nn.Linear(8, WIDTH),
    ).double()
    generator = torch.Generator().manual_seed(4)
    for parameter in model.parameters():
        parameter.data.normal_(generator=generator)
    return model


def batches(plan: Plan) -> list[Batch]:
    generator = torch.Generator().manual_seed(6)
    shape = (NUM_STEPS, 2, plan.global_batch_size, WIDTH)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    return [(inputs, targets) for inputs, targets in drawn]


def serial(plan: Plan) -> dict[str, Tensor]:
    """Train microbatch by microbatch; each replica has statistics of its own, the first's count."""
    model, delayed = make_blocks(), plan.schedule == "two_bw"
    named, statistics = dict(model.named_parameters()), dict(model.named_buffers())
    optimizer = OPTIMIZERS["sgd"](list(model.named_parameters()))
    kept = [copies(statistics) for _ in range(plan.data)]
    versions = [copies(named)]
    for step, (inputs, targets) in enumerate(batches(plan)):
        load_weights(named, versions[max(step - 1, 0) if delayed else -1])
        optimizer.zero_grad()
        shares = zip(inputs.chunk(plan.data), targets.chunk(plan.data), strict=True)
        for replica, (x, y) in enumerate(shares):
            model.load_state_dict(kept[replica], strict=False)
            parts = zip(x.chunk(plan.num_microbatches), y.chunk(plan.num_microbatches), strict=True)
            for part, target in parts:
                loss = F.mse_loss(model(part), target)
                (loss / (plan.num_microbatches * plan.data)).backward()
            kept[replica] = copies(statistics)
        load_weights(named, versions[-1])
        optimizer.step()
        versions.append(copies(named))
    return {**versions[-1], **kept[0]}


def train(world: World, plan: Plan) -> dict[str, Tensor]:
    run = parallelize(make_blocks(), F.mse_loss, OPTIMIZERS["sgd"], plan, world=world)
    samples = TensorDataset(*batches(plan)[0])
    list(run.steps(share_of(batch, world, plan) for batch in batches(plan)))
    run.evaluate(samples, 1)  # drains, and moves no statistics
    return copies(run.model_tensors())


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("schedule", [*FLUSHING, "two_bw"])
def test_statistics_equal_those_of_serial_training(
    schedule: str, data: int, recompute: str
) -> None:
    plan = Plan(
        data=data,
        pipe=2,
        schedule=schedule,
        microbatch_size=4,
        num_microbatches=3,
        recompute=recompute,
    )
    expected = serial(plan)
    found: dict[str, Tensor] = {}
    for tensors in run_threads(plan.mesh(), lambda world: train(world, plan)):
        for name, tensor in tensors.items():
            assert torch.equal(found.setdefault(name, tensor), tensor), f"{name} drifts apart"
    assert found["1.num_batches_tracked"] == NUM_STEPS * 3
    assert_same_by_name(
        {name: t for name, t in found.items() if t.is_floating_point()},
        {name: t for name, t in expected.items() if t.is_floating_point()},
    )
