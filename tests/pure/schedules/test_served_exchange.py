"""The books of a served centre: order, numbers, versions, staleness, who comes and goes."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from ganglion.decide.plan import ROUND_ROBIN
from ganglion.decide.schedules.exchanges.served import (
    EXCHANGE,
    JOIN,
    LEAVE,
    LOOK,
    PULL,
    PUSH,
    RETURN,
    OrderEntry,
    Refuse,
    Repeat,
    Request,
    Serve,
    ServedCenter,
)
from ganglion.errors import ConfigError, ProtocolError


def parse_order(text: str) -> list[OrderEntry]:
    lines = [line.split() for line in text.splitlines()]
    return [OrderEntry(kind, int(worker), not verdict) for kind, worker, *verdict in lines]


def joined(num_workers: int, *args: object, **options: object) -> ServedCenter:
    """Return a centre whose workers have all joined."""
    books = ServedCenter(num_workers, *args, **options)  # type: ignore[arg-type]
    for worker in range(num_workers):
        books.arrive(Request(JOIN, worker))
        assert books.next() == Serve(Request(JOIN, worker), 0, 0)
    return books


def served(books: ServedCenter) -> list[int]:
    """Take every action that can be taken now; return the workers in order."""
    found = []
    while (action := books.next()) is not None:
        assert isinstance(action, Serve)
        found.append(action.request.worker)
    return found


def test_first_come_is_first_served_and_each_write_is_a_version() -> None:
    books = joined(3)
    for worker in (2, 0, 1):
        books.arrive(Request(EXCHANGE, worker, 1))
    actions = [books.next() for _ in range(4)]
    assert [a.request.worker for a in actions if isinstance(a, Serve)] == [2, 0, 1]
    assert [a.version for a in actions if isinstance(a, Serve)] == [1, 2, 3]
    assert [a.staleness for a in actions if isinstance(a, Serve)] == [0, 1, 2]
    assert actions[3] is None
    assert books.staleness == Counter({0: 1, 1: 1, 2: 1})
    assert books.max_queue == 3


def test_reading_is_no_version() -> None:
    books = joined(1)
    books.arrive(Request(PULL, 0, 1))
    assert books.next() == Serve(Request(PULL, 0, 1), 0, 0)
    books.arrive(Request(LOOK, 7))  # needs no membership
    assert books.next() == Serve(Request(LOOK, 7), 0, 0)
    assert books.version == 0
    assert not books.staleness


def test_a_number_that_comes_again_is_repeated_and_not_applied() -> None:
    books = joined(2)
    books.arrive(Request(EXCHANGE, 0, 1))
    assert isinstance(books.next(), Serve)
    books.leave(0)  # the connection is lost, the reply with it
    books.rejoin(0, 1)
    books.arrive(Request(EXCHANGE, 0, 1))
    assert books.next() == Repeat(Request(EXCHANGE, 0, 1))
    assert (books.version, books.num_repeated) == (1, 1)
    books.arrive(Request(EXCHANGE, 0, 2))
    assert isinstance(books.next(), Serve)
    assert books.version == 2


def test_numbers_without_order_are_refused_by_name() -> None:
    books = joined(1)
    with pytest.raises(ProtocolError, match=r"worker 0 sent request 3 \(push\).* request 0 last"):
        books.arrive(Request(PUSH, 0, 3))


def test_a_restored_centre_takes_the_workers_word_for_its_numbers() -> None:
    books = ServedCenter(1, version=40)
    books.rejoin(0, 8)
    books.arrive(Request(EXCHANGE, 0, 8, version=45))  # it had seen what the snapshot has not
    assert books.next() == Serve(Request(EXCHANGE, 0, 8, version=45), 41, 0)


def test_a_push_from_before_the_centre_was_restored_is_refused() -> None:
    books = ServedCenter(1, version=40)
    books.rejoin(0, 8)
    books.arrive(Request(PUSH, 0, 8, version=45))
    assert isinstance(books.next(), Refuse)
    assert books.version == 40


def test_who_is_no_member_may_not_write_and_nobody_joins_twice() -> None:
    books = joined(1)
    with pytest.raises(ProtocolError, match="worker 3 sent a push but is no member"):
        books.arrive(Request(PUSH, 3, 1))
    with pytest.raises(ProtocolError, match="worker 0 joined twice"):
        books.arrive(Request(JOIN, 0))
    with pytest.raises(ProtocolError, match="sent a 'dance'"):
        books.arrive(Request("dance", 0, 1))


@pytest.mark.parametrize(("max_staleness", "limit"), [(None, 8), (3, 3)])
def test_a_push_beyond_the_limit_is_refused(max_staleness: int | None, limit: int) -> None:
    books = joined(2, max_staleness=max_staleness)
    for number in range(1, limit + 2):
        books.arrive(Request(PUSH, 0, number, version=number - 1))
        assert served(books) == [0]
    books.arrive(Request(PUSH, 1, 1, version=1))
    assert isinstance(books.next(), Serve)  # as old as it may be
    books.arrive(Request(PUSH, 1, 2, version=1))
    assert books.next() == Refuse(Request(PUSH, 1, 2, version=1), limit + 2, limit + 1, limit)
    assert (books.version, books.num_refused) == (limit + 2, 1)
    books.arrive(Request(PUSH, 1, 3, version=limit + 2))  # made anew from what the refusal brought
    assert isinstance(books.next(), Serve)


def test_the_limit_grows_with_newcomers_and_does_not_fall_when_the_run_ends() -> None:
    books = joined(2)
    books.arrive(Request(JOIN, 2))
    books.next()
    assert books.limit == 12
    for worker in (0, 1, 2):
        books.leave(worker)
    assert books.limit == 8


def test_who_shares_the_centre_is_who_is_here_or_expected() -> None:
    books = ServedCenter(3)
    counts = []
    for kind, worker in (
        *((JOIN, 0), (LEAVE, 0), (JOIN, 1), (JOIN, 2), (JOIN, 3), (LEAVE, 1), (RETURN, 1)),
        *((LEAVE, 3), (LEAVE, 3), (LEAVE, 2), (LEAVE, 1)),
    ):
        if kind == JOIN:
            books.arrive(Request(JOIN, worker))
            books.next()
        elif kind == LEAVE:
            books.leave(worker)
        else:
            books.rejoin(worker, 1)
        counts.append(books.num_shared)
    # The first left before the others came: those are still expected. Nobody is counted out twice.
    assert counts == [3, 2, 2, 2, 3, 2, 3, 2, 2, 1, 1]


def test_a_replay_counts_departures_at_their_place_in_the_record() -> None:
    order = parse_order("join 0\njoin 1\nexchange 0\nleave 1\nexchange 0\nreturn 1\nexchange 0")
    books = ServedCenter(2, order, is_recording=True)
    for worker in (0, 1):
        books.arrive(Request(JOIN, worker))
        books.next()
    books.leave(1)  # earlier than it did
    counts = []
    for number in (1, 2, 3):
        books.arrive(Request(EXCHANGE, 0, number))
        assert isinstance(books.next(), Serve)
        counts.append(books.num_shared)
    assert counts == [2, 1, 2]
    assert books.record == order


def test_an_exchange_is_never_too_old() -> None:
    books = joined(1, max_staleness=0)
    for number in (1, 2, 3):
        books.arrive(Request(EXCHANGE, 0, number, version=0))
        assert isinstance(books.next(), Serve)


def test_round_robin_holds_writes_until_their_turn() -> None:
    books = joined(3, ROUND_ROBIN)
    books.arrive(Request(EXCHANGE, 2, 1))
    books.arrive(Request(EXCHANGE, 1, 1))
    assert served(books) == []
    assert books.awaited == 0
    books.arrive(Request(EXCHANGE, 0, 1))
    assert served(books) == [0, 1, 2]
    books.arrive(Request(EXCHANGE, 1, 2))
    assert served(books) == []
    books.arrive(Request(EXCHANGE, 0, 2))
    assert served(books) == [0, 1]


def test_round_robin_waits_until_all_have_come() -> None:
    books = ServedCenter(2, ROUND_ROBIN)
    books.arrive(Request(JOIN, 1))
    books.arrive(Request(EXCHANGE, 1, 1)) if books.next() else None
    assert served(books) == []
    books.arrive(Request(JOIN, 0))
    assert served(books) == [0]  # joined, and worker 1 waits for its turn
    books.arrive(Request(EXCHANGE, 0, 1))
    assert served(books) == [0, 1]


def test_the_turn_of_a_worker_that_left_goes_to_the_next() -> None:
    books = joined(3, ROUND_ROBIN)
    books.arrive(Request(EXCHANGE, 1, 1))
    books.arrive(Request(EXCHANGE, 2, 1))
    books.leave(0)
    assert served(books) == [1, 2]
    books.leave(1)
    books.arrive(Request(EXCHANGE, 2, 2))
    assert served(books) == [2]


def test_what_a_dead_worker_had_asked_is_forgotten() -> None:
    books = joined(2, ROUND_ROBIN)
    books.arrive(Request(EXCHANGE, 1, 1))
    books.leave(1)
    books.arrive(Request(EXCHANGE, 0, 1))
    assert served(books) == [0]
    assert books.version == 1


def test_what_was_held_of_a_lost_connection_is_not_applied_beside_its_repetition() -> None:
    books = joined(2, ROUND_ROBIN)
    books.arrive(Request(EXCHANGE, 1, 1))
    books.leave(1)
    books.rejoin(1, 1)
    books.arrive(Request(EXCHANGE, 1, 1))
    for number in (1, 2):
        books.arrive(Request(EXCHANGE, 0, number))
        assert served(books) == ([0, 1] if number == 1 else [0])


def test_a_newcomer_gets_a_turn_and_a_place_at_the_centre() -> None:
    books = joined(2, ROUND_ROBIN)
    for worker in (0, 1):
        books.arrive(Request(EXCHANGE, worker, 1))
    assert served(books) == [0, 1]
    books.arrive(Request(JOIN, 5))
    assert books.next() == Serve(Request(JOIN, 5), 2, 0)
    for worker in (5, 0, 1):
        books.arrive(Request(EXCHANGE, worker, 2 if worker < 2 else 1, version=2))
    assert served(books) == [5, 0, 1]


def test_it_is_done_when_all_have_come_and_gone() -> None:
    books = ServedCenter(2)
    for worker in (0, 1):
        assert not books.is_done
        books.arrive(Request(JOIN, worker))
        books.next()
        books.leave(worker)
    assert books.is_done


def test_the_order_is_recorded_and_a_replay_forces_it() -> None:
    books = joined(3, max_staleness=1, is_recording=True)
    for worker, number, version in ((2, 1, 0), (0, 1, 0), (1, 1, 0), (2, 2, 1)):
        books.arrive(Request(PUSH, worker, number, version))
        books.next()
    text = "\n".join(map(str, books.record or []))
    assert text == "join 0\njoin 1\njoin 2\npush 2\npush 0\npush 1 refused\npush 2"

    replay = ServedCenter(3, parse_order(text), is_recording=True)  # its own limit is 12
    for worker in (2, 1, 0):
        replay.arrive(Request(JOIN, worker))
    joins = [replay.next() for _ in range(3)]
    assert [a.request.worker for a in joins if a] == [0, 1, 2]
    replay.arrive(Request(PUSH, 1, 1, 0))
    replay.arrive(Request(PUSH, 0, 1, 0))
    assert replay.next() is None
    assert replay.awaited == 2
    replay.arrive(Request(PUSH, 2, 1, 0))
    actions = [replay.next() for _ in range(3)]
    assert [a.request.worker for a in actions if a] == [2, 0, 1]
    assert isinstance(actions[2], Refuse)
    replay.arrive(Request(PUSH, 2, 2, 1))
    assert isinstance(replay.next(), Serve)
    assert replay.record == books.record


def test_round_robin_is_first_come_in_a_forced_order() -> None:
    free, forced = joined(3), joined(3, ROUND_ROBIN)
    for number in (1, 2):
        for worker in (0, 1, 2):
            free.arrive(Request(EXCHANGE, worker, number))
        for worker in (2, 0, 1):
            forced.arrive(Request(EXCHANGE, worker, number))
        assert served(free) == served(forced) == [0, 1, 2]
    assert free.version == forced.version


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ConfigError, match="num_workers = 0"):
        ServedCenter(0)
    with pytest.raises(ConfigError, match="order = 'random'"):
        ServedCenter(1, "random")
    assert str(OrderEntry(PUSH, 3, False)) == "push 3 refused"


# --- what staleness does (You, Buluc, Demmel 2017, and the toy simulation of the spec) ----------


def spread_after(
    num_workers: int, beta: float, delay: int, max_staleness: int | None, num_steps: int
) -> float:
    """Return how far workers and centre are apart after exchanges without gradients.

    Each push is made of a centre that is up to `delay` versions old; the books refuse what is
    older than they allow, and then the push is made anew from the centre that came with it.
    """
    draw = random.Random(f"{num_workers} {beta} {delay}")
    books = joined(num_workers, max_staleness=max_staleness)
    alpha = beta / num_workers
    weights = [draw.uniform(-1.0, 1.0) for _ in range(num_workers)]
    centers, numbers = [0.0], [0] * num_workers
    for _ in range(num_steps):
        worker = draw.randrange(num_workers)
        seen = max(0, books.version - draw.randint(0, delay))
        while True:
            numbers[worker] += 1
            force = alpha * (weights[worker] - centers[seen])
            books.arrive(Request(PUSH, worker, numbers[worker], seen))
            action = books.next()
            if isinstance(action, Serve):
                break
            seen = books.version
        weights[worker] -= force
        centers.append(centers[-1] + force)
        assert action.version == len(centers) - 1
    mean = (sum(weights) + centers[-1]) / (num_workers + 1)
    return max(abs(value - mean) for value in (*weights, centers[-1]))


@pytest.mark.parametrize("num_workers", [4, 8, 16])
def test_within_four_versions_a_worker_averaging_contracts(num_workers: int) -> None:
    for beta in (0.5, 1.0):
        for rounds in (0, 1, 4):
            delay, num_steps = rounds * num_workers, 1500 * num_workers
            assert spread_after(num_workers, beta, delay, delay, num_steps) < 1e-3


@pytest.mark.parametrize("num_workers", [8, 16])
def test_at_sixteen_versions_a_worker_it_grows_unless_that_is_refused(num_workers: int) -> None:
    delay, num_steps = 16 * num_workers, 1500 * num_workers
    assert spread_after(num_workers, 0.5, delay, delay, num_steps) > 10.0
    assert spread_after(num_workers, 0.5, delay, None, num_steps) < 1e-3


def test_with_four_workers_it_contracts_at_sixteen_versions_a_worker_but_slowly() -> None:
    assert 1e-9 < spread_after(4, 0.5, 64, 64, 6000) < 1e-3
    assert spread_after(4, 0.5, 16, 16, 6000) < 1e-14


@pytest.mark.parametrize("num_workers", [8, 16])
def test_beta_two_fails_at_four_versions_a_worker(num_workers: int) -> None:
    delay = 4 * num_workers
    assert spread_after(num_workers, 2.0, delay, delay, 1500 * num_workers) > 10.0
