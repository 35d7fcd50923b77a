"""Messages between threads: the contract of a transport, and trouble that can be repeated."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ganglion.errors import PeerLost, ProtocolError
from ganglion.execute.comm.local.transport import Faults, LocalMailboxes, LocalTransport
from ganglion.execute.comm.message import Arrival
from ganglion.trace import Recorder
from tests.support.messages import check_letters, exchange_letters, traffic
from tests.support.profiles import examples

pytestmark = pytest.mark.timeout(60)


def exchanged(
    num_ranks: int, seed: int, num_letters: int, faults: Faults | None
) -> list[list[Arrival]]:
    mail = LocalMailboxes(num_ranks, faults)
    letters = traffic(seed, num_ranks, num_letters)

    def body(rank: int) -> list[Arrival]:
        return exchange_letters(mail.transport(rank), letters, seed)

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(body, range(num_ranks)))


@settings(max_examples=examples(20))
@given(st.integers(1, 4), st.integers(0, 1000), st.integers(0, 25), st.sampled_from([0.0, 0.002]))
def test_all_letters_arrive_in_order_whatever_the_delay(
    num_ranks: int, seed: int, num_letters: int, delay_s: float
) -> None:
    arrivals = exchanged(num_ranks, seed, num_letters, Faults(seed=seed, delay_s=delay_s))
    letters = traffic(seed, num_ranks, num_letters)
    for rank in range(num_ranks):
        check_letters(arrivals[rank], letters, rank)


def numbers(transport: LocalTransport, count: int) -> list[int]:
    return [transport.receive(5.0).header.microbatch for _ in range(count)]


def posted(faults: Faults, count: int) -> LocalTransport:
    """Return rank 1's end after rank 0 posted `count` messages."""
    mail = LocalMailboxes(2, faults)
    sender = mail.transport(0)
    for number in range(count):
        sender.post(1, "forward", torch.zeros(2), microbatch=number)
    sender.close()
    return mail.transport(1)


def test_reorder_breaks_the_order_of_one_source_and_loses_nothing() -> None:
    came = numbers(posted(Faults(seed=3, delay_s=0.02, reorder=True), 20), 20)
    assert sorted(came) == list(range(20))
    assert came != list(range(20))


def test_drop_and_duplicate_follow_the_seed() -> None:
    def came(faults: Faults) -> list[int]:
        receiver, found = posted(faults, 50), []
        while (arrival := receiver.poll()) is not None:
            found.append(arrival.header.microbatch)
        return found

    dropped = came(Faults(seed=1, drop=0.3))
    assert 20 < len(dropped) < 50
    assert dropped == came(Faults(seed=1, drop=0.3)) != came(Faults(seed=2, drop=0.3))
    doubled = came(Faults(seed=1, duplicate=0.3))
    assert sorted(set(doubled)) == list(range(50))
    assert 50 < len(doubled) < 80


def test_a_dropped_message_ends_in_peer_lost() -> None:
    mail = LocalMailboxes(2, Faults(drop=1.0))
    mail.transport(0).post(1, "forward", torch.zeros(2))
    with pytest.raises(PeerLost, match=r"waited 0.05 s for a gradient: rank 0 stayed silent"):
        mail.transport(1).receive(0.05, "a gradient")


def test_a_rank_that_fails_is_named_after_its_messages() -> None:
    mail = LocalMailboxes(3, Faults(fail_after=(0, 2)))
    failing, other = mail.transport(0), mail.transport(1)
    for number in range(2):
        failing.post(1, "forward", torch.zeros(1), microbatch=number)
    with pytest.raises(PeerLost, match="rank 0 is gone"):
        failing.post(1, "forward", torch.zeros(1))
    assert numbers(other, 2) == [0, 1]
    with pytest.raises(PeerLost, match=r"rank 0 is gone .* while rank 1 awaited an activation"):
        other.receive(5.0, "an activation")
    with pytest.raises(PeerLost, match="rank 0 is gone"):
        other.poll()


def test_a_failure_wakes_the_one_who_waits() -> None:
    mail = LocalMailboxes(2, Faults(fail_after=(0, 0)))
    errors: list[PeerLost] = []

    def wait() -> None:
        try:
            mail.transport(1).receive(30.0)
        except PeerLost as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    with pytest.raises(PeerLost):
        mail.transport(0).post(1, "forward", torch.zeros(1))
    thread.join(10)
    assert "rank 0 is gone" in str(errors[0])


def test_peers_that_closed_in_good_order_are_told_apart() -> None:
    mail = LocalMailboxes(2)
    first, second = mail.transport(0), mail.transport(1)
    first.post(1, "forward", torch.ones(1))
    first.close()
    assert second.receive(5.0).tensor.item() == 1
    assert second.poll() is None
    with pytest.raises(PeerLost, match=r"rank 1 awaited a gradient, but rank 0 had closed"):
        second.receive(5.0, "a gradient")
    with pytest.raises(PeerLost, match=r"rank 1 sent .* but rank 0 had closed"):
        second.post(0, "backward", torch.ones(1))


def test_unknown_targets_and_kinds_are_refused() -> None:
    transport = LocalMailboxes(2).transport(0)
    with pytest.raises(ProtocolError, match=r"rank 0 has no peer 5, only \[1\]"):
        transport.post(5, "forward", torch.ones(1))
    with pytest.raises(ProtocolError, match="a message cannot carry kind"):
        transport.post(1, "a kind that is far too long", torch.ones(1))


def test_both_sides_record_one_event_with_one_flow() -> None:
    mail = LocalMailboxes(2)
    records = [Recorder(0), Recorder(1)]
    sender, receiver = (mail.transport(rank, records[rank]) for rank in range(2))
    sender.post(1, "forward", torch.zeros(3), step=4, microbatch=5, version=6)
    receiver.receive(5.0)
    (sent,), (came,) = records[0].events(), records[1].events()
    assert (sent.kind, came.kind, sent.lane, came.lane) == (
        "send_forward",
        "receive_forward",
        "comm",
        "comm",
    )
    assert sent.flow == came.flow >= 0
    for event in (sent, came):
        assert (event.step, event.microbatch, event.version, event.bytes) == (4, 5, 6, 12)
