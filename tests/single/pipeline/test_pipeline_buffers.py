"""Running statistics on pipelines: a microbatch counts once, in order; the first replica wins.

What is trained beside them is compared too: every weight, and every gradient of every step.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ganglion import Plan, parallelize
from ganglion.execute.comm import World, run_threads
from tests.support.pipelines import FLUSHING, merged
from tests.support.serial import (
    Batch,
    History,
    assert_same_by_name,
    assert_same_gradients,
    copies,
    load_weights,
)
from tests.support.training import OPTIMIZERS, Watch, share_of

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


def serial(plan: Plan) -> History:
    """Train microbatch by microbatch; each replica has statistics of its own, the first's count."""
    model, delayed = make_blocks(), plan.schedule == "two_bw"
    named, statistics = dict(model.named_parameters()), dict(model.named_buffers())
    optimizer = OPTIMIZERS["sgd"](list(model.named_parameters()))
    kept = [copies(statistics) for _ in range(plan.data)]
    versions, history = [copies(named)], History()
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
        history.gradients.append(copies({n: p.grad for n, p in named.items()}))
        load_weights(named, versions[-1])
        optimizer.step()
        versions.append(copies(named))
    history.weights = {**versions[-1], **kept[0]}
    return history


def train(world: World, plan: Plan) -> History:
    watch = Watch(OPTIMIZERS["sgd"])
    run = parallelize(make_blocks(), F.mse_loss, watch, plan, world=world)
    samples = TensorDataset(*batches(plan)[0])
    list(run.steps(share_of(batch, world, plan) for batch in batches(plan)))
    run.evaluate(samples, 1)  # drains, and moves no statistics
    return History(gradients=watch.gradients(), weights=copies(run.model_tensors()))


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
    found = merged(run_threads(plan.mesh(), lambda world: train(world, plan)), plan)
    assert found.weights["1.num_batches_tracked"] == NUM_STEPS * 3
    assert_same_gradients(found.gradients, expected.gradients)
    assert_same_by_name(_floating(found.weights), _floating(expected.weights))


def _floating(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
