"""Averaging on the virtual clock: closed forms, the paper's tables, and laws of any run."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ganglion.decide.costs import StageTimes, parse_cluster
from ganglion.decide.plan import Plan
from ganglion.decide.simulator.averaging.costs import (
    RING,
    TREE,
    TWO_LEVEL,
    AveragingCosts,
    MessagePrice,
    jittered,
    ring_s,
    tree_s,
    two_level_s,
)
from ganglion.decide.simulator.averaging.methods import METHODS, ORDERED, SERVED, TOGETHER
from ganglion.decide.simulator.averaging.plan import average_plan, worker_disturbances
from ganglion.decide.simulator.averaging.result import (
    EXCHANGE,
    GATHER,
    PUSH,
    READ,
    REDUCE,
    STEP,
    WRITE,
    AveragingSimulation,
)
from ganglion.decide.simulator.averaging.simulate import (
    calibrated,
    efficiency,
    simulate_averaging,
)
from ganglion.decide.simulator.options import Disturbance
from ganglion.errors import ConfigError
from tests.support.profiles import examples

LINK = MessagePrice(message_s=0.01, byte_s=1e-4)
BYTES = (100, 20, 30)
M = 0.01 + 150e-4  # one packed message
K = 0.03 + 150e-4  # one for each of three tensors
PASS_S, UPDATE_S, HOST_S, DEVICE_S = 1.0, 0.05, 0.03, 0.02
DATA_S = 0.002
COSTS = AveragingCosts(
    pass_s=PASS_S,
    update_s=UPDATE_S,
    host_center_s=HOST_S,
    device_center_s=DEVICE_S,
    host_link=LINK,
    device_link=LINK,
    data_link=MessagePrice(0.0, 1e-4),
    tensor_bytes=BYTES,
    batch_bytes=20,
)


def run(
    name: str, costs: AveragingCosts = COSTS, workers: int = 4, batches: int = 40, **options: Any
) -> AveragingSimulation:
    return simulate_averaging(name, costs, num_workers=workers, num_batches=batches, **options)


# --- closed forms --------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "rounds"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (64, 6)])
def test_reductions_have_their_closed_forms(ranks: int, rounds: int) -> None:
    assert tree_s(ranks, LINK, 150) == pytest.approx(2 * rounds * M)
    assert tree_s(ranks, LINK, 150, 3) == pytest.approx(2 * rounds * K)
    ring = 2 * (ranks - 1) * 0.01 + 2 * (ranks - 1) / ranks * 150e-4
    assert ring_s(ranks, LINK, 150) == pytest.approx(ring)


def test_two_levels_are_a_ring_of_rings() -> None:
    assert two_level_s(12, 1, LINK, 150) == ring_s(12, LINK, 150)
    assert two_level_s(12, 12, LINK, 150) == ring_s(12, LINK, 150)
    parts = ring_s(4, LINK, 150) + ring_s(3, LINK, 150 / 4)
    assert two_level_s(12, 4, LINK, 150) == pytest.approx(parts)
    with pytest.raises(ConfigError, match="12 workers are no groups of group_size = 5"):
        two_level_s(12, 5, LINK, 150)


def test_a_tree_has_fewer_messages_and_a_ring_fewer_bytes() -> None:
    small, large = 1.0, 1e6
    assert tree_s(64, LINK, small) < ring_s(64, LINK, small)
    assert ring_s(64, LINK, large) < tree_s(64, LINK, large)


def test_original_easgd_hides_its_pass_or_its_messages() -> None:
    apart = run("original_easgd_no_overlap").batch_s
    assert apart == pytest.approx(DATA_S + 2 * K + PASS_S + UPDATE_S + HOST_S)
    last = UPDATE_S / 40  # the last worker updates when the host has finished
    beside = run("original_easgd").batch_s - last
    assert beside == pytest.approx(DATA_S + max(2 * K, PASS_S) + HOST_S)
    slow = replace(COSTS, host_link=MessagePrice(1.0, 0.0))
    assert run("original_easgd", slow).batch_s - last == pytest.approx(DATA_S + 6.0 + HOST_S)


def test_the_versions_of_sync_easgd_have_their_closed_forms() -> None:
    data_s = 4 * DATA_S
    steps = {
        "sync_easgd_1": data_s + PASS_S + 6 * M + UPDATE_S + HOST_S,  # the host is a fifth node
        "sync_easgd_2": data_s + PASS_S + 4 * M + UPDATE_S + DEVICE_S,
        "sync_easgd_3": max(data_s + PASS_S, 4 * M) + UPDATE_S + DEVICE_S,
        "sync_sgd": data_s + PASS_S + 4 * M + UPDATE_S,
    }
    for name, step_s in steps.items():
        assert run(name).total_s == pytest.approx(10 * step_s), name


def test_served_workers_have_their_closed_forms() -> None:
    alone = run("async_sgd", workers=1, batches=5)
    assert alone.batch_s == pytest.approx(DATA_S + PASS_S + 2 * M + HOST_S)
    hidden = run("async_easgd", workers=1, batches=5)
    assert hidden.batch_s == pytest.approx(DATA_S + PASS_S + UPDATE_S)
    slow = replace(COSTS, host_link=MessagePrice(5.0, 0.0))
    # One server is never idle: 10.03 s a request. Handlers without a lock serve all at once.
    locked, unlocked = run("async_easgd", slow), run("hogwild_easgd", slow)
    assert locked.total_s == pytest.approx(40 * 10.03 + UPDATE_S)
    assert unlocked.total_s == pytest.approx(10 * (10.03 + UPDATE_S))


@pytest.mark.parametrize("name", ["async_easgd", "async_measgd", "hogwild_easgd"])
def test_an_exchange_after_the_pass_hides_nothing(name: str) -> None:
    """As ElasticAverage does without overlap, and on shared memory."""
    shown = run(name, workers=1, batches=5, overlaps=False)
    assert shown.batch_s == pytest.approx(DATA_S + PASS_S + 2 * M + HOST_S + UPDATE_S)
    assert shown.seconds["param_host_dev"] == pytest.approx(5 * 2 * M)
    assert run(name, workers=1, batches=5, overlaps=True) == run(name, workers=1, batches=5)
    assert run("async_sgd", overlaps=True) == run("async_sgd")  # there is no gradient before


def test_periods_save_messages() -> None:
    every, tenth = run("sync_easgd_2", tau=1), run("sync_easgd_2", tau=10)
    assert every.total_s - tenth.total_s == pytest.approx(9 * 4 * M)
    assert Counter(e.kind for e in tenth.events)[GATHER] == 1


def test_packing_saves_all_messages_but_one() -> None:
    packed = simulate_averaging("sync_easgd_2", COSTS, num_workers=4, num_batches=4, is_packed=True)
    apart = simulate_averaging("sync_easgd_2", COSTS, num_workers=4, num_batches=4, is_packed=False)
    assert apart.total_s - packed.total_s == pytest.approx(4 * (K - M))


# --- laws ----------------------------------------------------------------------------------------

COST_STRATEGY = st.builds(
    lambda pass_s, deviation, seed, message_s, byte_s, update_s, host_s: AveragingCosts(
        pass_s=jittered(pass_s, deviation, seed),
        update_s=update_s,
        host_center_s=host_s,
        device_center_s=host_s / 2,
        host_link=MessagePrice(message_s, byte_s),
        device_link=MessagePrice(message_s / 2, byte_s),
        data_link=MessagePrice(0.0, byte_s),
        tensor_bytes=BYTES,
        batch_bytes=64,
    ),
    st.floats(0.1, 2.0),
    st.floats(0.0, 0.5),
    st.integers(0, 99),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1e-2),
    st.floats(0.0, 0.5),
    st.floats(0.0, 0.5),
)


@settings(max_examples=examples(40))
@given(costs=COST_STRATEGY, workers=st.integers(1, 6), name=st.sampled_from(list(METHODS)))
def test_every_run_is_whole(costs: AveragingCosts, workers: int, name: str) -> None:
    done = run(name, costs, workers, 5 * workers)
    assert done == run(name, costs, workers, 5 * workers)  # to the last bit
    assert all(seconds >= 0 for seconds in done.seconds.values())
    assert done.watched_s <= done.total_s * (1 + 1e-9)
    assert 0 <= done.communication_share <= 1
    times = [event.time_s for event in done.events]
    assert times == sorted(times) and times[-1] <= done.total_s * (1 + 1e-9)
    used = Counter((e.worker, e.step) for e in done.events if e.kind in (PUSH, STEP))
    assert set(used.values()) == {1} and len(used) == 5 * workers
    _assert_order(done, METHODS[name].order, METHODS[name].is_elastic)


def _assert_order(done: AveragingSimulation, order: str, is_elastic: bool) -> None:
    """The centre is written once for each batch, or once for all; before the worker's own step."""
    kinds = Counter(event.kind for event in done.events)
    if order == TOGETHER:
        assert kinds[GATHER] + kinds[REDUCE] == done.num_batches // done.num_workers
    else:
        assert kinds[EXCHANGE] + kinds[WRITE] + kinds[PUSH] == done.num_batches
        assert kinds[READ] == kinds[WRITE]
    if order != TOGETHER and is_elastic:
        places = {(e.kind, e.worker, e.step): n for n, e in enumerate(done.events)}
        for (kind, worker, step), place in places.items():
            if kind in (EXCHANGE, WRITE):
                assert place < places[STEP, worker, step]
    if order == ORDERED:
        turns = [e.worker for e in done.events if e.kind == EXCHANGE]
        assert turns == [n % done.num_workers for n in range(done.num_batches)]


@settings(max_examples=examples(30))
@given(costs=COST_STRATEGY, workers=st.integers(1, 6), tau=st.integers(1, 3))
def test_version_three_is_never_slower_than_two(
    costs: AveragingCosts, workers: int, tau: int
) -> None:
    two, three = (run(f"sync_easgd_{n}", costs, workers, 6 * workers, tau=tau) for n in (2, 3))
    assert three.total_s <= two.total_s * (1 + 1e-12)


@pytest.mark.parametrize("name", list(METHODS))
def test_parts_sum_to_the_whole(name: str) -> None:
    done = run(name)
    # All passes are equal, so nobody is done after the rank that is watched but the others of a
    # server, each behind the one before, and Original EASGD's last update.
    after_s = {SERVED: 3 * (2 * M + HOST_S), ORDERED: UPDATE_S, TOGETHER: 0.0}
    late_s = done.total_s - done.watched_s
    assert -1e-9 <= late_s <= after_s[METHODS[name].order] + 1e-9


def test_seeds_decide_the_passes() -> None:
    first, again, other = (jittered(1.0, 0.1, seed) for seed in (1, 1, 2))
    drawn = [first(worker, step) for worker in range(4) for step in range(50)]
    assert drawn == [again(worker, step) for worker in range(4) for step in range(50)]
    assert drawn != [other(worker, step) for worker in range(4) for step in range(50)]
    assert len(set(drawn)) == 200
    mean = sum(drawn) / 200
    deviation = math.sqrt(sum((d - mean) ** 2 for d in drawn) / 200)
    assert mean == pytest.approx(1.0, abs=0.03) and deviation == pytest.approx(0.1, abs=0.02)


def test_a_slow_worker_holds_synchronous_ones_up_and_no_others() -> None:
    slow = replace(COSTS, pass_s=lambda worker, step: 3.0 if worker == 2 else 1.0)
    together, served = run("sync_easgd_3", slow), run("async_easgd", slow)
    assert together.batch_s > 2.9 / 4 and served.batch_s < 1.4 / 4
    steps = Counter(e.worker for e in served.events if e.kind == STEP)
    assert steps[2] < steps[0] / 2
    assert max(served.staleness) > 5  # the slow one misses what the others write meanwhile


def test_staleness_is_what_others_wrote_meanwhile() -> None:
    for name in ("original_easgd", "async_sgd", "async_easgd"):
        assert max(run(name).staleness) == 3, name
        assert set(run(name, workers=1, batches=4).staleness) == {0}, name


def test_gradients_that_are_too_old_are_refused() -> None:
    slow = replace(COSTS, pass_s=lambda worker, step: 50.0 if worker == 0 else 1.0)
    refused = [e for e in run("async_sgd", slow, workers=2, batches=60).events if e.is_refused]
    assert refused and all(e.staleness > 8 and e.worker == 0 for e in refused)


# --- the paper -----------------------------------------------------------------------------------

# You, Buluc, Demmel 2017, table 3: a pass of 6.07 ms (44 % of 69 s / 5000), updates of 0.5 and
# 0.6 ms, LeNet of 8 tensors and 1.7 MB, batches of 64 images.
LENET = (2000, 80, 100_000, 200, 1_600_000, 2000, 20_000, 40)
PAPER = AveragingCosts(
    pass_s=6.07e-3,
    update_s=0.44e-3,
    host_center_s=0.6e-3,
    device_center_s=0.1e-3,
    tensor_bytes=LENET,
    batch_bytes=64 * 28 * 28 * 4,
)


def test_the_price_of_messages_gives_the_share_it_was_chosen_for() -> None:
    for share in (0.3, 0.5, 0.87, 0.9):
        costs = calibrated(PAPER, share, num_workers=4, half_bytes=4e6)
        assert run("original_easgd", costs).communication_share == pytest.approx(share, abs=1e-6)
        assert costs.host_link == costs.device_link


def test_table_three_comes_out_in_kind() -> None:
    costs = calibrated(PAPER, 0.87, num_workers=4, half_bytes=4e6)
    paper_ms = {
        "original_easgd": 8.2,
        "sync_easgd_1": 11.0,
        "sync_easgd_2": 8.2,
        "sync_easgd_3": 7.7,
    }
    for name, wanted_ms in paper_ms.items():
        workers = 1 if name == "original_easgd" else 4  # an iteration of these is four batches
        assert 1e3 * run(name, costs).batch_s * workers == pytest.approx(wanted_ms, rel=0.2), name
    apart = run("original_easgd_no_overlap", costs)
    assert apart.communication_share == pytest.approx(0.52, abs=0.08)
    assert apart.total_s > run("original_easgd", costs).total_s * 1.6  # 69 s and 41 s


SCALED_S = {1: 1533, 2: 1590, 4: 1608, 8: 1641, 16: 1630, 32: 1662, 64: 1674}


def googlenet(reduction: str = RING, group_size: int = 1) -> AveragingCosts:
    """Fit one price to the paper's 1 and 2 nodes."""
    pass_s, two_s = SCALED_S[1] / 300, SCALED_S[2] / 300
    return AveragingCosts(
        pass_s=pass_s,
        device_link=MessagePrice(1e-6, (two_s - pass_s - 2e-6) / 28e6),
        tensor_bytes=(28_000_000,),
        reduction=reduction,
        group_size=group_size,
    )


@pytest.mark.parametrize("nodes", [4, 8, 16, 32, 64])
def test_two_nodes_predict_the_others_within_two_points(nodes: int) -> None:
    wanted = 100 * SCALED_S[1] / SCALED_S[nodes]
    assert 100 * efficiency(googlenet(), nodes, overlaps=False) == pytest.approx(wanted, abs=2.0)


@pytest.mark.parametrize("nodes", [64, 1024, 16384])
def test_overlap_and_rings_beat_what_was_measured(nodes: int) -> None:
    ring, levels = googlenet(), googlenet(TWO_LEVEL, 8)
    tree = efficiency(googlenet(TREE), nodes, overlaps=False)
    assert tree < 0.83 < 0.916 < efficiency(ring, nodes, overlaps=False)
    assert efficiency(levels, nodes, overlaps=False) >= efficiency(ring, nodes, overlaps=False)
    assert efficiency(ring, nodes, overlaps=True) > 0.999


# --- refusals ------------------------------------------------------------------------------------


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="method = 'easgd' is not one of"):
        run("easgd")
    with pytest.raises(ConfigError, match="num_batches = 41 leaves some of 4"):
        run("sync_sgd", batches=41)
    with pytest.raises(ConfigError, match="tau = 2: Original EASGD lets one worker compute"):
        run("original_easgd", tau=2)
    with pytest.raises(ConfigError, match="num_workers = 0"):
        run("async_sgd", workers=0)
    with pytest.raises(ConfigError, match="reduction = 'star' is not one of"):
        replace(COSTS, reduction="star")


# --- longer periods, and plans -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["async_easgd", "hogwild_easgd", "async_sgd", "hogwild_sgd"])
def test_workers_on_their_own_exchange_in_one_of_tau_steps(name: str) -> None:
    done = run(name, workers=2, batches=24, tau=4)
    writes = [event for event in done.events if event.kind in (EXCHANGE, WRITE, PUSH)]
    first = 0 if METHODS[name].is_elastic else 3
    assert [event.step for event in writes if event.worker == 0] == [first, first + 4, first + 8]
    alone = run(name, workers=1, batches=12, tau=12)
    assert done.total_s >= alone.total_s
    assert sum(done.staleness.values()) == 6


def test_a_lone_step_takes_its_pass_and_its_update() -> None:
    """Three steps of four have no exchange; that of the first hides behind the pass."""
    done = run("async_easgd", workers=1, batches=4, tau=4)
    assert done.total_s == pytest.approx(4 * (DATA_S + PASS_S + UPDATE_S))


CLUSTER = """
num_nodes = 4
ranks_per_node = 2
[links.intra]
latency_s = 1e-3
bandwidth_gbps = 8e-3
[links.inter]
latency_s = 2e-3
bandwidth_gbps = 4e-3
[stages]
forward_s = 1.0
backward_s = 1.0
backward_weight_s = 1.0
"""
MEGABYTE = 1_000_000
INTRA_S, INTER_S = 1.0, 2.0  # of a megabyte: 8e-3 gigabits a second are 1e6 bytes


def figures(
    plan: Plan,
    *disturbances: Disturbance,
    tau: int = 1,
    overlap: bool = True,
    jitter: float = 0.0,
    update_s: float = 0.0,
) -> Any:
    times = [
        StageTimes(
            forward_s=0.0,
            backward_s=0.0,
            update_s=update_s,
            gradient_bytes=MEGABYTE,
            jitter=jitter,
        )
        for _ in range(plan.pipe)
    ]
    cluster = parse_cluster(CLUSTER, "here")
    return average_plan(
        plan, times, cluster, 10.0, tau=tau, overlap=overlap, disturbances=disturbances
    )


def test_a_synchronous_exchange_of_a_plan_is_a_ring() -> None:
    """Two workers on one node move half a megabyte twice."""
    shown = figures(Plan(data=2, averaging="sync_easgd"), overlap=False)
    assert shown.exchange_s == pytest.approx(2 * (1e-3 + 0.5 * INTRA_S))
    assert shown.step_s == pytest.approx(10.0 + shown.exchange_s)
    assert shown.exposed_share == pytest.approx(shown.exchange_s / shown.step_s)
    rarely = figures(Plan(data=2, averaging="sync_easgd"), tau=10, overlap=False)
    assert rarely.step_s == pytest.approx(10.0 + shown.exchange_s / 10)
    assert rarely.exposed_s == pytest.approx(shown.exchange_s)
    assert figures(Plan(data=2, averaging="sync_easgd")).exposed_share == 0.0  # hidden


@pytest.mark.parametrize("method", ["local_sgd", "slow_momentum", "diloco"])
def test_outer_optimizers_exchange_where_nothing_hides_it(method: str) -> None:
    shown = figures(Plan(data=2, averaging=method), tau=4)
    assert shown.step_s == pytest.approx(10.0 + shown.exchange_s / 4)


def test_ranks_of_a_worker_exchange_over_the_links_they_have() -> None:
    """Stages in the order of the mesh: the replicas of each sit on one node, or on two."""
    near = figures(Plan(data=2, pipe=2, averaging="sync_easgd"), overlap=False)
    far = figures(
        Plan(data=2, pipe=2, averaging="sync_easgd", rank_order=("x", "y", "z", "pipe", "data")),
        overlap=False,
    )
    assert near.exchange_s == pytest.approx(2 * (1e-3 + 0.5 * INTRA_S))
    assert far.exchange_s == pytest.approx(2 * (2e-3 + 0.5 * INTER_S))


@pytest.mark.parametrize(("servers", "size"), [(1, MEGABYTE), (2, MEGABYTE // 2)])
def test_a_served_exchange_goes_to_the_servers_and_back(servers: int, size: int) -> None:
    shown = figures(Plan(data=2, averaging="async_sgd", servers=servers))
    there_s = 2e-3 + size / MEGABYTE * INTER_S
    assert shown.exchange_s == pytest.approx(2 * there_s)
    assert shown.exchange_bytes == MEGABYTE
    assert shown.step_s > 10.0 + shown.exchange_s * 0.9
    assert shown.mean_staleness > 0


def test_an_elastic_served_exchange_hides_behind_the_pass() -> None:
    plan = Plan(data=2, averaging="async_easgd", servers=1)
    assert figures(plan, tau=2).exposed_share == 0.0
    assert figures(Plan(data=1, averaging="async_easgd")).exchange_s == 0.0
    after = figures(plan, tau=2, overlap=False)
    assert after.step_s >= 10.0 + after.exchange_s / 2


def test_shared_memory_is_read_and_written_after_the_pass() -> None:
    shown = figures(Plan(data=2, averaging="hogwild_easgd"))
    assert shown.exchange_s == pytest.approx(2 * (1e-3 + INTRA_S))
    assert shown.step_s == pytest.approx(10.0 + shown.exchange_s)


def test_jitter_costs_synchronous_workers_more_than_others() -> None:
    together = figures(Plan(data=4, averaging="sync_easgd"), jitter=0.2)
    apart = figures(Plan(data=4, averaging="async_easgd", servers=1), tau=4, jitter=0.2)
    assert together.exposed_share > apart.exposed_share


# --- slow workers and pauses ----------------------------------------------------------------------

FOUR_TOGETHER = Plan(data=4, averaging="sync_easgd")
FOUR_APART = Plan(data=4, averaging="async_easgd", servers=1)


@pytest.mark.parametrize("update_s", [0.0, 2.0])
def test_a_slow_worker_slows_synchronous_ones_by_its_factor(update_s: float) -> None:
    slow = Disturbance(rank=2, speed=1 / 3)
    shown = figures(FOUR_TOGETHER, slow, update_s=update_s)
    assert shown.step_s == pytest.approx(30.0)
    assert shown.disturbed_s == pytest.approx(20.0)
    assert shown.exposed_s == figures(FOUR_TOGETHER, update_s=update_s).exposed_s
    assert shown.worker_step_s == 10.0


def test_a_slow_worker_costs_others_that_do_not_wait_only_its_own_share() -> None:
    """Three at full speed and one at a third do 10/3 of a step in the time of one."""
    slow = Disturbance(rank=2, speed=1 / 3)
    shown = figures(FOUR_APART, slow, tau=4)
    assert shown.step_s == pytest.approx(10.0 * 4 / (3 + 1 / 3), rel=0.05)
    assert figures(FOUR_APART, tau=4).disturbed_s == 0.0


def test_a_slow_worker_makes_the_others_miss_less_and_is_late_itself() -> None:
    slow = Disturbance(rank=2, speed=0.1)
    usual, slowed = figures(FOUR_APART, tau=2), figures(FOUR_APART, slow, tau=2)
    assert slowed.mean_staleness != usual.mean_staleness


def test_a_pause_stops_synchronous_workers_once_and_others_hardly() -> None:
    pause = Disturbance(rank=1, speed=0.0, start_s=25.0, end_s=65.0)
    shown = figures(FOUR_TOGETHER, pause, tau=2)
    assert shown.num_steps == 40
    assert shown.disturbed_s * shown.num_steps == pytest.approx(40.0)
    apart = figures(FOUR_APART, pause, tau=2)
    assert 0 < apart.disturbed_s * apart.num_steps <= 40.0 / 4 + 10.0


def test_a_factor_for_a_while_counts_for_that_while() -> None:
    """Ten seconds at half speed do the work of five."""
    slow = Disturbance(rank=0, speed=0.5, start_s=12.0, end_s=22.0)
    shown = figures(FOUR_TOGETHER, slow)
    assert shown.disturbed_s * shown.num_steps == pytest.approx(5.0)


def test_original_easgd_waits_for_the_worker_whose_turn_it_is() -> None:
    costs = AveragingCosts(pass_s=1.0, disturbances=(Disturbance(rank=1, speed=0.5),))
    usual = AveragingCosts(pass_s=1.0)
    total_s = [
        simulate_averaging("original_easgd", one, num_workers=2, num_batches=8).total_s
        for one in (usual, costs)
    ]
    assert total_s == [8.0, 12.0]


def test_a_slow_stage_delays_its_worker_as_far_as_a_step_shows() -> None:
    def step_s(worker: int, disturbances: tuple[Disturbance, ...]) -> float:
        assert all(one.rank == 3 and one.start_s == 0 for one in disturbances)
        return 15.0 if disturbances else 10.0

    slow = Disturbance(rank=3, speed=0.5, start_s=4.0, end_s=9.0)
    pause = Disturbance(rank=3, speed=0.0, start_s=1.0, end_s=2.0)
    found = worker_disturbances((slow, pause), 2, step_s)
    assert [(one.rank, one.start_s, one.end_s) for one in found] == [(1, 4.0, 9.0), (1, 1.0, 2.0)]
    assert [one.speed for one in found] == pytest.approx([2 / 3, 0.0])


def test_what_begins_after_all_is_over_is_refused() -> None:
    late = Disturbance(rank=1, speed=0.0, start_s=1e6, end_s=2e6)
    with pytest.raises(ConfigError, match="begins at 1e\\+06 s comes after the 20 steps"):
        figures(FOUR_TOGETHER, late)
