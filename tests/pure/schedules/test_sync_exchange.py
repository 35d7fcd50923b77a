"""Synchronous exchanges start, end and commit at the same steps on all workers, or on none."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ganglion.decide.schedules.exchanges.sync import Exchange, SyncExchange
from ganglion.errors import CommError, ConfigError, ProtocolError


def agree(turns: SyncExchange, exchange: Exchange) -> bool:
    return turns.on_votes(exchange, dict.fromkeys(exchange.members, True))


def drive(turns: SyncExchange, num_steps: int) -> list[tuple[int, str, int]]:
    """Run the loop of a driver; return (steps done, what, fragment)."""
    seen = []
    for _ in range(num_steps):
        for ending in turns.ending():
            agree(turns, ending)
            seen.append((turns.step, "end", ending.fragment))
        for starting in turns.starting():
            seen.append((turns.step, "start", starting.fragment))
        if turns.delay == 0:
            for ending in turns.ending():
                agree(turns, ending)
        turns.on_step()
    return seen


def test_an_exchange_every_tau_steps_from_the_first() -> None:
    assert drive(SyncExchange([0, 1], tau=3), 8) == [(t, "start", 0) for t in (0, 3, 6)]


def test_nothing_to_average_before_the_first_step() -> None:
    turns = SyncExchange([0, 1], tau=3, begins_at_zero=False)
    assert drive(turns, 8) == [(t, "start", 0) for t in (3, 6)]


def test_fragments_take_turns_and_end_late() -> None:
    turns = SyncExchange([0], tau=4, num_fragments=2, delay=1, begins_at_zero=False)
    assert drive(turns, 8) == [  # the picture at the head of the module
        (2, "start", 1),
        (3, "end", 1),
        (4, "start", 0),
        (5, "end", 0),
        (6, "start", 1),
        (7, "end", 1),
    ]


def test_a_delay_of_tau_ends_one_round_late_and_before_the_next_start() -> None:
    turns = SyncExchange([0], tau=2, delay=2, begins_at_zero=False)
    seen = drive(turns, 7)
    assert seen == [
        (2, "start", 0),
        (4, "end", 0),
        (4, "start", 0),
        (6, "end", 0),
        (6, "start", 0),
    ]


@given(
    st.integers(1, 9).flatmap(
        lambda tau: st.tuples(st.just(tau), st.integers(1, tau), st.integers(0, tau))
    ),
    st.integers(1, 60),
)
def test_every_fragment_has_its_turn_and_all_workers_agree(
    shape: tuple[int, int, int], num_steps: int
) -> None:
    tau, num_fragments, delay = shape
    workers = [
        SyncExchange(range(3), tau=tau, num_fragments=num_fragments, delay=delay) for _ in range(3)
    ]
    seen = [drive(turns, num_steps) for turns in workers]
    assert seen[0] == seen[1] == seen[2]
    for fragment in range(num_fragments):
        starts = [t for t, what, which in seen[0] if what == "start" and which == fragment]
        assert all(b - a == tau for a, b in pairwise(starts))
        assert len(starts) in (num_steps // tau, -(-num_steps // tau))


def test_asked_again_nothing_starts_again() -> None:
    turns = SyncExchange([0, 1], tau=1)
    assert len(turns.starting()) == 1
    assert turns.starting() == []


# --- votes ----------------------------------------------------------------------------------------


def test_one_vote_against_discards_for_all() -> None:
    turns = SyncExchange([3, 5], tau=1)
    (exchange,) = turns.starting()
    assert not turns.on_votes(exchange, {3: True, 5: False})
    assert (turns.version, turns.num_discarded, turns.in_flight) == (0, 1, ())


def test_votes_of_others_are_a_protocol_error() -> None:
    turns = SyncExchange([3, 5], tau=1)
    (exchange,) = turns.starting()
    with pytest.raises(ProtocolError, match=r"votes of workers \[3\], its members are \[3, 5\]"):
        turns.on_votes(exchange, {3: True})


def test_nobody_votes_twice() -> None:
    turns = SyncExchange([0], tau=1)
    (exchange,) = turns.starting()
    agree(turns, exchange)
    with pytest.raises(ProtocolError, match="not in flight"):
        agree(turns, exchange)


def test_refusals_in_a_row_name_the_worker() -> None:
    turns = SyncExchange([0, 7], tau=1, max_discarded=2)
    for _ in range(2):
        (exchange,) = turns.starting()
        turns.on_votes(exchange, {0: True, 7: False})
        turns.on_step()
    (exchange,) = turns.starting()
    with pytest.raises(CommError, match=r"workers \[7\] refused exchange 2"):
        turns.on_votes(exchange, {0: True, 7: False})


def test_an_agreement_forgives_refusals() -> None:
    turns = SyncExchange([0, 7], tau=1, max_discarded=1)
    for agrees in (False, True, False, True, False):
        (exchange,) = turns.starting()
        turns.on_votes(exchange, {0: True, 7: agrees})
        turns.on_step()
    assert (turns.version, turns.num_discarded) == (2, 3)


# --- members --------------------------------------------------------------------------------------


def test_members_change_only_between_exchanges() -> None:
    turns = SyncExchange([0, 1], tau=2, delay=1)
    (first,) = turns.starting()
    turns.change_members([0, 1, 2])
    assert first.num_workers == 2
    turns.on_step()
    assert turns.starting() == []
    assert turns.members == (0, 1)  # one is in flight, among two
    agree(turns, first)
    turns.on_step()
    (second,) = turns.starting()
    assert second.members == (0, 1, 2)


def test_a_lost_group_gives_the_turn_back() -> None:
    turns = SyncExchange([0, 1], tau=2)
    (lost,) = turns.starting()
    turns.discard()
    turns.change_members([0])
    (again,) = turns.starting()
    assert (again.step, again.members, turns.num_discarded) == (lost.step, (0,), 1)
    assert again.number > lost.number


def test_a_newcomer_stands_where_the_others_stand() -> None:
    old = SyncExchange([0], tau=3)
    drive(old, 5)
    new = SyncExchange([0], tau=3)
    new.move_to(old.step, old.version)
    assert drive(new, 6) == drive(old, 6)
    assert new.version == old.version


def test_an_exchange_out_of_turn_takes_the_turn() -> None:
    turns = SyncExchange([0], tau=2)
    (exchange,) = turns.start_now()
    assert exchange.due == turns.step
    agree(turns, exchange)
    assert turns.starting() == []


def test_no_exchange_out_of_turn_while_one_is_in_flight() -> None:
    turns = SyncExchange([0], tau=2, delay=1)
    turns.starting()
    with pytest.raises(ProtocolError, match=r"exchanges \[0\] are in flight"):
        turns.start_now()


def test_a_resumed_exchange_ends_when_it_was_due() -> None:
    turns = SyncExchange([0], tau=4, delay=2, begins_at_zero=False)
    drive(turns, 5)
    (pending,) = turns.in_flight
    resumed = SyncExchange([0], tau=4, delay=2, begins_at_zero=False)
    resumed.move_to(turns.step, turns.version)
    resumed.resume(pending)
    assert drive(resumed, 9) == drive(turns, 9)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tau": 0}, "tau = 0 .* 1 or more"),
        ({"tau": 3, "num_fragments": 4}, "fragments = 4 .* 1 to tau = 3"),
        ({"tau": 3, "delay": 4}, "delay = 4 .* 0 to tau = 3"),
        ({"tau": 3, "delay": -1}, "delay = -1"),
    ],
)
def test_numbers_that_make_no_sense(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SyncExchange([0], **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("members", [[], [1, 1]])
def test_members_are_named_once(members: list[int]) -> None:
    with pytest.raises(ConfigError, match="no group"):
        SyncExchange(members, tau=1)


def test_what_was_given_up_and_applied_elsewhere_is_known_until_the_next_exchange() -> None:
    turns = SyncExchange(range(3), tau=2, num_fragments=2, delay=2)
    started = turns.starting()
    turns.on_step()
    started += turns.starting()
    turns.discard()
    assert len(started) == 2
    assert turns.missed(0) == ()
    assert turns.missed(1) == (started[0],)
    assert turns.missed(2) == tuple(started)
    turns.discard()  # nothing more is in flight: what was given up stays known
    assert turns.missed(2) == tuple(started)
    turns.change_members([0, 1])
    turns.move_to(1, 2)
    assert turns.missed(2) == ()
    turns.starting()
    assert turns.missed(4) == ()
