"""The parts of the schedules: orders, versions, texts, refusals, and the grids of the docs."""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path

import pytest

from ganglion.decide.schedules.pipeline import (
    SCHEDULES,
    Follower,
    ScheduleOptions,
    StageMap,
    make_schedule,
    stage_map_of,
)
from ganglion.decide.schedules.pipeline.action import Message, Order, action, parse_action
from ganglion.errors import ConfigError, GanglionError, LayoutError
from ganglion.trace import render_grid
from tests.support.simulated import run


def orders(name: str, num_ranks: int, m: int, options: ScheduleOptions | None = None) -> list[str]:
    result = run(name, num_ranks, (m,), options=options)
    return [" ".join(f"{a.kind}{a.index}" for a in result.order(rank)) for rank in range(num_ranks)]


def test_orders_drawn_in_the_sources() -> None:
    """The pictures in schedules/flush.py and schedules/zero_bubble.py."""
    assert orders("gpipe", 3, 4) == ["F0 F1 F2 F3 B0 B1 B2 B3"] * 3
    assert orders("one_f_one_b", 3, 4) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    zero_bubble = orders("zb", 3, 4)
    assert zero_bubble[0] == "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3"
    assert zero_bubble[2] == "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3"


def test_interleaved_forwards_drawn_in_the_source() -> None:
    result = run("interleaved", 2, (4,))
    chunks = [(a.stage // 2, a.index) for a in result.order(0) if a.kind == "F"]
    assert chunks == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]


def test_interleaved_with_one_chunk_is_one_f_one_b() -> None:
    assert orders("interleaved", 4, 6, ScheduleOptions(chunks=1)) == orders("1f1b", 4, 6)


def test_stage_maps() -> None:
    looped, folded = StageMap(3, 2), StageMap(3, 2, folded=True)
    assert [looped.stages_of(rank) for rank in range(3)] == [(0, 3), (1, 4), (2, 5)]
    assert [folded.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert stage_map_of("zbv", 3) == folded
    assert stage_map_of("interleaved", 3, ScheduleOptions(chunks=4)).num_stages == 12
    assert all(stage in looped.stages_of(looped.rank_of(stage)) for stage in range(6))


def test_two_bw_version_rule() -> None:
    """v(k) = max(floor((k-1)/m) - 1, 0) for k from 1 (2006.09503, section 3.1)."""
    schedule = make_schedule("2bw", 0, 4)
    for _ in range(5):
        schedule.admit(6)
    assert [schedule.version_of(k - 1) for k in range(1, 31)] == [
        max((k - 1) // 6 - 1, 0) for k in range(1, 31)
    ]


@pytest.mark.parametrize(("name", "staleness"), [("1f1b", 0), ("zb", 0), ("2bw", 1), ("stash", 3)])
def test_staleness(name: str, staleness: int) -> None:
    schedule = make_schedule(name, 0, 4)
    schedule.admit(1 if name == "stash" else 4)
    assert schedule.staleness == staleness


def test_two_bw_beats_flushing_and_keeps_two_versions() -> None:
    flush, never = run("1f1b", 4, (8,) * 5), run("2bw", 4, (8,) * 5)
    assert never.makespan_s == 5 * 8 * 3 + 3 * 3
    assert flush.makespan_s == 5 * (8 * 3 + 3 * 3)
    assert (flush.num_versions(), never.num_versions()) == (1, 2)


def test_books_of_finished_batches_are_closed() -> None:
    """A run of a million steps must not remember every microbatch."""
    for name in SCHEDULES:
        schedule = make_schedule(name, 0, 1)
        for _ in range(50):
            schedule.admit(3)
            while (chosen := schedule.next()) is not None:
                schedule.on_finish(chosen)
                for kind, step in (("F", 1), ("B", -1)):  # zbv: the other stage is here too
                    stage = chosen.stage + step
                    if chosen.kind == kind and 0 <= stage < schedule.stage_map.num_stages:
                        schedule.on_arrival(Message(kind, stage, chosen.index, 0))
        books = [v for v in vars(schedule).values() if isinstance(v, (dict, deque, list, set))]
        assert all(len(book) <= 4 for book in books), name


def test_a_follower_waits_for_its_order_and_for_its_input() -> None:
    leader, led = make_schedule("axonn", 1, 3), make_schedule("axonn", 1, 3)
    follower = Follower(led)
    for one in (leader, led):
        one.admit(2)
    arrival = Message("F", 1, 0, 0)
    led.on_arrival(arrival)
    assert follower.next() is None
    leader.on_arrival(arrival)
    chosen = leader.next()
    assert chosen == action("F", 1, 0)
    follower.take(Order(chosen))
    assert follower.next() is chosen
    led.on_finish(chosen)
    follower.take(Order(action("F", 1, 1)))
    assert follower.next() is None
    led.on_arrival(Message("F", 1, 1, 0))
    assert follower.next() == action("F", 1, 1)


def test_a_follower_keeps_the_order_across_lanes() -> None:
    led = make_schedule("2bw", 1, 2)
    follower = Follower(led)
    led.admit(2)
    follower.take(Order(action("R", 1, 0)))
    follower.take(Order(action("F", 1, 0)))
    led.on_arrival(Message("F", 1, 0, 0))
    assert follower.next() is None, "the reduction comes first, and there is nothing to reduce"


def test_an_order_may_come_before_its_batch() -> None:
    led = make_schedule("axonn", 0, 2)
    follower = Follower(led)
    follower.take(Order(action("F", 0, 0)))
    assert follower.next() is None
    led.admit(1)
    assert follower.next() == action("F", 0, 0)


def test_text_of_actions() -> None:
    assert str(action("F", 2, 0)) == "2F0"
    for kind in "FBWRU":
        one = action(kind, 12, 345)
        assert parse_action(str(one)) is one
    with pytest.raises(ConfigError, match="'2X0' is not an action"):
        parse_action("2X0")


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: make_schedule("what", 0, 2), ConfigError, "is not a schedule"),
        (lambda: make_schedule("1f1b", 2, 2), LayoutError, "stage 2 of 2 stages does not exist"),
        (lambda: make_schedule("1f1b", 0, 0), LayoutError, "0 ranks with 1 stages each"),
        (lambda: make_schedule("1f1b", 0, 2).admit(0), LayoutError, "0 microbatches is empty"),
        (lambda: make_schedule("2bw", 0, 4).admit(3), LayoutError, r"4 \+ 0 = 4 .* not 3"),
        (
            lambda: make_schedule("2bw", 0, 4, ScheduleOptions(limit=3)),
            ConfigError,
            "two_bw has no limit: leave out --limit",
        ),
        (
            lambda: make_schedule("axonn", 0, 4, ScheduleOptions(limit=0)),
            LayoutError,
            "a limit of 0 lets nothing in",
        ),
        (
            lambda: make_schedule("axonn", 0, 4, ScheduleOptions(priority="x")),
            ConfigError,
            "priority 'x'",
        ),
        (
            lambda: make_schedule("interleaved", 0, 4, ScheduleOptions(chunks=0)),
            LayoutError,
            "0 chunks a rank",
        ),
        (
            lambda: make_schedule("2bw", 0, 4, ScheduleOptions(extra=-1)),
            LayoutError,
            "a cap raised by -1",
        ),
    ],
)
def test_impossible_wishes_are_refused(make, kind: type[GanglionError], text: str) -> None:
    with pytest.raises(kind, match=text):
        make()


DOC = (Path(__file__).parents[3] / "docs" / "schedules.md").read_text(encoding="utf-8")
DRAWN = re.findall(
    r"`ganglion schedule (\w+) --microbatches (\d) --batches (\d)`\n\n```text\n(.*?)\n```",
    DOC,
    re.DOTALL,
)


@pytest.mark.parametrize(("name", "m", "batches", "grid"), DRAWN)
def test_grids_of_the_docs_are_the_codes(name: str, m: str, batches: str, grid: str) -> None:
    result = run(name, 4, (int(m),) * int(batches))
    assert "\n".join(render_grid(result.events(), 100)) == grid


def test_every_schedule_is_drawn() -> None:
    assert [name for name, _, _, _ in DRAWN] == list(SCHEDULES)
