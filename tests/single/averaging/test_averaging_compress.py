"""Compressed sums lose nothing but the residual, and every worker decodes the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ganglion.decide.topology import Mesh
from ganglion.errors import ConfigError
from ganglion.execute.averaging.average import ElasticAverage
from ganglion.execute.averaging.methods.compress import CompressedSum, make_codec
from ganglion.execute.averaging.methods.outer import diloco
from ganglion.execute.averaging.methods.sums import Meter
from ganglion.execute.comm import World, run_threads
from tests.support.averages import (
    assert_same_bits,
    make_model,
    plain_sgd,
    train_steps,
    train_threads,
)

CODECS = ["bf16", "fp16", "int8"]
WORST = {"bf16": 2**-8, "fp16": 2**-11, "int8": 1 / 254}


@pytest.mark.parametrize("name", CODECS)
@given(size=st.integers(1, 700), seed=st.integers(0, 5), power=st.integers(-3, 2))
def test_a_code_is_near_its_values(name: str, size: int, seed: int, power: int) -> None:
    codec = make_codec(name)
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=draw) * 10.0**power
    code = torch.zeros(codec.num_bytes(size), dtype=torch.uint8)
    codec.encode(values, code)
    decoded = torch.empty(size)
    codec.decode(code, decoded)
    worst = float(values.abs().max()) * WORST[name] * 1.01 + 1e-7
    assert float((decoded - values).abs().max()) <= worst


def test_zeros_stay_zeros() -> None:
    codec = make_codec("int8")
    code = torch.zeros(codec.num_bytes(300), dtype=torch.uint8)
    codec.encode(torch.zeros(300), code)
    decoded = torch.ones(300)
    codec.decode(code, decoded)
    assert not decoded.any()


def test_int8_is_a_quarter_of_float32() -> None:
    assert make_codec("int8").num_bytes(25600) == 25600 + 4 * 100
    assert make_codec("bf16").num_bytes(25600) == 2 * 25600


def test_an_unknown_codec() -> None:
    with pytest.raises(ConfigError, match=r"compress = 'int4' is not one of \['bf16'"):
        train_threads(1, 1, beta=0.5, compress="int4")


@pytest.mark.parametrize("name", CODECS)
def test_sums_and_residuals_together_are_exact(name: str) -> None:
    """What was sent plus what is held back is what was given, after any number of sums."""

    def body(world: World) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        like = torch.zeros(300, dtype=torch.float64)
        sums = CompressedSum(world.group("data"), like, make_codec(name), Meter())
        draw = torch.Generator().manual_seed(world.rank)
        given, received = like.clone(), like.clone()
        for number in range(5):
            values = torch.randn(300, generator=draw, dtype=torch.float64)
            sums.buffer.copy_(values)
            sums.start()
            total = sums.wait().clone()
            if number == 2:  # nobody uses this one
                sums.discard()
            else:
                received += total
            given += values
        return given, received, sums.residual

    results = run_threads(Mesh(data=3), body)
    given = sum(r[0] for r in results)
    held_back = sum(r[2] for r in results)
    assert all(torch.equal(r[1], results[0][1]) for r in results)
    assert torch.allclose(results[0][1] + held_back, given, rtol=1e-12, atol=1e-12)
    assert held_back.abs().max() > 0


@pytest.mark.parametrize("name", CODECS)
def test_conservation_holds_to_the_residual(name: str) -> None:
    """With gradients off, c + sum of w + alpha * sum of residuals never changes."""
    alpha = 0.3

    def body(world: World) -> Any:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        average = ElasticAverage(model, optimizer, alpha=alpha, tau=1, compress=name, world=world)
        draw = torch.Generator().manual_seed(world.rank)
        worker = average._packed.flat
        worker.add_(torch.randn(worker.shape, generator=draw, dtype=torch.float64))
        center = average._method._center  # type: ignore[attr-defined]
        before = worker.clone(), center.flat.clone()
        for _ in range(6):
            average.sync_now()
        average.check_center()
        return before, (worker.clone(), center.flat.clone()), center.sums.residual.clone()

    results = run_threads(Mesh(data=3), body)
    start = sum(before[0] for before, _, _ in results) + results[0][0][1]
    end = sum(after[0] for _, after, _ in results) + results[0][1][1]
    held_back = alpha * sum(residual for _, _, residual in results)
    assert torch.allclose(end + held_back, start, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(end, start, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("wishes", [{"beta": 0.9, "tau": 2}, {"outer": diloco(), "tau": 4}])
@pytest.mark.parametrize("name", CODECS)
def test_compressed_training_ends_where_plain_training_ends(name: str, wishes: Any) -> None:
    plain = train_threads(3, 40, dtype=torch.float32, **wishes)
    found = train_threads(3, 40, dtype=torch.float32, compress=name, **wishes)
    for trained, reference in zip(found, plain, strict=True):
        assert_same_bits(trained.center, found[0].center)
        assert sum(trained.losses[-5:]) == pytest.approx(sum(reference.losses[-5:]), rel=0.05)
        for key, value in reference.center.items():
            assert torch.allclose(trained.center[key], value, atol=0.05)
    assert not torch.equal(found[0].center["0.weight"], plain[0].center["0.weight"])
    assert found[0].metrics.sent_bytes < 0.8 * plain[0].metrics.sent_bytes


@pytest.mark.parametrize("wishes", [{"beta": 0.9}, {"outer": diloco(), "delay": 1}])
def test_overlap_keeps_every_bit(wishes: Any) -> None:
    runs = [
        train_threads(3, 8, tau=2, compress="int8", overlap=overlap, **wishes)
        for overlap in (False, True)
    ]
    for waiting, overlapped in zip(*runs, strict=True):
        assert_same_bits(overlapped.weights, waiting.weights)
        assert_same_bits(overlapped.center, waiting.center)


def test_a_centre_at_the_root_is_not_compressed() -> None:
    with pytest.raises(ConfigError, match='compress = "int8" needs the same centre'):
        train_threads(1, 1, beta=0.5, compress="int8", center="root")


def test_the_residual_is_small_beside_what_was_sent() -> None:
    def body(world: World) -> tuple[float, float]:
        model = make_model()
        optimizer = plain_sgd(model.parameters())
        average = ElasticAverage(model, optimizer, beta=0.9, tau=1, compress="int8", world=world)
        with average:
            train_steps(model, optimizer, world.rank, range(20))
        method: Any = average._method
        difference = average._packed.flat - method.center()
        return float(method._center.sums.residual.norm()), float(difference.norm())

    for residual, difference in run_threads(Mesh(data=2), body):
        assert 0 < residual < 0.1 * difference
