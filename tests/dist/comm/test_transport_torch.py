"""Messages over Gloo: the contract of a transport, and threads that end whatever happens."""

from __future__ import annotations

import os
import signal
import threading
import time
from itertools import combinations
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ganglion.errors import PeerLost, ProtocolError
from ganglion.execute.comm import World
from ganglion.execute.comm.torch.transport import _RECORD_BYTES, TorchTransport
from ganglion.trace import Recorder
from tests.support.harness import RankFailed, Ranks
from tests.support.messages import exchange_checked

pytestmark = pytest.mark.timeout(100)


def opened(world: World, trace: Recorder | None = None, timeout_s: float = 30.0) -> TorchTransport:
    pairs = list(combinations(range(world.num_ranks), 2))
    return TorchTransport(world.rank, pairs, timeout_s, trace)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def exchange_between_processes(world: World, seeds: list[int]) -> int:
    transport = opened(world)
    num_arrivals = exchange_checked(world, transport, seeds, 40)
    transport.close()
    return num_arrivals


def test_processes_exchange_letters(ranks: Ranks) -> None:
    assert sum(ranks.run(4, exchange_between_processes, [1, 2, 3])) == 120


def exchange_large(world: World) -> bool:
    """Both post before either receives."""
    transport, peer = opened(world), 1 - world.rank
    large = torch.arange(4 << 20, dtype=torch.int32)
    for _ in range(2):
        transport.post(peer, "forward", large + world.rank)
    tensors = [transport.receive(30.0).tensor for _ in range(2)]
    transport.flush(30.0)
    transport.close()
    return all(torch.equal(tensor, large + peer) for tensor in tensors)


def test_both_sides_post_much_at_once(ranks: Ranks) -> None:
    assert ranks.run(2, exchange_large) == [True, True]


def wait_longer_than_the_timeout(world: World) -> list[float]:
    """A quiet connection is no failure: Gloo's own timeout must not close it."""
    transport, peer = opened(world, timeout_s=1.0), 1 - world.rank
    time.sleep(1.5)
    world.barrier()
    transport.post(peer, "forward", torch.tensor([3.0]))
    result = transport.receive(30.0).tensor.tolist()
    transport.close()
    return list(result)


def test_a_quiet_connection_stays_open(ranks: Ranks) -> None:
    assert ranks.run(2, wait_longer_than_the_timeout) == [[3.0], [3.0]]


def errors_and_events(world: World) -> tuple[list[str], list[tuple[str, int, int, int]]]:
    trace = Recorder(world.rank)
    transport, peer, messages = opened(world, trace), 1 - world.rank, []
    transport.post(peer, "forward", torch.zeros(3), step=4, microbatch=5)
    transport.receive(30.0)
    calls = (
        lambda: transport.receive(0.05, "a gradient"),
        lambda: transport.post(7, "forward", torch.zeros(1)),
        lambda: transport.post(peer, "far too long a kind", torch.zeros(1)),
    )
    for call in calls:
        with pytest.raises((PeerLost, ProtocolError)) as caught:
            call()
        messages.append(str(caught.value))
    assert transport.poll() is None
    world.barrier()
    transport.close()
    kinds = [(event.kind, event.microbatch, event.bytes, event.flow) for event in trace.events()]
    return messages, kinds


def test_deadlines_misuse_and_events(ranks: Ranks) -> None:
    (first, sent), (second, came) = ranks.run(2, errors_and_events)
    assert "rank 0 waited 0.05 s for a gradient: rank 1 stayed silent" in first[0]
    assert "rank 1 has no connection to rank 7, only to [0]" in second[1]
    assert "a message cannot carry kind" in first[2]
    assert [event[:3] for event in sent] == [("send_forward", 5, 12), ("receive_forward", 5, 12)]
    assert (sent[0][3], sent[1][3]) == (came[1][3], came[0][3])


def leave_early(world: World) -> list[str]:
    """Rank 0 closes; rank 1, which has not, gets its last message and is told."""
    transport, peer, messages = opened(world), 1 - world.rank, []
    if world.rank == 0:
        transport.post(peer, "forward", torch.ones(2))
        transport.close()
    else:
        assert transport.receive(30.0).tensor.tolist() == [1, 1]
        for call in (
            lambda: transport.receive(30.0, "a gradient"),
            lambda: transport.post(peer, "backward", torch.ones(1)),
        ):
            with pytest.raises(PeerLost) as caught:
                call()
            messages.append(str(caught.value))
        transport.close()
    world.barrier()
    return messages


def test_an_orderly_end_is_told_apart_from_a_death(ranks: Ranks) -> None:
    _, (awaited, posted) = ranks.run(2, leave_early)
    assert "rank 1 awaited a gradient, but rank 0 had closed" in awaited
    assert "rank 1 sent a message of kind 'backward', but rank 0 had closed" in posted


def open_and_close(world: World) -> tuple[int, int]:
    """Return what ten transports left behind, after a first one has made torch's own."""
    opened(world).close()
    world.barrier()
    files, threads = open_files(), set(threading.enumerate())
    for _ in range(10):
        transport = opened(world)
        transport.post(1 - world.rank, "forward", torch.ones(10))
        transport.receive(30.0)
        transport.close()
    world.barrier()
    return open_files() - files, len(set(threading.enumerate()) - threads)


def test_transports_leak_no_thread_and_no_file(ranks: Ranks) -> None:
    for files, threads in ranks.run(2, open_and_close):
        assert files <= 0
        assert threads == 0


def die_or_survive(world: World, moment: str) -> None:
    transport = opened(world)
    transport.post(1 - world.rank, "forward", torch.full((1000,), 7.0))
    kept = transport.receive(30.0).tensor
    world.barrier()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start_s = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        talk_until_lost(transport, moment)
    assert time.monotonic() - start_s < 20  # not at the deadline of 30 s
    assert kept.unique().tolist() == [7.0]
    transport.close()
    assert threading.active_count() == 1
    raise RuntimeError(f"survived: {caught.value}")


def talk_until_lost(transport: TorchTransport, moment: str) -> None:
    while True:
        if moment == "wait":
            transport.receive(30.0, "the gradient of microbatch 3")
        else:
            transport.post(1, "forward", torch.zeros(10))


@pytest.mark.parametrize(
    ("moment", "doing"),
    [("wait", "awaited the gradient of microbatch 3"), ("send", "sent a message of kind")],
)
def test_a_kill_is_peer_lost(moment: str, doing: str) -> None:
    with pytest.raises(RankFailed, match=rf"survived: rank 1 is gone \(.*\) while rank 0 {doing}"):
        Ranks().run(2, die_or_survive, moment)


def send_garbage(world: World) -> str:
    transport = opened(world)
    message = ""
    if world.rank == 1:
        sender = transport._senders[0]
        dist.send(torch.full((_RECORD_BYTES,), 9, dtype=torch.uint8), 0, group=sender.group)
    else:
        with pytest.raises(ProtocolError) as caught:
            transport.receive(30.0)
        message = str(caught.value)
    world.barrier()
    transport.close()
    return message


def test_garbage_is_a_protocol_error_that_names_the_peer(ranks: Ranks) -> None:
    message, _ = ranks.run(2, send_garbage)
    assert "rank 1 sent bytes that are not a message header" in message
