"""One rate is given, alpha follows, and its bounds are where a quadratic really diverges."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ganglion.decide.plan import ASYNC, HOGWILD, ROUND_ROBIN, SYNC
from ganglion.decide.schedules.exchanges.elastic_rates import (
    ElasticRate,
    round_robin_alpha_limit,
    sync_alpha_limit,
)
from ganglion.errors import ConfigError

WORKERS = [1, 2, 4, 8, 16]


# --- the serial simulation: one weight each, loss h x^2 / 2, written from the equations -----------


def sync_step(state: np.ndarray, x: float, alpha: float) -> np.ndarray:
    workers, center = state[:-1], state[-1]
    moved = workers - x * workers - alpha * (workers - center)
    return np.append(moved, center + alpha * np.sum(workers - center))


def round_robin_lap(state: np.ndarray, x: float, alpha: float) -> np.ndarray:
    state = state.copy()
    for j in range(len(state) - 1):
        worker, center = state[j], state[-1]
        state[j] = worker - x * worker - alpha * (worker - center)
        state[-1] = center + alpha * (worker - center)
    return state


def radius(step, num_workers: int, x: float, alpha: float) -> float:  # type: ignore[no-untyped-def]
    """The factor by which the worst state grows in one step of the linear map."""
    columns = [step(unit, x, alpha) for unit in np.eye(num_workers + 1)]
    return float(np.abs(np.linalg.eigvals(np.array(columns).T)).max())


def empirical_limit(num_workers: int, x: float) -> float:
    low, high = 1e-6, 3.0
    for _ in range(40):
        middle = (low + high) / 2
        stable = radius(sync_step, num_workers, x, middle) < 1
        low, high = (middle, high) if stable else (low, middle)
    return low


# --- bounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("x", [0.001, 0.1, 0.5, 1.0, 1.5, 1.9])
def test_synchronous_bound_is_where_the_quadratic_diverges(num_workers: int, x: float) -> None:
    assert empirical_limit(num_workers, x) == pytest.approx(
        sync_alpha_limit(num_workers, x), rel=0.01
    )


@pytest.mark.parametrize("num_workers", WORKERS)
def test_no_instability_inside_the_round_robin_region(num_workers: int) -> None:
    draw = np.random.default_rng(num_workers)
    for _ in range(300):
        x = draw.uniform(0, 2)
        alpha = draw.uniform(0, 1) * round_robin_alpha_limit(x)
        assert radius(round_robin_lap, num_workers, x, alpha) <= 1 + 1e-9, (x, alpha)


@pytest.mark.parametrize("num_workers", WORKERS)
def test_the_round_robin_region_is_nearly_tight(num_workers: int) -> None:
    draw = np.random.default_rng(num_workers)
    outside = []
    for _ in range(200):
        x = draw.uniform(0, 1.9)
        alpha = round_robin_alpha_limit(x) * draw.uniform(1.02, 2.0)
        outside.append(radius(round_robin_lap, num_workers, x, alpha) > 1)
    assert np.mean(outside) > 0.9


def test_published_limits_of_small_learning_rates() -> None:
    assert sync_alpha_limit(4) == pytest.approx(0.4)
    assert sync_alpha_limit(8) == pytest.approx(0.222, abs=5e-4)
    assert sync_alpha_limit(16) == pytest.approx(0.118, abs=5e-4)
    assert round_robin_alpha_limit() == 1.0


@pytest.mark.parametrize("x", [2.0, 3.0, 5.0])
def test_too_high_a_learning_rate_leaves_no_stable_alpha(x: float) -> None:
    assert sync_alpha_limit(4, x) == 0 == round_robin_alpha_limit(x)
    for mode in [SYNC, ASYNC, HOGWILD, ROUND_ROBIN]:
        with pytest.raises(ConfigError, match="lower beta or lr"):
            ElasticRate(beta=0.1).checked_alpha(1.0, 4, 1, mode, curvature=x)


# --- one rate of three ----------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{}, {"alpha": 0.1, "beta": 0.4}, {"beta": 0.9, "rho": 1.0}])
def test_exactly_one_rate(given: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="exactly one of alpha, beta and rho") as refusal:
        ElasticRate(**given)  # type: ignore[arg-type]
    assert all(f"{name} = {value}" in str(refusal.value) for name, value in given.items())


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_what_is_no_rate_is_refused_by_name(value: float) -> None:
    with pytest.raises(ConfigError, match=f"rho = {value} is no rate"):
        ElasticRate(rho=value)


def test_alpha_of_each_convention() -> None:
    assert ElasticRate(alpha=0.2).alpha_of(0.1, 4, 10) == 0.2
    assert ElasticRate(beta=0.9).alpha_of(0.1, 6, 100) == pytest.approx(0.15)  # mpiT's launcher
    assert ElasticRate(rho=2.0).alpha_of(0.1, 4, 10) == pytest.approx(0.2)
    # TensorFlow's ElasticAverageOptimizer: 0.9 / period / num_worker
    amortised = ElasticRate(beta=0.9, amortise=True)
    assert amortised.alpha_of(0.1, 4, 10) == pytest.approx(0.9 / 10 / 4)


@given(st.floats(0, 1), st.integers(1, 64), st.integers(1, 100), st.booleans())
def test_beta_is_shared_by_all_workers(beta: float, workers: int, tau: int, spread: bool) -> None:
    alpha = ElasticRate(beta=beta, amortise=spread).alpha_of(0.1, workers, tau)
    assert alpha * workers * (tau if spread else 1) == pytest.approx(beta)


# --- guards ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [SYNC, ASYNC, HOGWILD, ROUND_ROBIN])
def test_beta_above_one_is_refused_with_its_numbers(mode: str) -> None:
    with pytest.raises(ConfigError, match=r"beta = 4 workers \* alpha = 1\.2, above 1"):
        ElasticRate(alpha=0.3).checked_alpha(0.1, 4, 1, mode)


def test_beta_of_one_and_zero_are_fine() -> None:
    for workers in WORKERS[1:]:
        assert ElasticRate(beta=1.0).checked_alpha(0.1, workers, 1) == pytest.approx(1 / workers)
        assert ElasticRate(beta=0.0).checked_alpha(0.1, workers, 1) == 0.0


def test_one_worker_and_its_centre_must_not_just_change_places() -> None:
    with pytest.raises(ConfigError, match=r"= 1 with P = 1"):
        ElasticRate(beta=1.0).checked_alpha(0.1, 1, 1)


def test_unsafe_lifts_the_first_bound_and_not_the_second() -> None:
    asked = ElasticRate(alpha=0.39, unsafe=True)
    assert asked.checked_alpha(0.1, 4, 1, SYNC) == 0.39
    assert asked.checked_alpha(0.1, 8, 1, ASYNC) == 0.39
    for mode in (SYNC, HOGWILD):
        with pytest.raises(ConfigError, match=r"alpha must stay below .* = 0\.4 with P = 4"):
            ElasticRate(alpha=0.4, unsafe=True).checked_alpha(0.1, 4, 1, mode)
    for mode in (ROUND_ROBIN, ASYNC):
        with pytest.raises(ConfigError, match=r"\(4 - 2x\) / \(4 - x\) = 1,"):
            ElasticRate(alpha=1.01, unsafe=True).checked_alpha(0.1, 4, 1, mode)


def test_rho_is_checked_again_when_the_learning_rate_rises() -> None:
    rate = ElasticRate(rho=2.0)
    assert rate.checked_alpha(0.1, 4, 1) == pytest.approx(0.2)
    with pytest.raises(ConfigError, match=r"rho = 2 gives alpha = 0\.4"):
        rate.checked_alpha(0.2, 4, 1)


@pytest.mark.parametrize("mode", [SYNC, ASYNC, ROUND_ROBIN, HOGWILD])
def test_beta_follows_the_number_of_workers_both_ways(mode: str) -> None:
    rate = ElasticRate(beta=0.9)
    for workers in (4, 5, 3, 2, 1):
        assert rate.following_alpha(0.1, workers, 1, mode) == pytest.approx(0.9 / workers)
    assert ElasticRate(beta=0.9, amortise=True).following_alpha(0.1, 2, 3, mode) == 0.15


def test_beta_follows_no_further_than_is_stable() -> None:
    """One worker with alpha = 1 and its centre just change places: it draws as one of two."""
    assert ElasticRate(beta=1.0).following_alpha(0.1, 1, 1, SYNC) == 0.5
    assert ElasticRate(beta=1.0).following_alpha(0.1, 1, 1, ASYNC) == 1.0
    asked = ElasticRate(beta=1.5, unsafe=True)
    assert asked.checked_alpha(0.1, 4, 1, SYNC) == 0.375
    assert asked.following_alpha(0.1, 3, 1, SYNC) == 0.375  # not 0.5, the edge with three
    assert asked.following_alpha(0.1, 1, 1, ASYNC) == 0.75
    for workers in range(1, 9):
        for mode in (SYNC, ASYNC, HOGWILD):
            alpha = asked.following_alpha(0.1, workers, 1, mode)
            assert ElasticRate(alpha=alpha, unsafe=True).checked_alpha(0.1, workers, 1, mode)


@pytest.mark.parametrize("rate", [ElasticRate(alpha=0.2), ElasticRate(rho=2.0)])
def test_a_rate_for_each_worker_stays_when_others_go(rate: ElasticRate) -> None:
    assert [rate.following_alpha(0.1, workers, 1) for workers in (4, 3, 1)] == [0.2] * 3
    with pytest.raises(ConfigError, match="above 1"):
        rate.following_alpha(0.1, 6, 1)


def test_following_lifts_no_bound() -> None:
    with pytest.raises(ConfigError, match="above 1"):
        ElasticRate(beta=1.2).following_alpha(0.1, 4, 1)
