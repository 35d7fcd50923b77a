"""The elastic force keeps sums, and the centre of a noisy quadratic is P times as steady."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ganglion.execute.averaging.methods.method import elastic_force, elastic_step_

ORDERS = st.lists(st.integers(0, 4), min_size=1, max_size=30)


def move_by_sum_(center: torch.Tensor, total: torch.Tensor, alpha: float, workers: int) -> None:
    center.mul_(1.0 - workers * alpha).add_(total, alpha=alpha)


@given(ORDERS, st.floats(0, 1), st.integers(0, 9))
def test_any_order_of_exchanges_keeps_the_sum(order: list[int], alpha: float, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    vectors = torch.randn(6, 8, dtype=torch.float64, generator=draw)
    total = vectors.sum(dim=0)
    for worker in order:
        elastic_step_(vectors[worker], vectors[5], alpha)
    assert torch.allclose(vectors.sum(dim=0), total, rtol=1e-12, atol=1e-12)


@given(st.integers(1, 6), st.floats(0, 1), st.integers(0, 9))
def test_a_synchronous_exchange_keeps_the_sum(workers: int, beta: float, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    vectors = torch.randn(workers, 8, dtype=torch.float64, generator=draw)
    center = torch.randn(8, dtype=torch.float64, generator=draw)
    total, alpha = vectors.sum(dim=0), beta / workers
    before = total + center
    forces = [elastic_force(w, center, alpha) for w in vectors]
    move_by_sum_(center, total, alpha, workers)
    after = sum((w - f for w, f in zip(vectors, forces, strict=True)), center)
    assert torch.allclose(after, before, rtol=1e-12, atol=1e-12)


# --- the variance of the centre -------------------------------------------------------------------

LR, BETA, NOISE = 0.1, 0.9, 1.0


def exact_variance(num_workers: int) -> float:
    """The steady variance of the centre on x^2 / 2, from the linear map of one step alone."""
    alpha = BETA / num_workers
    step = np.zeros((num_workers + 1, num_workers + 1))
    np.fill_diagonal(step[:-1, :-1], 1 - LR - alpha)
    step[:-1, -1] = step[-1, :-1] = alpha
    step[-1, -1] = 1 - BETA
    noise = np.diag([LR**2 * NOISE**2] * num_workers + [0.0])
    covariance = np.zeros_like(noise)
    for _ in range(2000):
        covariance = step @ covariance @ step.T + noise
    return float(covariance[-1, -1])


def measured_variance(num_workers: int, num_runs: int = 3000, num_steps: int = 200) -> float:
    """The same of the code, over many runs at once."""
    draw = torch.Generator().manual_seed(num_workers)
    workers = torch.zeros(num_workers, num_runs, dtype=torch.float64)
    center, alpha = torch.zeros(num_runs, dtype=torch.float64), BETA / num_workers
    for _ in range(num_steps):
        noise = torch.randn(workers.shape, generator=draw, dtype=torch.float64)
        forces = elastic_force(workers, center, alpha)
        move_by_sum_(center, workers.sum(dim=0), alpha, num_workers)
        workers -= LR * (workers + NOISE * noise) + forces
    return float(center.var())


@pytest.mark.parametrize("num_workers", [1, 6])
def test_the_centre_varies_as_the_theory_says(num_workers: int) -> None:
    assert measured_variance(num_workers) == pytest.approx(exact_variance(num_workers), rel=0.1)


def test_more_workers_steady_the_centre_in_proportion() -> None:
    variances = {p: measured_variance(p, num_runs=2000) * p for p in (8, 32)}
    assert variances[32] == pytest.approx(variances[8], rel=0.2)
