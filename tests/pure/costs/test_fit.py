"""The fit finds the numbers that made the times, noise or not, and refuses too few of them."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from ganglion import Plan
from ganglion.decide.costs import (
    BYTE,
    FLOP,
    LATENCY,
    Cluster,
    Compute,
    Timing,
    compute_from,
    compute_terms,
    fit_times,
    link_from,
    model_work,
    stage_times,
)
from ganglion.decide.costs.machine import CALL, RING_BYTE, STEP, Fit
from ganglion.decide.shapes import GPTShape, MLPShape, ModelShape
from ganglion.errors import DataError

MACHINE = Compute(
    fp32_tflops=0.1,
    bf16_tflops=0.2,
    efficiency=0.9,
    memory_gib=4.0,
    memory_bandwidth_gbps=80.0,
    activation_gbps=50.0,
    update_gbps=120.0,
    block_s=5e-5,
    update_s=4e-4,
    action_s=2e-5,
)
PARTS: dict[str, Callable[..., float]] = {
    "forward": lambda one: one.forward_s,
    "backward": lambda one: one.backward_s + one.weight_s,
    "update": lambda one: one.update_s,
}


def gpt(layers: int, hidden: int, vocab: int, seq_len: int) -> GPTShape:
    return GPTShape(
        vocab_size=vocab,
        seq_len=seq_len,
        num_layers=layers,
        hidden=hidden,
        num_heads=4,
        num_kv_heads=4,
        head_size=hidden // 4,
        mlp_hidden=4 * hidden,
    )


SHAPES: list[tuple[ModelShape, int]] = [
    (gpt(1, 64, 256, 32), 1),
    (gpt(2, 128, 256, 64), 4),
    (gpt(1, 256, 1024, 64), 2),
    (gpt(3, 192, 256, 128), 2),
    (gpt(4, 64, 512, 128), 8),
    (MLPShape(num_inputs=64, num_outputs=16, num_layers=3, hidden=64), 8),
    (MLPShape(num_inputs=128, num_outputs=16, num_layers=6, hidden=512), 64),
]


def model_timings(sigma: float = 0.0) -> list[Timing]:
    """Return what the cost model says of the shapes on MACHINE, times a log-normal factor."""
    noise = random.Random(1)
    found = []
    for shape, size in SHAPES:
        for kind, part in PARTS.items():

            def seconds_on(compute: Compute, shape: ModelShape = shape, size: int = size,
                           part: Callable[..., float] = part) -> float:  # fmt: skip
                plan = Plan(microbatch_size=size, num_microbatches=4)
                cluster = Cluster(source="test", name="test", compute=compute)
                return part(stage_times(model_work(shape, plan), plan, cluster)[0])

            factor = noise.lognormvariate(0.0, sigma) if sigma else 1.0
            found.append(
                Timing(
                    kind=kind,
                    label=str(shape),
                    seconds=seconds_on(MACHINE) * factor,
                    terms=compute_terms(seconds_on),
                )
            )
    return found


def fitted(fit: Fit) -> Compute:
    return compute_from(fit, fp32_flops=1e11, bf16_flops=2e11, memory_gib=4.0)


def test_terms_of_the_cost_model_add_up_to_its_times() -> None:
    truth = Fit(
        {
            "flop": 1 / MACHINE.flops("fp32"),
            "memory_byte": 1 / MACHINE.memory_bytes_per_s,
            "activation_byte": 1 / MACHINE.activation_bytes_per_s,
            "update_byte": 1 / MACHINE.update_bytes_per_s,
            "block": MACHINE.block_s,
            "update": MACHINE.update_s,
            "action": MACHINE.action_s,
        }
    )
    for timing in model_timings():
        assert truth.error(timing) == pytest.approx(0.0, abs=1e-9), timing


def test_exact_times_give_the_numbers_that_made_them() -> None:
    found = fitted(fit_times(model_timings(), "training"))
    for name in ("fp32_tflops", "efficiency", "memory_bandwidth_gbps", "activation_gbps"):
        assert getattr(found, name) == pytest.approx(getattr(MACHINE, name), rel=1e-3), name
    for name in ("update_gbps", "update_s", "block_s", "action_s"):
        assert getattr(found, name) == pytest.approx(getattr(MACHINE, name), rel=1e-2), name


def test_noise_moves_predictions_less_than_the_times() -> None:
    exact, noisy = model_timings(), model_timings(sigma=0.05)
    fit = fit_times(noisy, "training")
    errors = sorted(abs(fit.error(one)) for one in exact)
    assert errors[len(errors) // 2] < 0.03
    assert errors[-1] < 0.15


def test_one_time_of_a_busy_machine_changes_little() -> None:
    timings = model_timings()
    spoilt = Timing(
        kind=timings[4].kind,
        label=timings[4].label,
        seconds=5 * timings[4].seconds,
        terms=timings[4].terms,
    )
    fit = fit_times([*timings[:4], spoilt, *timings[5:]], "training")
    assert max(abs(fit.error(one)) for one in timings) < 0.02


def test_errors_are_told_by_kind_with_the_worst_by_name() -> None:
    timings = model_timings(sigma=0.1)
    errors = fit_times(timings, "training").errors(timings)
    assert [one.kind for one in errors] == list(PARTS)
    for one in errors:
        assert one.num_timings == len(SHAPES)
        assert 0 < one.median <= one.worst
        assert one.worst_label in {timing.label for timing in timings}


def test_numbers_are_never_negative() -> None:
    """Times that fall with the bytes give a free byte, not a negative one."""
    timings = [
        Timing(kind="message", label=str(n), seconds=1e-4 - n * 1e-12, terms={LATENCY: 1, BYTE: n})
        for n in (1e3, 1e4, 1e5, 1e6)
    ]
    seconds = fit_times(timings, "messages").seconds
    assert seconds[BYTE] == 0.0
    assert seconds[LATENCY] == pytest.approx(1e-4, rel=0.02)


def test_too_few_times_are_refused_with_the_numbers() -> None:
    timings = [
        Timing(kind="message", label="1 KiB", seconds=1e-5, terms={LATENCY: 1.0, BYTE: 1024.0})
    ] * 2
    with pytest.raises(DataError) as error:
        fit_times(timings, "messages (intra)")
    assert str(error.value) == (
        "2 measured times of messages (intra) cannot fix 2 numbers (latency, byte): at least 3 of "
        "different sizes are needed"
    )


def test_a_time_of_nothing_is_refused() -> None:
    timings = [Timing(kind="a", label="b", seconds=0.0, terms={FLOP: 1.0})] * 3
    with pytest.raises(DataError, match=r"the measured time of training b is 0\.0 s"):
        fit_times(timings, "training")


def test_times_that_do_not_rise_with_flop_are_refused() -> None:
    fit = Fit({FLOP: 0.0})
    with pytest.raises(DataError, match="measure larger products"):
        compute_from(fit, fp32_flops=1e11, bf16_flops=1e11, memory_gib=1.0)


def test_a_link_is_that_of_its_fits() -> None:
    messages = Fit({LATENCY: 2e-5, BYTE: 1e-9})
    rings = Fit({CALL: 1e-4, STEP: 1e-6, RING_BYTE: 2e-9})
    link = link_from(messages, rings, shared=True)
    assert (link.latency_s, link.bandwidth_gbps, link.collective_gbps) == (2e-5, 8.0, 4.0)
    assert (link.collective_s, link.collective_latency_s, link.shared) == (1e-4, 1e-6, True)
    alone = link_from(messages, None, shared=False)
    assert (alone.collective_gbps, alone.step_s, alone.collective_s) == (None, 2e-5, 0.0)
