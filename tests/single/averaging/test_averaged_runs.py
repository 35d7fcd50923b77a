"""Runs whose replicas are workers of elastic averaging equal the workers written out."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ganglion import Plan, RunSettings, parallelize
from ganglion.errors import ConfigError, NotBuiltError
from ganglion.execute.averaging.methods.outer import OuterFactory, diloco, local_sgd, slow_momentum
from ganglion.execute.comm import World, run_threads
from ganglion.execute.models import cross_entropy
from ganglion.execute.train.averaged import AveragingSettings
from tests.support.averaged import assert_equals, train_averaged
from tests.support.averaged import train_workers as written_out
from tests.support.covering import cells
from tests.support.serial import copies
from tests.support.tensors import SETTINGS
from tests.support.training import Case

CASE = Case(model="wide_mlp", num_steps=5, global_batch_size=8, max_grad_norm=0.3)
LAYOUTS = [{}, {"x": 2}, {"z": 2}, {"y": 2, "z": 2}]
pytestmark = pytest.mark.timeout(120)


train_workers = functools.cache(written_out)


def planned(method: str, case: Case, **axes: object) -> Plan:
    plan = Plan(data=2, averaging=method, **axes)  # type: ignore[arg-type]
    size = case.global_batch_size // (plan.num_shares * 2)
    return dataclasses.replace(plan, microbatch_size=size, num_microbatches=2)


def with_tau(tau: int, **more: object) -> Case:
    return dataclasses.replace(CASE, averaging=AveragingSettings(tau=tau, **more))  # type: ignore[arg-type]


@cells(axes=LAYOUTS, tau=[1, 2])
def test_workers_without_a_pipeline(axes: dict[str, int], tau: int) -> None:
    case = with_tau(tau, alpha=0.3)
    plan = planned("sync_easgd", case, **axes)
    found = run_threads(plan.mesh(), lambda world: train_averaged(world, plan, case))
    assert_equals(found, train_workers(case, 2, tau=tau, alpha=0.3))
    assert {one.num_exchanges for one in found} == {-(-case.num_steps // tau)}


@pytest.mark.parametrize(
    ("schedule", "axes"),
    [
        ("one_f_one_b", {}),
        ("message_driven", {"x": 2}),
        ("zero_bubble", {}),
        ("gpipe", {"z": 2}),
    ],
)
def test_a_worker_may_be_a_pipeline_of_split_layers(schedule: str, axes: dict[str, int]) -> None:
    case = dataclasses.replace(with_tau(2, beta=0.8), model="wide_gpt")
    plan = planned("sync_easgd", case, pipe=2, schedule=schedule, **axes)
    found = run_threads(plan.mesh(), lambda world: train_averaged(world, plan, case))
    assert_equals(found, train_workers(case, 2, tau=2, alpha=0.4))


def test_a_weight_that_two_stages_of_a_rank_share() -> None:
    case = dataclasses.replace(with_tau(1, alpha=0.25), model="wide_tied")
    plan = planned("sync_easgd", case, pipe=2, schedule="zero_bubble_v")
    found = run_threads(plan.mesh(), lambda world: train_averaged(world, plan, case))
    assert_equals(found, train_workers(case, 2, tau=1, alpha=0.25))


@cells(axes=[{}, {"pipe": 2}, {"z": 2}], tau=[1, 2])
def test_local_sgd_goes_to_the_mean(axes: dict[str, int], tau: int) -> None:
    case = with_tau(tau)
    plan = planned("local_sgd", case, **axes)
    found = run_threads(plan.mesh(), lambda world: train_averaged(world, plan, case))
    assert_equals(found, train_workers(case, 2, tau=tau, alpha=None))


OUTERS: dict[str, tuple[str, OuterFactory, dict[str, float]]] = {
    "slow_momentum": ("slow_momentum", slow_momentum(), {}),
    "slower": ("slow_momentum", slow_momentum(0.8, 0.3), {"outer_lr": 0.8, "outer_momentum": 0.3}),
    "diloco": ("diloco", diloco(), {}),
}


@cells(name=OUTERS, axes=[{}, {"pipe": 2}, {"z": 2}])
def test_an_outer_optimizer_moves_the_centre(name: str, axes: dict[str, int]) -> None:
    method, outer, given = OUTERS[name]
    case = with_tau(2, **given)
    plan = planned(method, case, **axes)
    found = run_threads(plan.mesh(), lambda world: train_averaged(world, plan, case))
    assert_equals(found, train_workers(case, 2, tau=2, alpha=None, outer=outer))


@cells(axes=[{}, {"pipe": 2}, {"x": 2}, {"pipe": 2, "z": 2}], tau=[1, 2])
def test_original_easgd_has_one_order_and_thus_one_result(axes: dict[str, int], tau: int) -> None:
    """The same server, wire and worker as Async EASGD, whose order is that of arrival."""
    case = with_tau(tau, alpha=0.3)
    plan = planned("original_easgd", case, **axes)
    found = run_threads(plan.mesh(), lambda world: train_averaged(world, plan, case))
    expected = train_workers(case, 2, tau=tau, alpha=0.3, in_turn=True)
    assert_equals(found, expected, drifts=True)


ALONE: dict[str, dict[str, Any]] = {
    "async_easgd": {"alpha": 0.4},
    "async_measgd": {"alpha": 0.4},
    "hogwild_easgd": {"alpha": 0.4},
    "async_sgd": {"outer": local_sgd()},
    "hogwild_sgd": {"outer": local_sgd()},
    "async_msgd": {"outer": slow_momentum(1.0, 0.9)},  # v = 0.9 v + update, c += v
}


@cells(method=ALONE, axes=[{}, {"pipe": 2}, {"z": 2}])
def test_one_worker_alone_has_one_order(method: str, axes: dict[str, int]) -> None:
    given = ALONE[method]
    alpha = given.get("alpha")
    case = with_tau(2, alpha=alpha)
    plan = dataclasses.replace(planned(method, case, **axes), data=1, microbatch_size=2)
    plan = dataclasses.replace(plan, num_microbatches=4 // plan.z)
    found = run_threads(plan.mesh(), lambda world: train_averaged(world, plan, case))
    assert_equals(found, train_workers(case, 1, tau=2, alpha=alpha, outer=given.get("outer")))


@cells(method=["async_sgd", "async_msgd", "async_easgd", "hogwild_sgd"], axes=[{}, {"pipe": 2}])
def test_workers_without_an_order_see_one_centre(method: str, axes: dict[str, int]) -> None:
    case = with_tau(1)
    plan = planned(method, case, **axes)
    found = run_threads(plan.mesh(), lambda world: train_averaged(world, plan, case))
    for one in found:
        assert one.num_exchanges == case.num_steps
        assert one.center_loss == found[0].center_loss
        assert all(torch.isfinite(tensor).all() for tensor in one.center.values())


def test_kept_blocks_are_gathered_again_for_the_centre() -> None:
    case = dataclasses.replace(with_tau(2, alpha=0.3), tensor=SETTINGS["kept"])
    plan = planned("sync_easgd", case, z=2)
    found = run_threads(plan.mesh(), lambda world: train_averaged(world, plan, case))
    assert_equals(found, train_workers(case, 2, tau=2, alpha=0.3))


def test_overlap_changes_no_bit() -> None:
    def weights(overlap: bool) -> list[object]:
        case = with_tau(1, beta=0.9, overlap=overlap)
        plan = planned("sync_easgd", case, z=2)
        found = run_threads(plan.mesh(), lambda world: train_averaged(world, plan, case))
        return [{n: w.tolist() for n, w in one.held.history.weights.items()} for one in found]

    assert weights(True) == weights(False)


def test_weights_that_have_versions_are_not_averaged() -> None:
    case = with_tau(1, beta=0.9)
    plan = planned("sync_easgd", case, pipe=2, schedule="two_bw")
    with pytest.raises(NotBuiltError, match=r"averaging.method = 'sync_easgd' .* 'two_bw'"):
        run_threads(plan.mesh(), lambda world: train_averaged(world, plan, case))


@pytest.mark.parametrize(
    ("method", "settings", "text"),
    [
        ("sync_easgd", {"beta": 1.2}, "beta = 1.2 .* above 1"),
        ("sync_easgd", {"alpha": 0.1, "beta": 0.9}, "exactly one of alpha, beta and rho"),
        ("sync_easgd", {"tau": 0}, "tau = 0"),
        ("local_sgd", {"beta": 0.9}, "beta = 0.9 has no meaning with .* outer optimizer"),
    ],
)
def test_impossible_settings_are_refused(
    method: str, settings: dict[str, float], text: str
) -> None:
    case = dataclasses.replace(CASE, averaging=AveragingSettings(**settings))  # type: ignore[arg-type]
    plan = planned(method, case)
    with pytest.raises(ConfigError, match=text):
        run_threads(plan.mesh(), lambda world: train_averaged(world, plan, case))


def with_statistics() -> list[nn.Module]:
    """Return the same blocks to every thread."""
    blocks = [nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)]
    generator = torch.Generator().manual_seed(5)
    for parameter in nn.ModuleList(blocks).double().parameters():
        nn.init.normal_(parameter, generator=generator)
    return blocks


def train_statistics(world: World, plan: Plan) -> dict[str, Tensor]:
    run = parallelize(
        with_statistics(),
        cross_entropy,
        torch.optim.SGD,
        plan,
        RunSettings(averaging=AveragingSettings(tau=1)),
        world=world,
    )
    list(run.steps([samples_of(world.coordinates.data)]))
    run.drain()
    return copies(run.model_tensors())


def samples_of(worker: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(worker)
    inputs = torch.randn(8, 4, generator=generator, dtype=torch.float64) + worker
    return inputs, torch.randint(3, (8,), generator=generator)


@pytest.mark.parametrize("pipe", [1, 2])
def test_running_statistics_are_averaged_and_not_those_of_the_first_worker(pipe: int) -> None:
    plan = Plan(data=2, pipe=pipe, microbatch_size=8, averaging="local_sgd")
    found = run_threads(plan.mesh(), lambda world: train_statistics(world, plan))
    means = []
    for worker in range(2):
        linear, norm, _ = with_statistics()
        norm(linear(samples_of(worker)[0]))
        means.append(norm.running_mean)
    expected = 0.5 * (means[0] + means[1])
    held = [tensors["1.running_mean"] for tensors in found if "1.running_mean" in tensors]
    assert len(held) == 2
    for mean in held:
        torch.testing.assert_close(mean, expected)
