"""Engines that stop for their communication, tiers, and the closed form of PipeDream-2BW."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ganglion.decide.costs import (
    Cluster,
    Runtime,
    StageTimes,
    builtin_clusters,
    find_cluster,
    parse_cluster,
    two_bw_batch_s,
    with_blocking_messages,
)
from ganglion.decide.plan import Plan
from ganglion.decide.predict import predict_layout
from ganglion.decide.shapes import GPTShape
from ganglion.decide.simulator import simulate_figures
from ganglion.errors import ConfigError, UnknownKeyError

FILE = """
ranks_per_node = 4
[links.intra]
latency_s = 0.0
bandwidth_gbps = 8e-9
[links.inter]
latency_s = 0.0
bandwidth_gbps = 8e-9
[stages]
forward_s = 1.0
backward_s = 2.0
"""
OVERLAPPING, BLOCKING = Runtime(), Runtime(overlaps_messages=False, overlaps_reduction=False)


def machine(runtime: Runtime = OVERLAPPING) -> Cluster:
    """Return a cluster of a byte a second."""
    return replace(parse_cluster(FILE, "test.toml"), runtime=runtime)


def stages(*hops: float, **fields: float) -> list[StageTimes]:
    return [StageTimes(forward_s=1.0, backward_s=2.0, latency_s=hop, **fields) for hop in hops]


def test_stages_that_stop_for_messages_move_in_step() -> None:
    """The second of three stages has two hops: four transfers of a microbatch, for all stages."""
    found = with_blocking_messages(stages(0.25, 0.5, 0.5))
    assert [(one.forward_s, one.backward_s) for one in found] == [(1.75, 2.75)] * 3
    assert [(one.latency_s, one.collective_s) for one in found] == [(0.0, 1.5)] * 3
    twice = with_blocking_messages(stages(0.25, 0.5, 0.5), num_chunks=2)
    assert twice[0].forward_s == 2.5
    assert with_blocking_messages(stages(0.25))[0].forward_s == 1.0


@pytest.mark.parametrize("schedule", ["one_f_one_b", "two_bw"])
def test_a_rank_that_stops_for_its_reduction_adds_it_to_the_step(schedule: str) -> None:
    """8 slots of 3 s; a reduction of 5 s and an update of 1 s, hidden by 2BW unless it stops."""
    plan = Plan(data=2, pipe=2, schedule=schedule, num_microbatches=8)
    times = stages(0.0, 0.0, reduce_s=5.0, update_s=1.0)
    stopping, hiding = (
        simulate_figures(plan, times, machine(runtime), num_steps=4).step_s
        for runtime in (BLOCKING, OVERLAPPING)
    )
    if schedule == "two_bw":
        assert hiding == pytest.approx(24)
        assert 24 + 6 <= stopping <= 24 + 6 + 2 * 3
    else:  # a pipeline that flushes waits for both in any case; stages meet the end one by one
        assert hiding <= stopping <= 24 + 3 + 6 + 1e-9


def test_runtime_of_a_cluster_file() -> None:
    assert machine().runtime == Runtime(overlaps_messages=True, overlaps_reduction=True)
    text = FILE + "[runtime]\noverlaps_messages = false\n"
    assert parse_cluster(text, "t").runtime == Runtime(overlaps_messages=False)
    with pytest.raises(ConfigError, match=r"cluster.runtime.overlaps_messages = 1 cannot be used"):
        parse_cluster(text.replace("false", "1"), "t")
    with pytest.raises(UnknownKeyError, match=r"did you mean 'cluster.runtime.overlaps_messages'"):
        parse_cluster(text.replace("overlaps_messages", "overlap_messages"), "t")


def test_the_closed_form_of_two_bw() -> None:
    """By hand: 4 microbatches; the sum of 20 s needs 5 s of each, more than 3 + 2 x 0.5."""
    times = [
        StageTimes(forward_s=1.0, backward_s=2.0, latency_s=0.5),
        StageTimes(forward_s=1.0, backward_s=2.0, latency_s=0.5),
    ]
    assert two_bw_batch_s(times, 4) == 4 * (3 + 2 * 0.5)
    reducing = [replace(one, reduce_s=20.0) for one in times]
    assert two_bw_batch_s(reducing, 4) == 4 * 5.0
    assert two_bw_batch_s(times, 4, pipelined=False) == 4 * (3 + 4)


# --- tiers and built-in files --------------------------------------------------------------------

GPT = GPTShape(
    vocab_size=1024,
    seq_len=128,
    num_layers=2,
    hidden=512,
    num_heads=8,
    num_kv_heads=8,
    head_size=64,
    mlp_hidden=2048,
)


def test_moves_to_a_tier_take_their_time() -> None:
    """Masters and two moments of each parameter, 12 bytes there and back, at the tier's rate.

    Nothing hides the first bucket on its way in and the last on its way out.
    """
    summit = find_cluster("summit")
    device, host = (
        predict_layout(GPT, Plan(precision="fp16_master", offload=tier), summit).step
        for tier in ("none", "host")
    )
    num_parameters = 12 * 2 * 512**2 + 2 * 1024 * 512
    moved = 12 * (num_parameters + 4194304)
    assert host.update_s[0] == pytest.approx(moved / 13.75e9, rel=0.01)
    assert device.update_s[0] == pytest.approx(28 * num_parameters / 900e9, rel=0.01)
    assert host.step_s - device.step_s == pytest.approx(host.update_s[0] - device.update_s[0])


def test_tiers_without_a_rate_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"summit.toml: cluster.tiers.disk is missing, so moves"):
        predict_layout(GPT, Plan(offload="disk"), find_cluster("summit"))


@pytest.mark.parametrize("name", builtin_clusters())
def test_a_layout_is_predicted_on_every_built_in_cluster(name: str) -> None:
    cluster = find_cluster(name)
    found = predict_layout(GPT, Plan(data=2, precision="bf16"), cluster)
    assert found.step_s > 0 and found.fits
    assert cluster.compute is not None and cluster.compute.memory_bandwidth_gbps is not None


def test_the_machines_that_users_can_name() -> None:
    assert builtin_clusters() == [
        "alps",
        "cori-knl",
        "dgx-h100",
        "frontier",
        "laptop",
        "p3.16xlarge",
        "p4d.24xlarge",
        "perlmutter",
        "summit",
    ]
