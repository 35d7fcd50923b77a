"""An offloaded update equals the resident one, bit by bit, for every optimizer and bucket size."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ganglion.decide.schedules.buckets.program import NUM_SLOTS
from ganglion.trace import Recorder
from tests.support.offloading import (
    FACTORIES,
    Offloaded,
    Part,
    assert_same_state,
    fill_gradients,
    make_parameters,
    masters,
    plain,
    state_of,
    train,
)

pytestmark = pytest.mark.timeout(120)
NUM_STEPS = 20
Make = Callable[..., Part]


def trained(
    make: Make, optimizer: str, *, dtype: torch.dtype = torch.float32, num_versions: int = 1
) -> dict[str, object]:
    part = make(make_parameters(dtype), FACTORIES[optimizer], num_versions)
    train(part, range(NUM_STEPS))
    found = state_of(part)
    part.update.close()
    return found


@functools.cache
def resident(make: Make, optimizer: str) -> dict[str, object]:
    return trained(make, optimizer)


@pytest.mark.parametrize("optimizer", FACTORIES)
@pytest.mark.parametrize("bucket_size", [2048, 1 << 22])
def test_equals_the_resident_update(optimizer: str, bucket_size: int, tmp_path: Path) -> None:
    found = trained(Offloaded(tmp_path, bucket_size=bucket_size).plain, optimizer)
    assert_same_state(found, resident(plain, optimizer))
    assert not list(tmp_path.iterdir())  # a killed run would leave nothing behind


@pytest.mark.parametrize("optimizer", FACTORIES)
def test_masters_equal_resident_masters(optimizer: str, tmp_path: Path) -> None:
    found = trained(Offloaded(tmp_path, bucket_size=5000).masters, optimizer)
    assert_same_state(found, resident(masters, optimizer))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_other_dtypes_and_the_host_tier(tier: str, dtype: torch.dtype, tmp_path: Path) -> None:
    found = trained(Offloaded(tmp_path, tier).plain, "adamw", dtype=dtype)
    assert_same_state(found, trained(plain, "adamw", dtype=dtype))


@pytest.mark.parametrize("num_versions", [2, 3])
@pytest.mark.parametrize("kind", ["plain", "masters"])
def test_versions_of_pipelines_that_never_flush(
    kind: str, num_versions: int, tmp_path: Path
) -> None:
    offloaded = Offloaded(tmp_path)
    made, twin = (offloaded.plain, plain) if kind == "plain" else (offloaded.masters, masters)
    found = trained(made, "adamw fused", num_versions=num_versions)
    assert_same_state(found, trained(twin, "adamw fused", num_versions=num_versions))


@pytest.mark.parametrize("kind", ["plain", "masters"])
def test_a_load_makes_what_was_read_ahead_worthless(kind: str, tmp_path: Path) -> None:
    offloaded = Offloaded(tmp_path)
    made, twin = (offloaded.plain, plain) if kind == "plain" else (offloaded.masters, masters)
    states = []
    for make in (made, twin):
        part = make(make_parameters(), FACTORIES["adamw"])
        train(part, range(3))
        part.update.begin()  # reads the first buckets
        for optimizer in part.update.optimizers:
            for entries in optimizer.state.values():
                entries["exp_avg"].mul_(0.5)
        for weight in part.update.weights().values():
            weight.mul_(0.5)
        part.update.on_load()
        train(part, range(3, 6))
        states.append(state_of(part))
        part.update.close()
    assert_same_state(*states)


@pytest.mark.parametrize("kind", ["plain", "masters"])
def test_buckets_are_updated_while_later_gradients_are_summed(kind: str, tmp_path: Path) -> None:
    """Sums come one after the other, each only when it is waited for."""
    offloaded = Offloaded(tmp_path, bucket_size=2048)
    made, twin = (offloaded.plain, plain) if kind == "plain" else (offloaded.masters, masters)
    states, num_early = [], 0
    for make in (made, twin):
        part = make(make_parameters(), FACTORIES["adamw"])
        buffers = part.buckets.buffers(0)
        assert len(buffers) > 2
        for step in range(3):
            fill_gradients(part.parameters, step)
            sums = [buffer.clone() for buffer in buffers]
            for buffer in buffers:
                buffer.fill_(float("nan"))
            before = {name: p.detach().clone() for name, p in part.parameters.items()}
            num_changed = []

            def wait(number: int) -> None:
                buffers[number].copy_(sums[number])  # noqa: B023 - called in this turn
                changed = (not torch.equal(before[n], p) for n, p in part.parameters.items())  # noqa: B023
                num_changed.append(sum(changed))  # noqa: B023

            part.update.begin()
            part.update.step(buffers, None, wait)
            assert len(num_changed) == len(buffers) and num_changed == sorted(num_changed)
            if make is made:
                assert num_changed[0] == 0 < num_changed[-1]
                num_early += 1
        states.append(state_of(part))
        part.update.close()
    assert num_early == 3
    assert_same_state(*states)


def test_state_is_read_before_the_step(tmp_path: Path) -> None:
    recorder = Recorder(0)
    part = Offloaded(tmp_path, recorder=recorder).plain(make_parameters(), FACTORIES["adamw"])
    train(part, range(2))
    before = len(recorder)
    part.update.begin()
    deadline = time.monotonic() + 20
    while len(recorder) < before + NUM_SLOTS and time.monotonic() < deadline:
        time.sleep(0.001)
    read = recorder.events()[before:]
    assert [event.kind for event in read] == ["read"] * NUM_SLOTS  # as far as slots reach
    part.update.close()
