"""An offloaded update equals the resident one, bit by bit, for every optimizer and bucket size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.offloading import (
    FACTORIES,
    MakeUpdate,
    assert_same_state,
    make_buckets,
    make_parameters,
    offloaded,
    plain,
    state_of,
    train,
)

pytestmark = pytest.mark.timeout(120)
NUM_STEPS = 20


def trained(
    make: MakeUpdate, optimizer: str, dtype: torch.dtype = torch.float32
) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    parameters = make_parameters(dtype)
    buckets = make_buckets(parameters)
    update = make(parameters, FACTORIES[optimizer], buckets)
    train(update, parameters, buckets, range(NUM_STEPS))
    state = {
        k: v.clone() if isinstance(v, torch.Tensor) else v
        for k, v in state_of(update, parameters).items()
    }
    update.close()
    return {name: p.detach() for name, p in parameters.items()}, state


@pytest.mark.parametrize("optimizer", FACTORIES)
@pytest.mark.parametrize("bucket_size", [2048, 5000, 1 << 22])
def test_equals_the_resident_update(optimizer: str, bucket_size: int, tmp_path: Path) -> None:
    weights, state = trained(offloaded("disk", tmp_path, bucket_size), optimizer)
    expected_weights, expected_state = trained(plain, optimizer)
    for name, expected in expected_weights.items():
        assert torch.equal(weights[name], expected), name
    assert_same_state(state, expected_state)
    assert not list(tmp_path.iterdir())  # a killed run would leave nothing behind


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_other_dtypes_and_the_host_tier(tier: str, dtype: torch.dtype, tmp_path: Path) -> None:
    weights, state = trained(offloaded(tier, tmp_path), "adamw", dtype)
    expected_weights, expected_state = trained(plain, "adamw", dtype)
    for name, expected in expected_weights.items():
        assert torch.equal(weights[name], expected), name
    assert_same_state(state, expected_state)
