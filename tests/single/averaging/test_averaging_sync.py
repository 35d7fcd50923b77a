"""Sync EASGD and Sync SGD are their equations, wherever the centre is and whatever overlaps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ganglion.decide.topology import Mesh
from ganglion.errors import CommError, PeerLost
from ganglion.execute.averaging.average import ElasticAverage
from ganglion.execute.comm import World, run_threads
from tests.support.averages import (
    LR,
    assert_near,
    assert_same_bits,
    batch,
    copies,
    gradient,
    loss_of,
    make_model,
    momentum_sgd,
    plain_sgd,
    redraw,
    serial_easgd,
    train_steps,
    train_threads,
)

CENTERS = ["replicated", "delta", "root", "host_root"]


@pytest.mark.parametrize("center", CENTERS)
@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_every_centre_is_the_serial_simulation(center: str, num_workers: int) -> None:
    workers, wanted = serial_easgd(num_workers, 7, alpha=0.8 / num_workers)
    found = train_threads(num_workers, 7, beta=0.8, tau=1, center=center)
    for worker, trained in zip(workers, found, strict=True):
        assert_near(trained.weights, worker)
    assert_near(found[0].center, wanted)  # at the root, only the first has the newest


@pytest.mark.parametrize("tau", [1, 2, 3, 10])
@pytest.mark.parametrize("optimizer_of", [plain_sgd, momentum_sgd])
def test_every_period_with_and_without_momentum(tau: int, optimizer_of: object) -> None:
    momentum = 0.9 if optimizer_of is momentum_sgd else 0.0
    workers, wanted = serial_easgd(3, 11, alpha=0.3, tau=tau, momentum=momentum)
    found = train_threads(3, 11, alpha=0.3, tau=tau, optimizer_of=optimizer_of)
    for worker, trained in zip(workers, found, strict=True):
        assert_near(trained.weights, worker)
        assert_near(trained.center, wanted)
    assert found[0].metrics.num_exchanges == -(-11 // tau)


@pytest.mark.parametrize("rate", [{"alpha": 0.2}, {"beta": 0.6}, {"rho": 0.2 / LR}])
def test_the_three_rates_mean_the_same_at_a_constant_learning_rate(rate: dict[str, float]) -> None:
    workers, wanted = serial_easgd(3, 5, alpha=0.2)
    found = train_threads(3, 5, tau=1, **rate)
    assert_near(found[2].weights, workers[2])
    assert_near(found[0].center, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("center", CENTERS)
def test_overlap_keeps_every_bit(center: str, dtype: torch.dtype) -> None:
    """Version 3 is version 2."""
    runs = [
        train_threads(
            4, 9, beta=0.9, tau=2, center=center, overlap=overlap, dtype=dtype,
            optimizer_of=momentum_sgd,
        )
        for overlap in (False, True)
    ]  # fmt: skip
    for waiting, overlapped in zip(*runs, strict=True):
        assert_same_bits(overlapped.weights, waiting.weights)
        assert_same_bits(overlapped.center, waiting.center)
        assert overlapped.losses == waiting.losses


def test_an_overlapped_exchange_starts_before_the_forward_and_ends_before_the_step() -> None:
    """The order of events, in place of a measured time."""
    order: list[str] = []

    def body(world: World) -> None:
        model = make_model(seed=world.rank)
        optimizer = plain_sgd(model.parameters())
        average = ElasticAverage(model, optimizer, beta=0.5, tau=2, world=world)
        if world.rank == 0:
            sums = average._method._center.sums  # type: ignore[attr-defined]
            start, wait = sums.start, sums.wait
            sums.start = lambda: (order.append("start"), start())
            sums.wait = lambda: (order.append("wait"), wait())[1]
            model.register_forward_hook(lambda *_: order.append("forward"))
            model[0].weight.register_hook(lambda *_: order.append("backward"))
            optimizer.register_step_post_hook(lambda *_: order.append("step"))
        with average:
            train_steps(model, optimizer, world.rank, range(3))

    run_threads(Mesh(data=2), body)
    first, second, third = ["start", "forward", "backward", "wait", "step"], 5, 8
    assert order[:second] == first
    assert order[second:third] == ["forward", "backward", "step"]
    assert order[third:] == first


def test_rate_zero_leaves_independent_workers() -> None:
    for rank, trained in enumerate(train_threads(3, 6, alpha=0.0, tau=1)):
        model = make_model()
        train_steps(model, plain_sgd(model.parameters()), rank, range(6))
        assert_same_bits(trained.weights, copies(model))


@pytest.mark.parametrize("overlap", [True, False])
def test_one_worker_at_rate_zero_is_plain_training_bit_by_bit(overlap: bool) -> None:
    model = make_model(torch.float32)
    train_steps(model, momentum_sgd(model.parameters()), 0, range(6))
    (alone,) = train_threads(
        1, 6, alpha=0.0, tau=1, overlap=overlap, dtype=torch.float32, optimizer_of=momentum_sgd
    )
    assert_same_bits(alone.weights, copies(model))


def test_workers_begin_with_the_weights_of_the_first() -> None:
    (first, *others) = train_threads(3, 0, beta=0.9)
    assert_same_bits(first.weights, copies(make_model(seed=0)))
    for other in others:
        assert_same_bits(other.weights, first.weights)
        assert_same_bits(other.center, first.weights)


@pytest.mark.parametrize(("rate", "factor"), [({"rho": 4.0}, 0.5), ({"beta": 0.4}, 1.0)])
def test_only_rho_follows_the_learning_rate(rate: dict[str, float], factor: float) -> None:
    def body(world: World) -> list[float]:
        model = make_model()
        optimizer = plain_sgd(model.parameters())
        average = ElasticAverage(model, optimizer, tau=99, world=world, **rate)
        alphas = []
        for lr in (LR, LR / 2):
            optimizer.param_groups[0]["lr"] = lr
            model[0].bias.data.fill_(world.rank)
            with average.center_weights():
                size = torch.cat([w.flatten() for w in copies(model).values()]).norm()
            distance = average.metrics().consensus * float(size)
            average.sync_now()
            alphas.append(average.metrics().force / distance)
        return alphas

    for at_full, at_half in run_threads(Mesh(data=2), body):
        assert at_full == pytest.approx(0.2)
        assert at_half == pytest.approx(0.2 * factor)


# --- packing --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bucket", [{"pack": False}, {"bucket_mb": 1e-9}, {"bucket_mb": 4e-4}, {"bucket_mb": 6e-4}, {}]
)
@pytest.mark.parametrize("center", CENTERS)
def test_every_parameter_is_exchanged_in_buckets_of_any_size(
    bucket: dict[str, object], center: str
) -> None:
    wanted = train_threads(2, 3, beta=0.9, tau=1, center=center)
    found = train_threads(2, 3, beta=0.9, tau=1, center=center, **bucket)
    for trained, reference in zip(found, wanted, strict=True):
        assert_same_bits(trained.weights, reference.weights)
        assert_same_bits(trained.center, reference.center)
    start = copies(make_model(seed=0))
    assert all(not torch.equal(found[0].center[name], start[name]) for name in start)


def test_bytes_are_counted() -> None:
    (first, _) = train_threads(2, 4, beta=0.9, tau=2)
    numel = 64 * (1 + 1 + 1 + 1)  # four tensors, each filled up to 64 elements
    assert first.metrics.sent_bytes == 2 * (numel + 2) * 8  # two exchanges, with two votes


# --- votes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("center", CENTERS)
def test_a_worker_without_finite_weights_stops_the_exchange_for_all(center: str) -> None:
    def body(world: World) -> tuple[bool, bool, int]:
        model = make_model(seed=0)
        optimizer = plain_sgd(model.parameters())
        average = ElasticAverage(model, optimizer, beta=0.9, tau=1, center=center, world=world)
        with average:
            train_steps(model, optimizer, world.rank, range(2))
            if world.rank == 1:
                model[0].weight.data[0, 0] = float("nan")
            before = copies(model)
            with average.center_weights():
                center_before = copies(model)
            average.sync_now()
            with average.center_weights():
                same = all(torch.equal(center_before[n], w) for n, w in copies(model).items())
            kept = all(
                torch.equal(before[n], w) for n, w in copies(model).items() if n != "0.weight"
            )
        return same, kept, average.metrics().num_discarded

    results = run_threads(Mesh(data=3), body)
    if center in ("root", "host_root"):  # the others only learn of the root's newest
        results = results[:1]
    assert results == [(True, True, 1)] * len(results)


def test_refusals_end_the_run_and_name_the_worker() -> None:
    def body(world: World) -> None:
        model = make_model(seed=0)
        optimizer = plain_sgd(model.parameters())
        with ElasticAverage(model, optimizer, beta=0.9, tau=1, world=world):
            if world.rank == 1:
                model[0].weight.data[0, 0] = float("nan")
            train_steps(model, optimizer, world.rank, range(9))

    with pytest.raises(CommError, match=r"workers \[1\] refused exchange 3"):
        run_threads(Mesh(data=2), body)


@pytest.mark.parametrize("center", CENTERS)
def test_a_lost_worker_leaves_weights_and_centre_as_they_were(center: str) -> None:
    """The exchange is applied by nobody: what is left can be saved, or go on among the others."""
    found: dict[int, bool] = {}

    def body(world: World) -> None:
        model = make_model(seed=0)
        optimizer = plain_sgd(model.parameters())
        average = ElasticAverage(model, optimizer, beta=0.9, tau=1, center=center, world=world)
        with average:
            train_steps(model, optimizer, world.rank, range(2))
            if world.rank == 2:
                raise RuntimeError("the end of worker 2")
            before = copies(model)
            with average.center_weights():
                center_before = copies(model)
            with pytest.raises(PeerLost, match="lacks ranks"):
                train_steps(model, optimizer, world.rank, range(2, 3))
        found[world.rank] = all(torch.equal(before[n], w) for n, w in copies(model).items())
        with average.center_weights():
            found[world.rank] &= all(
                torch.equal(center_before[n], w) for n, w in copies(model).items()
            )

    with pytest.raises(RuntimeError, match="the end of worker 2"):
        run_threads(Mesh(data=3), body, timeout_s=5)
    assert found == {0: True, 1: True}


# --- Sync SGD -------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_sync_sgd_is_one_model_with_all_batches(reduction: str) -> None:
    model, weights = make_model(), copies(make_model())
    for step in range(5):
        slopes = [gradient(model, weights, rank, step) for rank in range(3)]
        scale = 1 if reduction == "sum" else 1 / 3
        weights = {n: w - LR * scale * sum(s[n] for s in slopes) for n, w in weights.items()}
    for trained in train_threads(3, 5, mode="sync_sgd", reduction=reduction):
        assert_near(trained.weights, weights)
        assert_same_bits(trained.center, trained.weights)


def test_sync_sgd_of_a_parameter_without_gradient_on_one_worker() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.other = nn.Linear(5, 3), nn.Linear(5, 3)

        def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
            return self.used(x) + (self.other(x) if both else 0)

    def body(world: World) -> dict[str, torch.Tensor]:
        model = redraw(Sometimes(), 0).double()
        optimizer = plain_sgd(model.parameters())
        with ElasticAverage(model, optimizer, mode="sync_sgd", reduction="sum", world=world):
            x, y = batch(0, 0)
            loss_of(model(x, both=world.rank == 1), y).backward()
            optimizer.step()
        return copies(model)

    first, second = run_threads(Mesh(data=2), body)
    assert_same_bits(first, second)
    fresh = copies(redraw(Sometimes(), 0).double())
    assert not torch.equal(first["other.weight"], fresh["other.weight"])
