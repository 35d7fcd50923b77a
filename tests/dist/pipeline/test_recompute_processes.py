"""Over real processes: dropout that is drawn again, and messages that change their shape."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ganglion import Plan, RunSettings, parallelize
from ganglion.execute.comm import World, torch_world
from ganglion.execute.train.settings import ActivationSettings
from tests.single.pipeline.test_pipeline_shapes import serial, steps_of, train
from tests.support.harness import Ranks
from tests.support.pipelines import merged
from tests.support.serial import History, assert_same_by_name, copies
from tests.support.training import OPTIMIZERS


class Dropped(nn.Module):
    """A block that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(F.gelu(self.linear(self.norm(x))), 0.3)


def train_dropped(world: World, plan: Plan) -> History:
    own = torch_world(world.rank, plan.mesh(), timeout_s=30.0, transport="shm")
    torch.manual_seed(3)
    blocks = [Dropped() for _ in range(5)]
    batches = list(torch.randn(4, 2, plan.share_size, 8))
    run = parallelize(
        blocks,
        F.mse_loss,
        OPTIMIZERS["adamw"],
        plan,
        RunSettings(activations=ActivationSettings(min_bytes=0)),
        world=own,
    )
    history = History()
    for result in run.steps((inputs, targets) for inputs, targets in batches):
        history.losses.append(result.loss)
        history.norms.append(result.grad_norm)
    history.weights = copies(run.model_tensors())
    return history


@pytest.mark.parametrize("schedule", ["one_f_one_b", "zero_bubble", "two_bw"])
@pytest.mark.parametrize(
    "more",
    [
        {"recompute": "full"},
        {"recompute": "sqrt", "offload_activations": "disk"},
        {"offload_activations": "disk"},
    ],
    ids=["full", "sqrt on disk", "on disk"],
)
def test_dropout_is_the_same_in_both_forwards(
    ranks: Ranks, schedule: str, more: dict[str, str]
) -> None:
    plan = Plan(pipe=2, schedule=schedule, microbatch_size=3, num_microbatches=4)
    again = dataclasses.replace(plan, **more)  # type: ignore[arg-type]
    plain, found = (merged(ranks.run(2, train_dropped, p), p) for p in (plan, again))
    assert found.losses == plain.losses
    assert_same_by_name(found.weights, plain.weights, exactly=True)


def train_shapes(world: World, plan: Plan, transport: str) -> History:
    own = torch_world(world.rank, plan.mesh(), timeout_s=30.0, transport=transport)
    return train(own, plan, [steps_of(4, plan.num_microbatches)])


@pytest.mark.parametrize("transport", ["shm", "torch"])
def test_microbatches_of_different_shape(ranks: Ranks, transport: str) -> None:
    plan = Plan(pipe=2, schedule="message_driven", num_microbatches=6, recompute="full")
    found = merged(ranks.run(2, train_shapes, plan, transport), plan)
    expected = serial([steps_of(4, 6)])
    assert found.losses == pytest.approx(expected.losses, rel=1e-10)
    assert_same_by_name(found.weights, expected.weights)
