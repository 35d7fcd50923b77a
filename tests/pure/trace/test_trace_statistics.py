"""Statistics and critical paths of traces small enough to work out by hand."""

from __future__ import annotations

import pytest

from ganglion.errors import DataError
from ganglion.trace.critical import critical_path
from ganglion.trace.event import COMM, COMPUTE, HOST, NONE, Event
from ganglion.trace.statistics import common, merged, outside_s, summarise

replace = Event._replace


def event(rank: int, lane: str, kind: str, start_s: float, end_s: float, **more: int) -> Event:
    return Event(rank=rank, lane=lane, kind=kind, start_s=start_s, end_s=end_s, **more)


def compute(stage: int, kind: str, microbatch: int, start_s: float, end_s: float) -> Event:
    more = {"stage": stage, "microbatch": microbatch, "step": 0, "version": 0}
    return event(stage, COMPUTE, kind, start_s, end_s, **more)


def message(kind: str, source: int, target: int, flow: int, start_s: float) -> list[Event]:
    """Half a second of sending, a quarter of a second of latency."""
    more = {"microbatch": flow % 2, "step": 0, "bytes": 100, "flow": flow}
    return [
        event(source, COMM, f"send_{kind}", start_s, start_s + 0.5, stage=source, **more),
        event(
            target, COMM, f"receive_{kind}", start_s + 0.25, start_s + 0.75, stage=target, **more
        ),
    ]


def two_stages() -> list[Event]:
    """Draw 1F1B of two stages and two microbatches.

    0   F0  F1  .......... B0(5.5-7.5) . B1(8.5-10.5) reduce(-11.5) update(-12)
    1       F0(1.75) B0(2.75) F1(4.75) B1(5.75-7.75) reduce(-8.75) update(-9.25)
    """
    ends = [
        event(0, COMM, "reduce", 10.5, 11.5, stage=0, step=0, bytes=400),
        event(1, COMM, "reduce", 7.75, 8.75, stage=1, step=0, bytes=400),
    ]
    return [
        compute(0, "forward", 0, 0.0, 1.0),
        compute(0, "forward", 1, 1.0, 2.0),
        compute(1, "forward", 0, 1.75, 2.75),
        compute(1, "backward", 0, 2.75, 4.75),
        compute(1, "forward", 1, 4.75, 5.75),
        compute(1, "backward", 1, 5.75, 7.75),
        compute(0, "backward", 0, 5.5, 7.5),
        compute(0, "backward", 1, 8.5, 10.5),
        *message("forward", 0, 1, 0, 1.0),
        *message("forward", 0, 1, 1, 2.0),
        *message("backward", 1, 0, 2, 4.75),
        *message("backward", 1, 0, 3, 7.75),
        *[replace(reduction, axis="data") for reduction in ends],
        event(0, COMPUTE, "update", 11.5, 12.0, stage=0, step=0),
        event(1, COMPUTE, "update", 8.75, 9.25, stage=1, step=0),
    ]


def data_parallel() -> list[Event]:
    """Return two ranks without stages; the reduction starts in the middle of the backward."""
    found = []
    for rank in (0, 1):
        found += [
            event(rank, COMPUTE, "forward", 0, 1, step=0, microbatch=0),
            event(rank, COMPUTE, "backward", 1, 3, step=0, microbatch=0),
            event(rank, COMM, "reduce", 2, 4, step=0, bytes=8)._replace(axis="data"),
            event(rank, COMPUTE, "update", 4, 5, step=0),
            event(rank, HOST, "agree", 5, 5.5, step=0),
            event(rank, COMPUTE, "forward", 6, 7, step=1, microbatch=0),
        ]
    return found


def test_a_pipeline_in_numbers() -> None:
    found = summarise(two_stages())
    assert (found.span_s, found.compute_span_s, found.num_unmatched) == (12, 12, 0)
    first, second = found.ranks
    assert (first.rank, first.stages) == (0, (0,))
    assert first.busy_s == {
        "forward": 2,
        "backward": 4,
        "reduce": 1,
        "update": 0.5,
        "send_forward": 1,
        "receive_backward": 1,
    }
    assert (first.compute_s, first.bubble) == (6.5, 1 - 6.5 / 12)
    assert first.exposed_comm_s == 0.75 + 0.75 + 1  # two gradients, the reduction
    assert second.exposed_comm_s == 0.75 + 1  # the second activation came while it computed
    assert (first.peak_live, second.peak_live) == (2, 1)
    assert (first.versions, second.versions) == ({0: 1}, {1: 1})


def test_links_and_axes() -> None:
    found = summarise(two_stages())
    assert [(one.source, one.target) for one in found.links] == [(0, 1), (1, 0)]
    link = found.links[0]
    assert (link.num_messages, link.bytes, link.busy_s, link.use) == (2, 200, 1, 1 / 12)
    (axis,) = found.axes
    assert (axis.axis, axis.num_collectives, axis.bytes, axis.seconds) == ("data", 2, 800, 2)


def test_a_link_is_not_busier_than_time_passes() -> None:
    both = [*message("forward", 0, 1, 0, 1.0), *message("forward", 0, 1, 1, 1.25)]
    assert summarise(both).links[0].busy_s == 0.75


def test_a_message_without_its_other_end_is_counted_and_left_out() -> None:
    sent, received = message("forward", 0, 1, 7, 1.0)
    found = summarise([sent, replace(received, flow=8)])
    assert (found.links, found.num_unmatched) == ((), 2)
    assert found.ranks[1].exposed_comm_s == 0.5  # its own receive is all that is known


def test_a_trace_without_stages_and_messages() -> None:
    found = summarise(data_parallel())
    first = found.ranks[0]
    assert (first.stages, first.peak_live, first.versions, found.links) == ((), 1, {}, ())
    assert first.exposed_comm_s == 1  # of the reduction, what the backward does not cover
    assert first.compute_s == 5
    assert first.bubble == pytest.approx(2 / 7)
    assert found.axes[0].num_collectives == 2


def test_a_trace_without_computation() -> None:
    found = summarise([event(0, HOST, "checkpoint", 1, 2)])
    assert (found.span_s, found.ranks[0].bubble, found.ranks[0].compute_s) == (1, 0, 0)


def test_an_instant_has_no_shares() -> None:
    sent, received = (replace(one, start_s=1, end_s=1) for one in message("forward", 0, 1, 0, 1))
    assert summarise([sent, received]).links[0].use == 0


def test_an_empty_trace_is_refused() -> None:
    for function in (summarise, critical_path):
        with pytest.raises(DataError, match=r"holds no events; .*trace.enabled"):
            function([])


def test_a_microbatch_lives_until_its_weight_gradients() -> None:
    first = [compute(0, kind, 0, at, at + 1) for at, kind in enumerate(("forward", "backward"))]
    second = [compute(0, "forward", 1, 2, 3), compute(0, "backward", 1, 3, 4)]
    assert summarise(first + second).ranks[0].peak_live == 1
    delayed = compute(0, "weight", 0, 4, 5)
    assert summarise([*first, *second, delayed]).ranks[0].peak_live == 2


def test_microbatch_numbers_may_come_again_in_each_step() -> None:
    one = [compute(0, "forward", 0, 0, 1), compute(0, "backward", 0, 1, 2)]
    other = [replace(e, start_s=e.start_s + 2, end_s=e.end_s + 2, microbatch=1) for e in one]
    later = [replace(e, start_s=e.start_s + 4, end_s=e.end_s + 4) for e in one]
    numbered = [*one, *other, *(replace(e, step=1) for e in later)]
    assert summarise(numbered).ranks[0].peak_live == 1
    unnumbered = [replace(e, step=NONE) for e in numbered]
    assert summarise(unnumbered).ranks[0].peak_live == 1


def test_what_a_cut_trace_does_not_show_lies_outside() -> None:
    whole = [compute(0, "forward", 1, 0, 1), compute(0, "backward", 1, 1, 2)]
    assert summarise([*whole, compute(0, "backward", 0, 2, 3)]).ranks[0].peak_live == 2
    assert summarise([compute(0, "forward", 0, -1, 0), *whole]).ranks[0].peak_live == 2


def test_versions_of_a_pipeline_that_never_flushes() -> None:
    def forward(k: int, version: int, at: float) -> Event:
        return replace(compute(0, "forward", k, at, at + 1), version=version)

    def backward(k: int, version: int, at: float) -> Event:
        return replace(compute(0, "backward", k, at, at + 1), version=version)

    update = event(0, HOST, "update", 2, 2.5, stage=0, step=0)
    trace = [forward(0, 0, 0), backward(0, 0, 1), update, forward(1, 1, 3), backward(1, 1, 4)]
    assert summarise(trace).ranks[0].versions == {0: 1}
    # Microbatch 1 went forward on version 0 and is still under way when version 1 is made.
    late = [forward(0, 0, 0), backward(0, 0, 1), forward(1, 0, 1.5), update, backward(1, 0, 4)]
    assert summarise(late).ranks[0].versions == {0: 2}
    third = [forward(2, 1, 3), event(0, HOST, "update", 3.5, 3.75, stage=0, step=1)]
    assert summarise([*late, *third, backward(2, 1, 5)]).ranks[0].versions == {0: 3}


def test_several_stages_on_a_rank() -> None:
    chunks = [replace(compute(stage, "forward", 0, stage, stage + 1), rank=0) for stage in (0, 3)]
    (rank,) = summarise(chunks).ranks
    assert (rank.stages, rank.peak_live, rank.versions) == ((0, 3), 2, {0: 1, 3: 1})


def test_unions_of_intervals() -> None:
    union = merged([(4, 6), (0, 2), (1, 3), (3, 3.5), (4.5, 5)])
    assert union == [(0, 3.5), (4, 6)]
    others = [(-1.0, 1.0), (2.0, 5.0), (5.5, 9.0)]
    assert common(union, others) == [(0, 1), (2, 3.5), (4, 5), (5.5, 6)]
    assert outside_s(union, others) == 1 + 0.5
    assert outside_s(union, []) == 5.5
    assert outside_s([], union) == 0


def test_the_critical_path_of_a_pipeline() -> None:
    path = critical_path(two_stages())
    steps = [(link.event.rank, link.event.kind, link.event.microbatch) for link in path.links]
    assert steps == [
        (0, "forward", 0),
        (0, "send_forward", 0),
        (1, "receive_forward", 0),
        (1, "forward", 0),
        (1, "backward", 0),
        (1, "forward", 1),
        (1, "backward", 1),
        (1, "send_backward", 1),
        (0, "receive_backward", 1),
        (0, "backward", 1),
        (0, "reduce", NONE),
        (0, "update", NONE),
    ]
    assert path.seconds == {
        "forward": 3,
        "backward": 6,
        "send_forward": 0.5,
        "receive_forward": 0.25,
        "send_backward": 0.5,
        "receive_backward": 0.25,
        "reduce": 1,
        "update": 0.5,
    }
    assert (path.waiting_s, path.span_s) == (0, 12)


def test_the_order_of_the_events_does_not_matter() -> None:
    assert critical_path(two_stages()[::-1]) == critical_path(two_stages())
    assert summarise(two_stages()[::-1]) == summarise(two_stages())


def test_waiting_is_what_no_event_explains() -> None:
    path = critical_path([e for e in data_parallel() if e.rank == 0])
    kinds = [(link.event.kind, link.waiting_s, link.seconds) for link in path.links]
    assert kinds == [
        ("forward", 0, 1),
        ("backward", 0, 1),  # up to the start of the reduction in its middle
        ("reduce", 0, 2),
        ("update", 0, 1),
        ("agree", 0, 0.5),
        ("forward", 0.5, 1),
    ]
    assert (path.waiting_s, path.span_s) == (0.5, 7)
    assert sum(path.seconds.values()) + path.waiting_s == path.span_s


def test_a_split_backward_and_an_update_without_reduction() -> None:
    trace = [
        compute(0, "forward", 0, 0, 1),
        compute(0, "backward", 0, 1, 2),
        compute(0, "weight", 0, 3, 4),
        event(0, HOST, "update", 4.5, 5, stage=0, step=0),
    ]
    path = critical_path(trace)
    assert [link.waiting_s for link in path.links] == [0, 0, 1, 0.5]
    assert path.span_s == 5


def test_a_forward_needs_the_update_that_made_its_weights() -> None:
    """The last update before it made version 2, which it does not use."""
    trace = [
        event(0, HOST, "update", 0, 1, stage=0, step=0),
        event(0, HOST, "update", 1, 2, stage=0, step=1),
        replace(compute(0, "forward", 0, 2, 3), version=1),
    ]
    path = critical_path(trace)
    assert [(link.event.step, link.waiting_s) for link in path.links] == [(0, 0), (0, 1)]
    unknown = critical_path([*trace[:2], replace(trace[2], version=NONE)])
    assert [link.event.step for link in unknown.links] == [0, 1, 0]


def test_a_receive_posted_early_counts_from_the_end_of_its_send() -> None:
    sent, received = message("forward", 0, 1, 0, 1.0)
    trace = [compute(0, "forward", 0, 0, 1), sent, replace(received, start_s=0)]
    assert critical_path(trace).seconds == {
        "forward": 1,
        "send_forward": 0.5,
        "receive_forward": 0.25,
    }


def test_clocks_that_disagree_do_not_break_the_path() -> None:
    """A message that seems to arrive before it was sent takes no time."""
    sent, received = message("forward", 0, 1, 0, 1.0)
    trace = [
        compute(0, "forward", 0, 0, 1),
        sent,
        replace(received, start_s=0.8, end_s=0.9),
        compute(1, "forward", 0, 0.9, 1.9),
    ]
    path = critical_path(trace)
    assert len(path.links) == 4
    assert min(link.seconds for link in path.links) == 0
    assert path.span_s == pytest.approx(1.9)
    assert path.waiting_s == 0


def test_messages_of_no_length_cannot_lead_in_a_circle() -> None:
    """Two ranks that exchange messages at one moment, after which both go on."""
    one = [replace(e, start_s=1, end_s=1) for e in message("forward", 0, 1, 0, 1)]
    other = [replace(e, start_s=1, end_s=1) for e in message("backward", 1, 0, 1, 1)]
    before = [compute(0, "forward", 0, 0, 1), compute(1, "backward", 1, 0, 1)]
    after = [compute(1, "forward", 0, 1, 2), compute(0, "backward", 1, 1, 2)]
    for trace in (one + other + before + after, after + before + other + one):
        path = critical_path(trace)
        assert path.span_s == 2
        assert path.waiting_s == 0
