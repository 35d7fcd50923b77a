"""What a user types: hooks on any optimizer, the centre for evaluation, and refusals by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ganglion.decide.topology import Mesh
from ganglion.errors import ConfigError, ProtocolError
from ganglion.execute.averaging.average import ElasticAverage
from ganglion.execute.averaging.methods.metrics import BREAKDOWN
from ganglion.execute.averaging.methods.outer import local_sgd
from ganglion.execute.comm import World, run_threads
from tests.support.averages import (
    LR,
    assert_same_bits,
    batch,
    copies,
    loss_of,
    make_model,
    momentum_sgd,
    plain_sgd,
    train_steps,
    train_threads,
)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": momentum_sgd,
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.01),
    "tensor lr": lambda ps: torch.optim.Adam(ps, lr=torch.tensor(0.01)),
}


def one(**wishes: Any) -> tuple[nn.Module, torch.optim.Optimizer, ElasticAverage]:
    model = make_model()
    optimizer = plain_sgd(model.parameters())
    return model, optimizer, ElasticAverage(model, optimizer, **wishes)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_is_followed(name: str) -> None:
    """The force is what the optimizer's own step leaves between old weights and new ones."""
    alpha = 0.2

    def body(world: World) -> None:
        model, twin = make_model(), make_model()
        optimizer, other = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](twin.parameters())
        average = ElasticAverage(model, optimizer, alpha=alpha, tau=1, world=world)
        with average:
            for step in range(4):
                with average.center_weights():
                    center = copies(model)
                forces = {n: alpha * (w - center[n]) for n, w in copies(model).items()}
                train_steps(model, optimizer, world.rank, range(step, step + 1))
                train_steps(twin, other, world.rank, range(step, step + 1))
                for key, parameter in twin.named_parameters():
                    parameter.data -= forces[key]
                for key, weight in copies(model).items():
                    assert torch.allclose(weight, copies(twin)[key], rtol=1e-12, atol=1e-12)

    run_threads(Mesh(data=2), body)


def test_without_a_launcher_it_runs_alone() -> None:
    model, optimizer, average = one(beta=0.9, tau=2)
    with average:
        losses = train_steps(model, optimizer, 0, range(30))
    assert losses[-1] < losses[0]
    assert average.metrics().num_workers == 1


def test_outside_the_block_nothing_is_followed() -> None:
    model, optimizer, average = one(beta=0.9, tau=1)
    train_steps(model, optimizer, 0, range(2))
    assert average.metrics().num_steps == 0
    with average:
        train_steps(model, optimizer, 0, range(2))
    train_steps(model, optimizer, 0, range(2))
    with average:
        train_steps(model, optimizer, 0, range(1))
    assert average.metrics().num_steps == 3


def test_one_block_at_a_time() -> None:
    _, _, average = one(beta=0.9)
    with average, pytest.raises(ConfigError, match="entered already"), average:
        pass


def test_evaluation_does_not_start_an_exchange() -> None:
    def evaluate(model: nn.Module, average: ElasticAverage) -> None:
        x = batch(9, 0)[0]
        with average.center_weights():
            model(x)
        with torch.no_grad():
            model(x)
        model.eval()
        model(x)
        model.train()

    def body(world: World, evaluates: bool) -> dict[str, torch.Tensor]:
        model = make_model()
        optimizer = plain_sgd(model.parameters())
        with ElasticAverage(model, optimizer, beta=0.9, tau=1, world=world) as average:
            for step in range(3):
                train_steps(model, optimizer, world.rank, range(step, step + 1))
                if evaluates and world.rank == 0:  # alone, also where no step follows
                    evaluate(model, average)
        return copies(model)

    plain = run_threads(Mesh(data=2), lambda world: body(world, False), timeout_s=5)
    found = run_threads(Mesh(data=2), lambda world: body(world, True), timeout_s=5)
    for weights, wanted in zip(found, plain, strict=True):
        assert_same_bits(weights, wanted)


def test_several_passes_make_one_step() -> None:
    def body(world: World) -> dict[str, torch.Tensor]:
        model = make_model()
        optimizer = plain_sgd(model.parameters())
        with ElasticAverage(model, optimizer, beta=0.9, tau=1, world=world) as average:
            for step in range(3):
                for part in range(2):
                    x, y = batch(world.rank, 10 * step + part)
                    loss_of(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert average.metrics().num_exchanges == 3
        return copies(model)

    run_threads(Mesh(data=2), body)


# --- the centre -----------------------------------------------------------------------------------


def test_the_centre_is_swapped_in_and_out() -> None:
    def body(world: World) -> None:
        model = make_model()
        optimizer = plain_sgd(model.parameters())
        average = ElasticAverage(model, optimizer, beta=0.5, tau=1, world=world)
        with average:
            train_steps(model, optimizer, world.rank, range(3))
        own = copies(model)
        with average.center_weights() as same_model:
            assert same_model is model
            center = copies(model)
            assert not torch.equal(center["0.weight"], own["0.weight"])
            model[0].weight.data.zero_()  # whatever happens in here is forgotten
        assert_same_bits(copies(model), own)
        with average.center_weights():
            assert_same_bits(copies(model), center)

    run_threads(Mesh(data=2), body)


def test_an_error_in_the_evaluation_brings_the_weights_back() -> None:
    model, _, average = one(beta=0.5)
    own = copies(model)

    def evaluate() -> None:
        with average.center_weights():
            model[0].weight.data.zero_()
            raise RuntimeError("no such metric")

    with pytest.raises(RuntimeError, match="no such metric"):
        evaluate()
    assert_same_bits(copies(model), own)


@pytest.mark.parametrize("what", ["step", "sync_now", "state_dict", "center_weights", "load"])
def test_the_centre_cannot_be_trained_by_mistake(what: str) -> None:
    model, optimizer, average = one(beta=0.5, tau=1)
    state = average.state_dict()
    calls: dict[str, Callable[[], object]] = {
        "step": lambda: train_steps(model, optimizer, 0, range(1)),
        "sync_now": average.sync_now,
        "state_dict": average.state_dict,
        "center_weights": lambda: average.center_weights().__enter__(),
        "load": lambda: average.load_state_dict(state),
    }
    with (
        average,
        average.center_weights(),
        pytest.raises(ConfigError, match=r"inside center_weights\(\)"),
    ):
        calls[what]()


@pytest.mark.parametrize("wishes", [
    {"beta": 0.9}, {"beta": 0.9, "center": "delta"}, {"beta": 0.9, "compress": "bf16"},
    {"outer": local_sgd()},
])  # fmt: skip
def test_digests_of_the_centre_are_equal(wishes: dict[str, Any]) -> None:
    def body(world: World) -> int:
        model = make_model(torch.float32)
        optimizer = plain_sgd(model.parameters())
        average = ElasticAverage(model, optimizer, tau=1, world=world, **wishes)
        with average:
            train_steps(model, optimizer, world.rank, range(5))
        return average.check_center()

    assert len(set(run_threads(Mesh(data=4), body))) == 1


def test_a_centre_that_drifted_is_told_by_digest() -> None:
    def body(world: World) -> None:
        model = make_model(torch.float32)
        average = ElasticAverage(model, plain_sgd(model.parameters()), beta=0.9, world=world)
        if world.rank == 1:
            center = average._method.center()
            center[3] = torch.nextafter(center[3], torch.tensor(9.0))
        average.check_center()

    with pytest.raises(ProtocolError, match=r"the centre differs between workers, digests by rank"):
        run_threads(Mesh(data=3), body)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_have_a_wide_centre(dtype: torch.dtype) -> None:
    def body(world: World) -> None:
        model = make_model(dtype)
        optimizer = plain_sgd(model.parameters())
        average = ElasticAverage(model, optimizer, beta=0.9, tau=1, world=world)
        with average:
            train_steps(model, optimizer, world.rank, range(5))
        center = average._method.center()
        assert center.dtype == torch.float32
        assert not torch.equal(center, center.to(dtype).float())  # finer than the weights

    run_threads(Mesh(data=2), body)


def test_autocast_and_a_gradient_scaler() -> None:
    def body(world: World) -> int:
        model = make_model(torch.float32)
        optimizer = plain_sgd(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        with ElasticAverage(model, optimizer, beta=0.9, tau=1, world=world) as average:
            for step in range(4):
                optimizer.zero_grad(set_to_none=True)
                x, y = batch(world.rank, step, torch.float32)
                with torch.autocast("cpu", torch.bfloat16):
                    loss = loss_of(model(x).float(), y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        average.check_center()
        return average.metrics().num_exchanges

    assert run_threads(Mesh(data=2), body) == [4, 4]


def test_weights_that_were_moved_are_told_at_the_next_exchange() -> None:
    model, optimizer, average = one(beta=0.9, tau=1)
    with average:
        train_steps(model, optimizer, 0, range(1))
        model[0].bias.data = model[0].bias.data.clone()
        with pytest.raises(ConfigError, match=r"0\.bias left the packed memory"):
            train_steps(model, optimizer, 0, range(1))
        average.repack()
        train_steps(model, optimizer, 0, range(1))


# --- metrics --------------------------------------------------------------------------------------


def test_metrics_tell_what_happened() -> None:
    for trained in train_threads(2, 6, beta=0.9, tau=2):
        metrics = trained.metrics
        assert (metrics.num_steps, metrics.num_exchanges, metrics.num_discarded) == (6, 3, 0)
        assert metrics.staleness == {0: 3}
        assert 0 < metrics.consensus < 1 and metrics.force > 0
        assert 0 <= metrics.exposed_s <= metrics.wait_s
        assert set(metrics.seconds) <= set(BREAKDOWN)
        assert metrics.seconds["fwd_bwd"] > 0


@pytest.mark.parametrize(
    ("wishes", "travels", "moves"),
    [
        ({"center": "replicated"}, "param_dev_dev", None),
        ({"center": "host_root", "overlap": False}, "param_host_dev", "upd_host"),
        ({"mode": "async"}, "param_host_dev", "upd_host"),
    ],
)
def test_time_has_six_parts_and_none_counts_twice(
    wishes: Any, travels: str, moves: str | None
) -> None:
    seconds = train_threads(2, 6, beta=0.9, tau=1, **wishes)[0].metrics.seconds
    assert set(seconds) == set(BREAKDOWN)
    assert seconds[travels] > 0
    assert (seconds["upd_host"] > 0) == (moves is not None)
    other = {"param_dev_dev", "param_host_dev"} - {travels}
    assert seconds[other.pop()] == 0.0


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({}, "exactly one of alpha, beta and rho, got none"),
        ({"alpha": 0.1, "rho": 1.0}, "got alpha = 0.1, rho = 1.0"),
        ({"beta": 1.5}, "above 1"),
        ({"beta": 0.9, "tau": 0}, "tau = 0"),
        (
            {"beta": 0.9, "q": 0.5},
            "q = 0.5 has no meaning",
        ),
        ({"beta": 0.9, "delay": 2}, "delay = 2 has no meaning"),
        ({"beta": 0.9, "fragments": 2}, "fragments = 2 has no meaning"),
        (
            {"beta": 0.9, "outer": local_sgd()},
            "and an outer optimizer: leave",
        ),
        ({"mode": "sync_sgd", "beta": 0.9}, 'beta = 0.9 has no meaning with mode = "sync_sgd"'),
        ({"mode": "sync_sgd", "reduction": "max"}, 'reduction = "max"'),
        ({"mode": "async", "beta": 0.9, "outer": local_sgd()}, 'no meaning with mode = "async"'),
        ({"mode": "async", "beta": 0.9, "center": "root"}, 'center = "root" does not fit'),
        ({"mode": "async", "beta": 0.9, "center": "sharded:2"}, "from 1 to the 1 workers"),
        ({"mode": "async_sgd", "beta": 0.9}, "beta = 0.9 has no meaning"),
        ({"mode": "hogwild", "beta": 1.2}, "above 1"),
        ({"beta": 0.9, "center_momentum": 0.9}, "center_momentum = 0.9 has no meaning"),
        ({"beta": 0.9, "max_staleness": 3}, "max_staleness = 3 has no meaning"),
        ({"mode": "sync_sgd", "center": "root"}, "center = root has no meaning"),
        ({"beta": 0.9, "reduction": "sum"}, "reduction = sum has no meaning"),
        ({"outer": local_sgd(), "unsafe": True}, "unsafe = True has no meaning"),
        ({"mode": "hogwild", "beta": 0.9, "pack": False}, "pack = False has no meaning"),
        ({"mode": "async", "beta": 0.9, "deterministic": True}, "deterministic=True has no"),
        ({"mode": "best", "beta": 0.9}, 'mode = "best" is not one of'),
        ({"beta": 0.9, "center": "left"}, 'center = "left" is not one of'),
        ({"outer": local_sgd(), "center": "root"}, 'center="replicated"'),
        ({"outer": local_sgd(), "tau": 4, "fragments": 5}, "fragments = 5"),
        ({"outer": local_sgd(), "tau": 4, "delay": 5}, "delay = 5"),
        ({"beta": 0.9, "bucket_mb": 0.0}, "bucket_mb = 0.0 holds nothing"),
        ({"rho": 1.1 / LR}, "rho = 22 gives alpha = 1.1"),
    ],
)
def test_a_wish_that_cannot_be_fulfilled(wishes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        one(**wishes)
    assert message in str(refusal.value)


def test_workers_with_other_arguments_are_told() -> None:
    def body(world: World) -> None:
        model = make_model()
        ElasticAverage(
            model, plain_sgd(model.parameters()), beta=0.9, tau=2 + world.rank // 2, world=world
        )

    with pytest.raises(ConfigError, match=r"rank [02] averages with other arguments .*'tau': [23]"):
        run_threads(Mesh(data=3), body)


def test_beta_above_one_by_name() -> None:
    with pytest.raises(ConfigError, match="2 workers"):
        train_threads(2, 1, beta=1.1)
    assert train_threads(2, 3, beta=1.1, unsafe=True, tau=1)[0].metrics.num_exchanges == 3
