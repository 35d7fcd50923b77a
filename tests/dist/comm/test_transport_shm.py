"""Messages through shared memory: every interleaving, and every way a peer can go wrong.

Most cases need no second process: a post never waits, so one thread can drive both ends. Real
processes are used where one of them has to die, and to see that two can talk at all.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import resource
import signal
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ganglion.errors import CommError, PeerLost, ProtocolError
from ganglion.execute.comm import World
from ganglion.execute.comm.message import Arrival, Forms
from ganglion.execute.comm.shm.memory import SlotSegment, slot_size
from ganglion.execute.comm.shm.message_link import _FRAME, _MAGIC, SLOT
from ganglion.execute.comm.shm.transport import ShmTransport, open_shm_transport
from ganglion.execute.comm.shm.unix_mesh import connect_mesh
from ganglion.trace import Recorder
from tests.support.harness import RankFailed, Ranks
from tests.support.messages import check_letters, exchange_checked, make_tensor, traffic
from tests.support.profiles import examples

pytestmark = pytest.mark.timeout(100)
MEBIBYTE = 1 << 20


@contextlib.contextmanager
def pair(**options: object) -> Iterator[tuple[ShmTransport, ShmTransport]]:
    """Yield both ends of a connection inside this process."""
    first, second = socket.socketpair()
    ends = ShmTransport(0, {1: first}, **options), ShmTransport(1, {0: second}, **options)  # type: ignore[arg-type]
    try:
        yield ends
    finally:
        for end in ends:
            end.close()


def mesh(num_ranks: int, **options: object) -> list[ShmTransport]:
    """Return the ends of a full mesh inside this process."""
    sockets: list[dict[int, socket.socket]] = [{} for _ in range(num_ranks)]
    for low in range(num_ranks):
        for high in range(low + 1, num_ranks):
            sockets[low][high], sockets[high][low] = socket.socketpair()
    return [ShmTransport(rank, sockets[rank], **options) for rank in range(num_ranks)]  # type: ignore[arg-type]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def mappings() -> int:
    gc.collect()  # a failed test may keep a tensor alive in its traceback
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:ganglion-mail")


@settings(max_examples=examples(40))
@given(st.integers(1, 4), st.integers(0, 1000), st.integers(0, 40), st.sampled_from([0, 64, 16384]))
def test_any_interleaving_keeps_contents_and_order(
    num_ranks: int, seed: int, num_letters: int, inline_bytes: int
) -> None:
    """`inline_bytes` decides what goes through the socket and what through shared memory."""
    ends = mesh(num_ranks, inline_bytes=inline_bytes)
    letters = traffic(seed, num_ranks, num_letters)
    arrivals: list[list[Arrival]] = [[] for _ in ends]
    for letter in letters:
        ends[letter.source].post(
            letter.target, "forward", make_tensor(letter.number), microbatch=letter.number
        )
        if letter.number % 3 == 0 and (arrival := ends[letter.target].poll()) is not None:
            arrivals[letter.target].append(arrival)
    for rank, end in enumerate(ends):
        while (arrival := end.poll()) is not None:
            arrivals[rank].append(arrival)
        check_letters(arrivals[rank], letters, rank)
    for end in ends:
        end.close()


def collect(ends: Sequence[ShmTransport], num_expected: int) -> list[list[Arrival]]:
    """Poll all ends in turn, which also lets them write on, until so many messages came."""
    came: list[list[Arrival]] = [[] for _ in ends]
    end_s = time.monotonic() + 30
    while sum(map(len, came)) < num_expected:
        assert time.monotonic() < end_s, "messages are missing"
        for end, arrivals in zip(ends, came, strict=True):
            if (arrival := end.poll()) is not None:
                arrivals.append(arrival)
    return came


@pytest.mark.parametrize("inline_bytes", [0, 1 << 30], ids=["memory", "socket"])
def test_both_sides_post_much_at_once(inline_bytes: int) -> None:
    """Through memory, and through a socket that takes far less before it is full."""
    with pair(inline_bytes=inline_bytes) as ends:
        large = torch.arange(4 * MEBIBYTE, dtype=torch.int32)
        for _ in range(2):
            ends[0].post(1, "backward", large + 1)
            ends[1].post(0, "forward", large)
        for rank, arrivals in enumerate(collect(ends, 4)):
            assert [torch.equal(a.tensor, large + rank) for a in arrivals] == [True, True]


def test_a_small_message_waits_behind_a_large_one() -> None:
    """Order is kept when the socket is full."""
    with pair(inline_bytes=1 << 30) as (first, second):
        first.post(1, "forward", torch.zeros(MEBIBYTE), microbatch=0)
        first.post(1, "forward", torch.zeros(1), microbatch=1)
        _, came = collect((first, second), 2)
        assert [arrival.header.microbatch for arrival in came] == [0, 1]


class Stingy(socket.socket):
    """A socket that takes and gives a few bytes at a time, or none."""

    draw = random.Random(0)

    def sendmsg(self, parts: Any, rights: Any = (), flags: int = 0, *rest: Any) -> int:
        if self.draw.random() < 0.3:
            raise BlockingIOError
        data = b"".join(parts)[: self.draw.randrange(1, 100)]
        return super().sendmsg([data], rights, flags)

    def recvmsg_into(self, buffers: Any, *rest: Any) -> Any:
        (buffer,) = buffers
        return super().recvmsg_into([buffer[: self.draw.randrange(1, 100)]], *rest)


@settings(max_examples=20)
@given(st.integers(0, 1000), st.sampled_from([0, 64]))
def test_frames_survive_being_cut_anywhere(seed: int, inline_bytes: int) -> None:
    stingy = [Stingy(fileno=end.detach()) for end in socket.socketpair()]
    ends = [ShmTransport(r, {1 - r: stingy[r]}, inline_bytes=inline_bytes) for r in range(2)]
    letters = [letter for letter in traffic(seed, 2, 20) if make_tensor(letter.number).nbytes < 900]
    for letter in letters:
        number = letter.number
        ends[letter.source].post(letter.target, "forward", make_tensor(number), microbatch=number)
    for rank, arrivals in enumerate(collect(ends, len(letters))):
        check_letters(arrivals, letters, rank)
    for end in ends:
        end.close()


def test_arrivals_outlive_later_messages_and_both_transports() -> None:
    with pair() as (first, second):
        kept = []
        for number in range(10):
            first.post(1, "forward", torch.full((MEBIBYTE // 4,), float(number)))
            kept.append(second.receive(5.0).tensor)
    gc.collect()
    assert [tensor.unique().tolist() for tensor in kept] == [[float(n)] for n in range(10)]
    kept[3].add_(1)  # it is the receiver's own
    assert kept[3].unique().tolist() == [4.0]
    assert mappings() > 0
    kept.clear()
    assert mappings() == 0


def test_a_slot_is_used_again_only_when_its_tensor_is_gone() -> None:
    with pair() as (first, second):
        first.post(1, "forward", torch.zeros(MEBIBYTE))
        view = second.receive(5.0).tensor[5:10]  # a part keeps the whole
        address = view.data_ptr()
        first.post(1, "forward", torch.ones(MEBIBYTE))
        other = second.receive(5.0).tensor
        assert view.tolist() == [0.0] * 5
        del view
        first.post(1, "forward", torch.full((MEBIBYTE,), 2.0))
        again = second.receive(5.0).tensor
        assert again[5:].data_ptr() == address
        assert other[0] == 1 and again[0] == 2


def test_a_slot_comes_back_from_any_thread() -> None:
    with pair() as (first, second):
        for _ in range(20):
            first.post(1, "forward", torch.zeros(MEBIBYTE))
            holder = [second.receive(5.0).tensor]
            thread = threading.Thread(target=holder.clear)
            thread.start()
            thread.join()
        assert first._links[1]._pool.num_bytes < 10 * MEBIBYTE


def test_memory_and_files_stay_bounded() -> None:
    with pair() as (first, second):
        source = torch.zeros(MEBIBYTE // 4)
        files_before, resident_before = open_files(), resident_bytes()
        for _ in range(1000):
            first.post(1, "forward", source)
            second.receive(5.0)
        assert first._links[1]._pool.num_bytes <= 3 * MEBIBYTE
        assert open_files() == files_before
        assert mappings() == 2  # one on each side
        assert resident_bytes() - resident_before < 32 * MEBIBYTE


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * resource.getpagesize()


def test_idle_memory_of_other_sizes_is_given_back() -> None:
    """Bounded by what was ever in flight, not by the sum over all sizes ever used."""
    with pair() as (first, second):
        for step in range(40):
            first.post(1, "forward", torch.zeros((20 + step) * MEBIBYTE, dtype=torch.uint8))
            second.receive(5.0)
        assert first._links[1]._pool.num_bytes < 250 * MEBIBYTE
        assert len(second._links[0]._windows) < 8


@given(st.integers(1, 1 << 40))
def test_slots_waste_little(num_bytes: int) -> None:
    size = slot_size(num_bytes)
    assert size % resource.getpagesize() == 0
    assert num_bytes <= size <= max(num_bytes * 5 // 4 + 1, num_bytes + resource.getpagesize())


def no_memory(number: int, slot_bytes: int, num_slots: int) -> SlotSegment:
    raise OSError(12, "Cannot allocate memory")


def test_without_shared_memory_messages_go_through_the_socket(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    with pair(make_segment=no_memory) as (first, second):
        for number in range(3):
            first.post(1, "forward", torch.full((MEBIBYTE,), float(number)))
            _, (came,) = collect((first, second), 1)
            assert came.tensor.unique().tolist() == [float(number)]
    (warning,) = caplog.records
    assert "rank 0 cannot share 4194304 bytes of memory with rank 1" in warning.getMessage()
    assert "Cannot allocate memory" in warning.getMessage()


def post_at_the_file_limit(world: World) -> str:
    """The system itself refuses: no descriptor is left for a new segment."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("ganglion.execute.comm.shm.message_link").addHandler(handler)
    first, second = socket.socketpair()
    ends = ShmTransport(0, {1: first}), ShmTransport(1, {0: second})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        ends[0].post(1, "forward", torch.ones(MEBIBYTE // 4))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    _, (came,) = collect(ends, 1)
    assert came.tensor.sum() == MEBIBYTE // 4
    for end in ends:
        end.close()
    (record,) = records
    return record.getMessage()


def test_too_many_open_files_falls_back_too(ranks: Ranks) -> None:
    for message in ranks.run(1, post_at_the_file_limit):
        assert "Too many open files" in message


GARBAGE = [
    b"\xff" * 100,
    b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n" * 4,
    b"\x47\x6c\x01\x00" + b"\xff" * 100,  # our magic, then nonsense
    b"\x47\x6c\x63" + b"\0" * 100,  # an unknown type
    b"\x47\x6c\x02\x00" + b"\0" * 100,  # a slot of a segment nobody announced
    b"\x47\x6c\x03\x01" + b"\0" * 100,  # a segment without a descriptor
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=[str(i) for i in range(len(GARBAGE))])
def test_garbage_is_a_protocol_error_that_names_the_peer(garbage: bytes) -> None:
    ours, theirs = socket.socketpair()
    transport = ShmTransport(0, {4: ours})
    theirs.sendall(garbage)
    with pytest.raises(ProtocolError, match="rank 4 sent"):
        transport.receive(5.0)
    with pytest.raises(ProtocolError, match="rank 4 sent"):
        transport.post(4, "forward", torch.zeros(1))
    theirs.close()
    transport.close()


@pytest.mark.parametrize(("segment", "slot", "size"), [(77, 0, 4), (0, 9, 4), (0, 0, 1 << 30)])
def test_a_slot_that_does_not_exist_is_refused(segment: int, slot: int, size: int) -> None:
    ours, theirs = socket.socketpair()
    receiver, sender = ShmTransport(0, {1: ours}), ShmTransport(1, {0: theirs.dup()})
    sender.post(0, "forward", torch.zeros(MEBIBYTE))  # segment 0 has one slot
    receiver.receive(5.0)
    form = Forms().pack("forward", (size // 4,), torch.float32)
    frame = _FRAME.pack(_MAGIC, SLOT, slot, segment, len(form), -1, -1, -1, -1, -1)
    theirs.sendall(frame + form)
    with pytest.raises(ProtocolError, match=rf"rank 1 sent .* in slot {slot} of segment {segment}"):
        receiver.receive(5.0)
    for closable in (theirs, sender, receiver):
        closable.close()


@settings(max_examples=examples(30))
@given(st.binary(min_size=200, max_size=300))
def test_any_garbage_is_an_error_and_leaks_nothing(garbage: bytes) -> None:
    ours, theirs = socket.socketpair()
    before = open_files()
    transport = ShmTransport(0, {4: ours})
    theirs.sendall(garbage)
    theirs.close()
    with pytest.raises(CommError, match="rank 4"):
        transport.receive(5.0)
    transport.close()
    assert open_files() == before - 2


def test_what_came_before_garbage_is_handed_out_first() -> None:
    ours, theirs = socket.socketpair()
    receiver, sender = ShmTransport(0, {1: ours}), ShmTransport(1, {0: theirs.dup()})
    sender.post(0, "forward", torch.ones(3))
    theirs.sendall(b"garbage" * 20)
    assert receiver.receive(5.0).tensor.tolist() == [1, 1, 1]
    with pytest.raises(ProtocolError, match="rank 1 sent"):
        receiver.receive(5.0)
    for closable in (theirs, sender, receiver):
        closable.close()


def test_a_segment_shorter_than_announced_is_refused() -> None:
    """Reading past its end would kill the receiver with SIGBUS."""

    class Short(SlotSegment):
        def release(self) -> int:
            os.close(super().release())
            return os.memfd_create("ganglion")

    with pair(make_segment=Short) as (first, second):
        first.post(1, "forward", torch.zeros(MEBIBYTE))
        with pytest.raises(CommError, match=r"rank 1 cannot map .* shorter than announced"):
            second.receive(5.0)


def test_silence_is_peer_lost_at_the_deadline() -> None:
    with pair() as (first, _), pytest.raises(PeerLost, match=r"waited 0.05 s for a gradient of"):
        first.receive(0.05, "a gradient of microbatch 3")


def test_the_ranks_that_stayed_silent_are_named() -> None:
    ends = mesh(3)
    with pytest.raises(PeerLost, match=r"ranks \[1, 2\] stayed silent"):
        ends[0].receive(0.01)
    ends[2].close()
    with pytest.raises(PeerLost, match=r"rank 1 stayed silent"):
        ends[0].receive(0.01)
    for end in ends[:2]:
        end.close()


def test_a_peer_that_takes_nothing_is_named_by_flush() -> None:
    with pair(inline_bytes=1 << 30) as (first, second):
        first.post(1, "forward", torch.zeros(MEBIBYTE))
        with pytest.raises(PeerLost, match=r"waited 0.05 s for room .* rank 1 stayed silent"):
            first.flush(0.05)
        collect((first, second), 1)
        first.flush(5.0)


def test_an_orderly_end_is_told_apart_from_a_death() -> None:
    with pair() as (first, second):
        first.post(1, "forward", torch.ones(1))
        first.close()
        assert second.receive(5.0).tensor.item() == 1
        assert second.poll() is None
        with pytest.raises(PeerLost, match="awaited a gradient, but rank 0 had closed"):
            second.receive(5.0, "a gradient")
        with pytest.raises(PeerLost, match=r"rank 1 sent .* but rank 0 had closed"):
            second.post(0, "backward", torch.ones(1))


def test_a_peer_that_closes_before_it_took_all_is_a_loss() -> None:
    with pair(inline_bytes=1 << 30) as (first, second):
        first.post(1, "forward", torch.ones(MEBIBYTE))
        second.close()
        with pytest.raises(PeerLost, match=r"rank 1 is gone \(it closed before it took all"):
            first.flush(5.0)


def test_messages_of_a_peer_that_left_are_kept_when_a_post_finds_it_gone() -> None:
    with pair() as (first, second):
        first.post(1, "forward", torch.ones(1))
        first.close()
        with pytest.raises(PeerLost, match="had closed"):
            second.post(0, "backward", torch.ones(1))
        assert second.receive(5.0).tensor.item() == 1


def test_a_close_with_messages_unsent_is_a_loss_for_the_peer() -> None:
    with pair(inline_bytes=1 << 30) as (first, second):
        first.post(1, "forward", torch.ones(MEBIBYTE))
        first.close()
        with pytest.raises(PeerLost, match=r"rank 0 is gone \(end of stream\)"):
            second.receive(5.0)


def test_a_rank_without_connection_is_refused() -> None:
    with pair() as (first, _), pytest.raises(ProtocolError, match=r"no connection to rank 7, only"):
        first.post(7, "forward", torch.ones(1))


def test_a_hundred_transports_leak_nothing() -> None:
    files, threads = open_files(), threading.active_count()
    references = []
    for _ in range(100):
        with pair() as (first, second):
            first.post(1, "forward", torch.zeros(MEBIBYTE // 4))
            second.post(0, "backward", torch.zeros(10))
            second.receive(5.0)
            references.append(weakref.ref(first._links[1]))
    assert open_files() == files
    assert threading.active_count() == threads
    assert mappings() == 0
    gc.collect()
    assert not any(reference() for reference in references)


def test_both_sides_record_one_event_with_one_flow() -> None:
    records = [Recorder(0), Recorder(1)]
    sockets = socket.socketpair()
    ends = [ShmTransport(rank, {1 - rank: sockets[rank]}, records[rank]) for rank in range(2)]
    for number, size in enumerate((3, MEBIBYTE)):
        ends[0].post(1, "forward", torch.zeros(size), step=4, microbatch=number, version=6)
        ends[1].receive(5.0)
    records[0].enabled = records[1].enabled = False
    ends[0].post(1, "forward", torch.zeros(1))
    ends[1].receive(5.0)
    for end in ends:
        end.close()
    sent, came = records[0].events(), records[1].events()
    assert [event.kind for event in sent] == ["send_forward"] * 2
    assert [event.kind for event in came] == ["receive_forward"] * 2
    assert [event.flow for event in sent] == [event.flow for event in came]
    for event in (*sent, *came):
        assert (event.lane, event.step, event.version) == ("comm", 4, 6)
        assert event.bytes == (12, 4 * MEBIBYTE)[event.microbatch]
        assert event.start_s <= event.end_s


# Real processes.


def gather_texts(world: World, text: str) -> Sequence[str]:
    """Return every rank's text, through the collectives of the harness."""
    data = list(text.encode().ljust(200, b" "))
    table = world.gather_numbers([float(byte) for byte in data])
    return [bytes(int(number) for number in row).decode().strip() for row in table]


def opened(world: World) -> ShmTransport:
    everyone = range(world.num_ranks)
    return open_shm_transport(world.rank, everyone, lambda t: gather_texts(world, t), 30.0)


def exchange_between_processes(world: World, seeds: list[int]) -> int:
    transport = opened(world)
    num_arrivals = exchange_checked(world, transport, seeds, 60)
    transport.close()
    return num_arrivals


def test_processes_exchange_letters(ranks: Ranks) -> None:
    assert sum(ranks.run(4, exchange_between_processes, [1, 2, 3, 4, 5])) == 300


def exchange_large(world: World) -> bool:
    """Both post 256 MB before either receives."""
    transport, peer = opened(world), 1 - world.rank
    large = torch.arange(64 * MEBIBYTE, dtype=torch.int32)
    transport.post(peer, "forward", large + world.rank)
    tensor = transport.receive(60.0).tensor
    transport.flush(5.0)
    transport.close()
    return torch.equal(tensor, large + peer)


def test_two_processes_post_256_mb_at_once(ranks: Ranks) -> None:
    assert ranks.run(2, exchange_large) == [True, True]


def exchange_through_a_full_socket(world: World) -> bool:
    """As when shared memory is not to be had: 64 MB each way through the socket."""
    sockets = connect_mesh(world.rank, [0, 1], lambda t: gather_texts(world, t), 30.0)
    transport, peer = ShmTransport(world.rank, sockets, make_segment=no_memory), 1 - world.rank
    large = torch.arange(16 * MEBIBYTE, dtype=torch.int32)
    transport.post(peer, "forward", large + world.rank)
    tensor = transport.receive(60.0).tensor
    transport.flush(30.0)
    transport.close()
    return torch.equal(tensor, large + peer)


def test_two_processes_fill_their_sockets_at_once(ranks: Ranks) -> None:
    assert ranks.run(2, exchange_through_a_full_socket) == [True, True]


def talk_until_lost(transport: ShmTransport, peer: int, moment: str) -> None:
    while True:
        if moment == "wait":
            transport.receive(30.0, "the gradient of microbatch 3")
        else:
            transport.post(peer, "forward", torch.zeros(5000))


def die_or_survive(world: World, dying: int, moment: str) -> None:
    """One rank is killed while the other waits for it or sends to it; the other then reports."""
    transport, peer = opened(world), 1 - world.rank
    transport.post(peer, "forward", torch.full((MEBIBYTE,), 7.0))
    kept = transport.receive(30.0).tensor
    world.barrier()
    if world.rank == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    start_s = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        talk_until_lost(transport, peer, moment)
    assert time.monotonic() - start_s < 20  # not at the deadline of 30 s
    assert kept.unique().tolist() == [7.0]
    transport.close()
    del kept
    assert mappings() == 0
    raise RuntimeError(f"survived: {caught.value}")


@pytest.mark.parametrize("dying", [0, 1])
def test_a_kill_is_peer_lost_for_the_one_who_waits(dying: int) -> None:
    expected = (
        rf"survived: rank {dying} is gone \(.*\) while rank {1 - dying} awaited the gradient of "
        r"microbatch 3"
    )
    with pytest.raises(RankFailed, match=expected):
        Ranks().run(2, die_or_survive, dying, "wait")


def test_a_kill_is_peer_lost_for_the_one_who_sends() -> None:
    expected = r"survived: rank 1 is gone \(.*\) while rank 0 sent a message of kind 'forward'"
    with pytest.raises(RankFailed, match=expected):
        Ranks().run(2, die_or_survive, 1, "send")


def die_before_connecting(world: World) -> None:
    world.barrier()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    connect_mesh(0, [0, 1], lambda text: [text, text.replace("0 ", "1 ", 1)], 1.0)


def test_a_rank_that_never_connects_is_named() -> None:
    with pytest.raises(RankFailed, match=r"PeerLost: rank 0 waited 1 s for ranks \[1\] of this"):
        Ranks().run(2, die_before_connecting)


def test_a_listener_that_is_gone_is_named() -> None:
    before = open_files()
    with pytest.raises(PeerLost, match="rank 0 cannot be reached through a Unix socket"):
        connect_mesh(1, [0, 1], lambda text: ["0 ganglion-nobody 00", text], 5.0)
    assert open_files() == before


def test_strangers_are_hung_up_on() -> None:
    """A caller without the token, or one that says nothing, neither joins nor delays the others."""
    texts: dict[int, str] = {}
    met = threading.Barrier(2)
    strangers: list[socket.socket] = []

    def exchange(rank: int, text: str) -> list[str]:
        texts[rank] = text
        met.wait(30)
        if rank == 0:
            address = "\0" + text.split()[1]
            for greeting in (b"", b"\1\0\0\0" + b"x" * 16):
                strangers.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                strangers[-1].connect(address)
                strangers[-1].sendall(greeting)
            met.wait(30)
        else:
            met.wait(30)  # rank 1 calls after the strangers
        return list(texts.values())

    def meet(rank: int) -> dict[int, socket.socket]:
        return connect_mesh(rank, [0, 1], lambda text: exchange(rank, text), 30.0)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(meet, range(2))
    second[0].sendall(b"hello")
    assert first[1].recv(10) == b"hello"
    for stranger in strangers:
        stranger.settimeout(5)
        assert stranger.recv(1) == b""
    for closable in (*strangers, *first.values(), *second.values()):
        closable.close()
