"""The simulator itself: repeatable, with links, replicas and troubles, and the trace it leaves."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ganglion.decide.costs import StageTimes
from ganglion.decide.schedules.pipeline import make_schedule
from ganglion.decide.schedules.pipeline.action import Message, action
from ganglion.decide.schedules.pipeline.listed import GPipe, OneFOneB
from ganglion.decide.simulator import (
    Disturbance,
    Route,
    Simulation,
    SimulationOptions,
    Transfer,
    simulate,
)
from ganglion.decide.simulator.options import end_of
from ganglion.decide.simulator.wires import SharedLink
from ganglion.errors import ConfigError, LayoutError, ProtocolError
from tests.support.simulated import UNIT, run


def simulated(name: str, num_ranks: int, times: list[StageTimes], m: int, **options) -> Simulation:
    return simulate(
        lambda rank: make_schedule(name, rank, num_ranks), times, [m], SimulationOptions(**options)
    )


def test_repeatable_and_jitter_depends_on_the_seed() -> None:
    times = [StageTimes(forward_s=1, backward_s=2, jitter=0.3)] * 4
    spans = [run("2bw", 4, (8, 8), times, seed=seed).makespan_s for seed in (1, 1, 2)]
    assert spans[0] == spans[1] != spans[2]


# --- links -------------------------------------------------------------------------------------


class Wire:
    """One port for every message, and perhaps for the reductions too."""

    def __init__(self, bytes_per_s: float, *, latency_s: float = 0.0, reduce_bytes: float = 0.0):
        self._route = Route("port", bytes_per_s, latency_s)
        self._reduce_bytes = reduce_bytes

    def route(self, source: int, target: int) -> Route:
        return self._route

    def reduction(self, stage: int) -> tuple[Transfer, ...]:
        return (Transfer(self._route, self._reduce_bytes),) if self._reduce_bytes else ()


def test_a_message_takes_latency_and_bytes_over_bandwidth() -> None:
    times = [StageTimes(forward_s=1, backward_s=2, message_bytes=100)] * 2
    result = simulated("1f1b", 2, times, 1, network=Wire(50, latency_s=0.25))
    # forward 1, message 2.25, forward 1, backward 2, message 2.25, backward 2
    assert result.makespan_s == pytest.approx(10.5)
    message, num_bytes, source, target, start_s, sent_s, arrival_s = result.messages[0]
    assert (message.stage, num_bytes, source, target) == (1, 100, 0, 1)
    assert (start_s, sent_s, arrival_s) == (1, 3, 3.25)


def test_an_infinitely_fast_wire_costs_its_latency_only() -> None:
    times = [StageTimes(forward_s=1, backward_s=2, message_bytes=100)] * 2
    result = simulated("1f1b", 2, times, 1, network=Wire(math.inf, latency_s=0.25))
    assert result.makespan_s == pytest.approx(6.5)


def test_two_messages_share_a_port() -> None:
    """Three stages: an activation and a gradient are under way at once and slow each other."""
    times = [StageTimes(forward_s=1, backward_s=1, message_bytes=1)] * 3
    alone = simulated("gpipe", 3, times, 4, network=Wire(math.inf))
    shared = simulated("gpipe", 3, times, 4, network=Wire(1))
    assert shared.makespan_s > alone.makespan_s + 4
    together = [
        (a, b) for a, b in itertools.combinations(shared.messages, 2) if a[4] < b[5] and b[4] < a[5]
    ]
    assert together, "no two messages ever met"


def test_a_reduction_shares_the_port_with_messages() -> None:
    times = [StageTimes(forward_s=1, backward_s=1, message_bytes=4)] * 2
    without = simulated("2bw", 2, times, 6, network=Wire(10))
    slowed = simulated("2bw", 2, times, 6, network=Wire(10, reduce_bytes=20))
    reduced = [row for row in slowed.rows if row[0].kind == "R"]
    assert all(end_s - start_s >= 2 for _, start_s, end_s, _, _ in reduced)
    assert slowed.makespan_s > without.makespan_s


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.1, 50)), min_size=1, max_size=6))
def test_sharing_moves_all_bytes_at_the_full_rate(flows: list[tuple[float, float]]) -> None:
    """Processor sharing is work-conserving: compared with a fine-grained walk over time."""
    link: SharedLink[int] = SharedLink(2.0)
    waiting = sorted((start, number, size) for number, (start, size) in enumerate(flows))
    ends: dict[int, float] = {}
    while waiting or (link.next_end_s() is not None):
        end_s = link.next_end_s()
        if waiting and (end_s is None or waiting[0][0] <= end_s):
            start, number, size = waiting.pop(0)
            link.add(start, size, number)
        else:
            assert end_s is not None
            ends[link.pop(end_s)] = end_s
    assert ends == pytest.approx(_walked(flows, 2.0), abs=1e-6)


def _walked(flows: list[tuple[float, float]], rate: float) -> dict[int, float]:
    """The same by hand: from change to change, everybody moves its share."""
    left = {n: size for n, (_, size) in enumerate(flows)}
    starts = {n: start for n, (start, _) in enumerate(flows)}
    now, ends = 0.0, {}
    while left:
        active = [n for n in left if starts[n] <= now]
        coming = [starts[n] for n in left if starts[n] > now]
        if not active:
            now = min(coming)
            continue
        share = rate / len(active)
        first = min(now + left[n] / share for n in active)
        until = min([first, *coming])
        for n in active:
            left[n] -= (until - now) * share
            if left[n] <= 1e-9:
                ends[n] = until
                del left[n]
        now = until
    return ends


# --- replicas and troubles ---------------------------------------------------------------------


def test_replicas_that_nothing_tells_apart_are_simulated_once() -> None:
    one = simulated("1f1b", 4, [UNIT] * 4, 8, num_replicas=1)
    many = simulated("1f1b", 4, [UNIT] * 4, 8, num_replicas=16)
    assert many.num_replicas == 1
    assert many.rows == one.rows


def test_a_reduction_waits_for_the_slowest_replica() -> None:
    times = [StageTimes(forward_s=1, backward_s=2, reduce_s=1)] * 2
    late = Disturbance(rank=2, speed=0.5)  # the first stage of the second replica
    result = simulated("1f1b", 2, times, 4, num_replicas=2, disturbances=(late,))
    ends = {row[4]: row[2] for row in result.rows if str(row[0]) == "0R0"}
    backwards = {row[4]: row[2] for row in result.rows if str(row[0]) == "0B3"}
    assert ends[0] == ends[2] == backwards[2] + 1 > backwards[0] + 1


def test_jitter_makes_replicas_differ_and_each_obeys_the_order() -> None:
    times = [StageTimes(forward_s=1, backward_s=2, jitter=0.4)] * 3
    result = simulated("1f1b", 3, times, 5, num_replicas=2)
    assert result.num_replicas == 2
    assert [s.action for s in result.steps(0)] != [s.start_s for s in result.steps(1)]
    assert {s.action for s in result.steps(0)} == {s.action for s in result.steps(1)}


def test_a_pause_delays_by_its_length_and_a_straggler_by_its_factor() -> None:
    calm = simulated("1f1b", 1, [UNIT], 4).makespan_s
    paused = simulated(
        "1f1b", 1, [UNIT], 4, disturbances=(Disturbance(rank=0, speed=0, start_s=2.5, end_s=7.5),)
    )
    assert paused.makespan_s == calm + 5
    slow = simulated("1f1b", 1, [UNIT], 4, disturbances=(Disturbance(rank=0, speed=0.5),))
    assert slow.makespan_s == 2 * calm


@pytest.mark.parametrize(
    ("start_s", "end_s"),
    [(0, 2), (4, 6), (4.5, 6.5), (5, 14), (7, 14), (8.5, 14.5), (10, 14), (12, 14)],
)
def test_end_of_work_through_a_pause_and_a_slow_stretch(start_s: float, end_s: float) -> None:
    """2 s of work; half speed from 5 to 9 s, a pause from 9 to 12 s: checked by hand."""
    troubles = [
        Disturbance(rank=0, speed=0.5, start_s=5, end_s=9),
        Disturbance(rank=0, speed=0, start_s=9, end_s=12),
    ]
    expected = {4: 7, 4.5: 8, 5: 9, 7: 13, 8.5: 13.75}.get(start_s, end_s)
    assert end_of(2, start_s, troubles) == expected


def test_where_disturbances_overlap_the_slowest_counts() -> None:
    """Half speed all the time, and a pause from 1 to 3: 0.5 before it, the rest after it."""
    troubles = [
        Disturbance(rank=0, speed=0.5),
        Disturbance(rank=0, start_s=1, end_s=3, speed=0),
    ]
    assert end_of(2, 0, troubles) == 6.0
    assert end_of(2, 0, troubles[::-1]) == 6.0


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: Disturbance(rank=0, speed=0), ConfigError, "would pause for ever"),
        (lambda: Disturbance(rank=0, speed=-1), ConfigError, "a speed of -1"),
        (lambda: Disturbance(rank=0, speed=1, start_s=3, end_s=2), ConfigError, "has no length"),
        (
            lambda: simulated("1f1b", 1, [UNIT], 1, disturbances=(Disturbance(rank=3, speed=1),)),
            LayoutError,
            "rank 3, but ranks go from 0 to 0",
        ),
        (lambda: simulate(lambda s: GPipe(s, 1), [], [1]), LayoutError, "0 stages"),
        (lambda: simulated("zbv", 2, [UNIT] * 2, 1), LayoutError, "2 stage times .* 4 stages"),
        (lambda: StageTimes(forward_s=-1, backward_s=1), ConfigError, "forward_s is -1"),
        (lambda: StageTimes(forward_s=math.nan, backward_s=1), ConfigError, "forward_s is nan"),
    ],
)
def test_impossible_wishes_are_refused(make, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        make()


def test_schedules_that_wait_for_nothing_are_noticed() -> None:
    class Deaf(OneFOneB):
        def on_arrival(self, message: Message) -> None:
            """Hear nothing."""

    with pytest.raises(ProtocolError, match=r"stages \[0, 1\] wait for messages"):
        simulate(lambda s: Deaf(s, 2), [StageTimes(forward_s=1, backward_s=1)] * 2, [1])


# --- the trace ---------------------------------------------------------------------------------


def test_events_are_those_of_a_real_run() -> None:
    result = run("zb", 2, (2,))
    events = result.events()
    messages = {
        f"{verb}_{kind}" for verb in ("send", "receive") for kind in ("forward", "backward")
    }
    assert {e.kind for e in events} == {
        "forward",
        "backward",
        "weight",
        "reduce",
        "update",
        *messages,
    }
    forward = [e for e in events if e.kind == "forward"]
    assert {(e.rank, e.microbatch) for e in forward} == set(itertools.product((0, 1), (0, 1)))
    assert [e.start_s for e in events] == sorted(e.start_s for e in events)


def test_the_two_ends_of_a_message_share_a_flow() -> None:
    events = run("1f1b", 3, (2,)).events(lambda place: place + 10)
    sent = {e.flow: e for e in events if e.kind.startswith("send_")}
    received = {e.flow: e for e in events if e.kind.startswith("receive_")}
    assert len(sent) == len(received) == 2 * 2 * 2
    for flow, send in sent.items():
        step = 1 if send.kind == "send_forward" else -1
        assert received[flow].rank - send.rank == received[flow].stage - send.stage == step
        assert received[flow].microbatch == send.microbatch


def test_chunks_of_one_rank_exchange_without_delay() -> None:
    """ZB-V: the last rank holds both stages at the fold, and no wire lies between them."""
    times = [StageTimes(forward_s=1, backward_s=1, weight_s=1, latency_s=5)] * 4
    result = run("zbv", 2, (1,), times)
    steps = {step.action: step for step in result.steps()}
    assert steps[action("F", 2, 0)].start_s == steps[action("F", 1, 0)].end_s
    assert steps[action("F", 1, 0)].start_s == steps[action("F", 0, 0)].end_s + 5
