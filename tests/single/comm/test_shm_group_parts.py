"""Shared-memory collectives between threads: parts, interleavings, and every way to fail."""

from __future__ import annotations

import functools
import gc
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ganglion.errors import CommError, ProtocolError
from ganglion.execute.comm import MAX, SUM
from ganglion.execute.comm.calls import GOODBYE, SIGNAL, Call, Hello, Inbox, pack_failure
from ganglion.execute.comm.reduce_order import combine, combine_aliased, combine_by_tree, tree_pairs
from ganglion.execute.comm.shm import bulk as shm_bulk
from ganglion.execute.comm.shm import memory as shm_memory
from ganglion.execute.comm.shm.group import ShmGroup
from ganglion.execute.comm.shm.group_links import Outbox
from ganglion.execute.comm.shm.staging import SumSlabs
from tests.support.profiles import examples

pytestmark = pytest.mark.timeout(60)

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
)
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")
SMALL_SLOT = 4096  # many slabs in little time


def meshes(size: int) -> list[dict[int, socket.socket]]:
    """Return connected sockets between all members, by member and peer."""
    found: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for high in range(size):
        for low in range(high):
            found[high][low], found[low][high] = socket.socketpair()
    return found


def on_threads(
    size: int,
    body: Callable[[list[ShmGroup]], Any],
    *,
    num_groups: int = 1,
    timeout_s: float = 30.0,
    **sizes: int,
) -> list[Any]:
    """Run `body(groups)` on `size` threads, members of `num_groups` groups; raise what they do."""
    sockets = [(meshes(size), meshes(size)) for _ in range(num_groups)]
    ranks = tuple(range(size))

    def member(rank: int) -> Any:
        groups = [
            ShmGroup(ranks, rank, small[rank], large[rank], timeout_s, **sizes)
            for small, large in sockets
        ]
        try:
            return body(groups)
        finally:
            for group in groups:
                group.close()

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(member, rank) for rank in ranks]
        return [future.result(timeout=50) for future in futures]


def contribution(rank: int, size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return _contribution(rank, size, dtype, seed).clone()


@functools.lru_cache(maxsize=200)
def _contribution(rank: int, size: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    values = torch.randn(size, generator=generator, dtype=torch.float64) * 100
    return values.abs().to(dtype) if dtype == torch.uint8 else values.to(dtype)


def plain(parts: list[Tensor], op: str) -> Tensor:
    """Combine in order of rank; 16-bit floats are added in float32."""
    wide = torch.float32 if parts[0].dtype in (torch.bfloat16, torch.float16) else parts[0].dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = torch.maximum(total, part.to(wide)) if op == MAX else total + part.to(wide)
    return total.to(parts[0].dtype)


def plain_tree(parts: list[Tensor], root: int, op: str) -> Tensor:
    """Combine what a binomial tree sends towards `root`, one level after the other."""
    wide = torch.float32 if parts[0].dtype in (torch.bfloat16, torch.float16) else parts[0].dtype
    held = [parts[(root + i) % len(parts)].to(wide) for i in range(len(parts))]
    while len(held) > 1:
        pairs = [held[i : i + 2] for i in range(0, len(held), 2)]
        held = [plain(pair, op) for pair in pairs]
    return held[0].to(parts[0].dtype)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(
        found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
    )


# --- the parts ---


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", [SUM, MAX])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_parts_are_combined_in_order_of_rank(size: int, op: str, dtype: torch.dtype) -> None:
    parts = [contribution(rank, 1001, dtype) for rank in range(size)]
    out = torch.empty_like(parts[0])
    combine(parts, out, op)
    assert same_bits(out, plain(parts, op))
    for index in range(size):
        mine = [part.clone() for part in parts]
        combine_aliased(mine, index, op)
        assert same_bits(mine[index], out)
    for root in range(size):
        combine_by_tree(parts, root, out, op)
        assert same_bits(out, plain_tree(parts, root, op))


@given(st.integers(1, 40), st.data())
def test_a_tree_takes_in_every_member_once(size: int, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, size - 1))
    pairs = list(tree_pairs(size, root))
    gone: set[int] = set()
    for into, source in pairs:
        assert into not in gone and source not in gone
        gone.add(source)
    assert gone == set(range(size)) - {root}


@given(st.lists(st.integers(1, 40)), st.integers(0, 200))
def test_records_survive_any_cutting_of_the_stream(cuts: list[int], payload_bytes: int) -> None:
    call = Call(7, "broadcast", "", torch.bfloat16, 2, 33, segment=1, segment_bytes=70, offset=4)
    payload = bytes(range(payload_bytes % 256)) * (payload_bytes > 0)
    stream = Hello(3, 99).pack() + SIGNAL + call.pack(len(payload)) + payload + SIGNAL
    stream += pack_failure(ProtocolError("they differ")) + GOODBYE
    inbox = Inbox(3)
    for cut in [*cuts, len(stream)]:
        inbox.feed(stream[:cut])
        stream = stream[cut:]
    assert inbox.hello == Hello(3, 99)
    assert inbox.num_signals == 2
    assert [(arrival.call(), arrival.payload) for arrival in inbox.calls] == [(call, payload)]
    assert isinstance(inbox.failure, ProtocolError) and str(inbox.failure) == "they differ"
    assert inbox.said_goodbye


@pytest.mark.parametrize("data", [b"?", b"C" + b"\xff" * 60, Hello(4, 9).pack()])
def test_garbage_is_a_protocol_error_that_names_the_sender(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="rank 3 sent"):
        Inbox(3).feed(data)


def test_what_a_socket_does_not_take_is_sent_later_and_in_order() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    outbox = Outbox(ours)
    expected = b""
    for number in range(60):
        data = bytearray([number]) * 50_000
        outbox.post(b"<", memoryview(data))
        expected += b"<" + bytes(data)
        data[:] = bytes(len(data))  # the caller may change it at once
    received = b""
    while len(received) < len(expected):
        received += theirs.recv(1 << 20)
    assert received == expected
    outbox.close(10.0)
    assert outbox._thread is None
    ours.close()
    theirs.close()


def test_closing_gives_up_a_backlog_nobody_reads() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    outbox = Outbox(ours)
    outbox.post(b"x" * 5_000_000)
    outbox.close(0.01)
    assert outbox._thread is None
    ours.close()
    theirs.close()


# --- results ---


class Step(NamedTuple):
    group: int
    kind: str
    dtype: torch.dtype
    op: str
    size: int
    root: int
    shared: tuple[bool, ...]  # which members have their tensor in shared memory
    seed: int


def start(step: Step, group: ShmGroup) -> tuple[Any, Tensor]:
    """Start one step on one member; return its handle and the tensor that gets the result."""
    mine = contribution(group.index, step.size, step.dtype, step.seed)
    if step.kind == "reduce_scatter":
        mine = contribution(group.index, step.size * group.size, step.dtype, step.seed)
    if step.shared[group.index]:
        place = group.allocate(mine.numel(), mine.dtype)
        place.copy_(mine)
        mine = place
    if step.kind == "all_reduce":
        return group.all_reduce(mine, step.op), mine
    if step.kind == "broadcast":
        return group.broadcast(mine, step.root), mine
    if step.kind == "reduce":
        return group.reduce(mine, step.root, step.op), mine
    if step.kind == "all_gather":
        output = torch.empty(step.size * group.size, dtype=step.dtype)
        return group.all_gather(output, mine), output
    output = torch.empty(step.size, dtype=step.dtype)
    return group.reduce_scatter(output, mine, step.op), output


def expected(step: Step, index: int, size: int) -> Tensor:
    def parts(length: int) -> list[Tensor]:
        return [contribution(rank, length, step.dtype, step.seed) for rank in range(size)]

    if step.kind == "all_reduce":
        return plain(parts(step.size), step.op)
    if step.kind == "broadcast":
        return parts(step.size)[step.root]
    if step.kind == "all_gather":
        return torch.cat(parts(step.size))
    if step.kind == "reduce":
        if index == step.root:
            return plain_tree(parts(step.size), step.root, step.op)
        return parts(step.size)[index]
    return plain(parts(step.size * size), step.op)[index * step.size : (index + 1) * step.size]


def steps(size: int, num_groups: int) -> st.SearchStrategy[Step]:
    return st.builds(
        Step,
        group=st.integers(0, num_groups - 1),
        kind=st.sampled_from(KINDS),
        dtype=st.sampled_from(DTYPES),
        op=st.sampled_from([SUM, MAX]),
        size=st.one_of(st.integers(0, 9), st.integers(10, 9000)),
        root=st.integers(0, size - 1),
        shared=st.one_of(
            st.sampled_from([(False,) * size, (True,) * size]),
            st.tuples(*[st.booleans()] * size),
        ),
        seed=st.integers(0, 5),
    )


@settings(max_examples=examples(60))
@given(st.data())
def test_any_interleaving_gives_the_plain_result(data: st.DataObject) -> None:
    """Several groups, many started before the first wait, waits in any order of each member."""
    size = data.draw(st.integers(2, 4), "members")
    num_groups = data.draw(st.integers(1, 3), "groups")
    program = data.draw(st.lists(steps(size, num_groups), min_size=1, max_size=12), "program")
    seed = data.draw(st.integers(0, 10**6), "timing")

    def body(groups: list[ShmGroup]) -> None:
        index = groups[0].index
        rng = random.Random(seed + index)
        waiting: list[tuple[Step, Any, Tensor]] = []
        for step in program:
            waiting.append((step, *start(step, groups[step.group])))
            if rng.random() < 0.3:
                check(index, *waiting.pop(rng.randrange(len(waiting))))
        rng.shuffle(waiting)
        for item in waiting:
            check(index, *item)
        # All members must have all results before one of them closes a group.
        for group in groups:
            group.barrier()

    def check(index: int, step: Step, handle: Any, result: Tensor) -> None:
        handle.wait()
        assert same_bits(result, expected(step, index, size)), step

    on_threads(size, body, num_groups=num_groups, slot_bytes=SMALL_SLOT, eager_bytes=2000)


def test_a_sum_has_the_same_bits_on_every_path() -> None:
    """Small, through slabs, in place in shared memory, and as reduce-scatter and all-gather."""
    results = {}
    for name, sizes in {
        "small": {"eager_bytes": 1 << 20},
        "slabs": {"eager_bytes": 0, "slot_bytes": SMALL_SLOT},
        "one slab": {"eager_bytes": 0},
    }.items():
        results[name] = on_threads(3, every_sum, **sizes)
    first = results["small"][0][0]
    for name, members in results.items():
        assert all(same_bits(total, first) for member in members for total in member), name


def every_sum(groups: list[ShmGroup]) -> list[Tensor]:
    group = groups[0]
    mine = contribution(group.index, 3 * 1009, torch.float32)
    plainly, inside = mine.clone(), group.allocate(mine.numel(), mine.dtype).copy_(mine)
    part, whole = torch.empty(1009), torch.empty(3 * 1009)
    group.all_reduce(plainly).wait()
    group.all_reduce(inside).wait()
    group.reduce_scatter(part, mine).wait()
    group.all_gather(whole, part).wait()
    group.barrier()
    return [plainly, inside.clone(), whole]


def test_a_slow_member_still_finds_its_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    """Member 0 reads deposits and results only when member 1 has gone as far ahead as it can."""
    deposited = {slab: threading.Event() for slab in range(10)}
    real_deposit, real_combine = SumSlabs.deposit, SumSlabs.combine
    real_collect = SumSlabs.collect

    def deposit(self: SumSlabs, slab: int, number: int) -> None:
        real_deposit(self, slab, number)
        if self._staging.index == 1:
            deposited[slab].set()

    def combine_late(self: SumSlabs, slab: int, number: int) -> None:
        if self._staging.index == 0 and slab + 1 < self.num_slabs:
            assert deposited[slab + 1].wait(30)
        real_combine(self, slab, number)

    def collect(self: SumSlabs, slab: int, number: int) -> None:
        if self._staging.index == 0 and slab + 2 < self.num_slabs:
            assert deposited[slab + 2].wait(30)
        real_collect(self, slab, number)

    monkeypatch.setattr(SumSlabs, "deposit", deposit)
    monkeypatch.setattr(SumSlabs, "combine", combine_late)
    monkeypatch.setattr(SumSlabs, "collect", collect)

    def body(groups: list[ShmGroup]) -> Tensor:
        tensor = contribution(groups[0].index, 9 * SMALL_SLOT // 4, torch.float32)
        groups[0].all_reduce(tensor).wait()
        groups[0].barrier()
        return tensor

    parts = [contribution(rank, 9 * SMALL_SLOT // 4, torch.float32) for rank in range(2)]
    for total in on_threads(2, body, slot_bytes=SMALL_SLOT, eager_bytes=0):
        assert same_bits(total, plain(parts, SUM))


def test_many_small_collectives_never_block_the_caller() -> None:
    """More than the sockets take is started in one group; a wait in another group must not hang."""

    def body(groups: list[ShmGroup]) -> float:
        crowd, other = groups
        tensors = [torch.full((10_000,), float(i)) for i in range(60)]
        lone = torch.ones(1)
        if crowd.index:
            handles = [crowd.all_reduce(tensor) for tensor in tensors]
            other.all_reduce(lone).wait()
        else:  # here the sums of the first group come before the call in the second one
            handles = [crowd.all_reduce(tensor) for tensor in tensors]
            for handle in handles:
                handle.wait()
            other.all_reduce(lone).wait()
        for handle in reversed(handles):
            handle.wait()
        crowd.barrier()
        assert [tensor[-1].item() for tensor in tensors] == [2.0 * i for i in range(60)]
        return lone.item()

    assert on_threads(2, body, num_groups=2) == [2.0, 2.0]


def test_a_handle_tells_when_its_collective_began_and_ended() -> None:
    def body(groups: list[ShmGroup]) -> None:
        for size in (10, 100_000):
            before_s = time.perf_counter()
            handle = groups[0].all_reduce(torch.zeros(size))
            while handle.finished_s is None:  # seen without waiting
                time.sleep(0.001)
            after_s = time.perf_counter()
            assert before_s <= handle.started_s <= handle.finished_s <= after_s
            handle.wait()

    on_threads(2, body)


def test_tensors_made_in_inference_mode_and_views_are_carried() -> None:
    def body(groups: list[ShmGroup]) -> None:
        group = groups[0]
        for size in (10, 100_000):
            with torch.inference_mode():
                tensor = torch.ones(size)
                handle = group.all_reduce(tensor)
                handle.wait()
            assert tensor.sum() == 2 * size
            buffer = group.allocate(3 * size, torch.float32).fill_(1)
            group.all_reduce(buffer[size : 2 * size]).wait()
            assert buffer.sum() == 4 * size
            matrix = torch.ones(size // 5, 5, requires_grad=True)
            group.all_reduce(matrix).wait()
            assert matrix.sum() == 2 * size

    on_threads(2, body)


# --- failures ---


def raised(call: Callable[[], Any]) -> CommError:
    with pytest.raises(CommError) as caught:
        call()
    return caught.value


def disagreeing_calls(group: ShmGroup, how: str) -> Any:
    first = group.index == 0
    if how == "kind":
        return group.broadcast(torch.zeros(5)) if first else group.all_reduce(torch.zeros(5))
    if how == "size":
        return group.all_reduce(torch.zeros(5 if first else 6))
    if how == "large size":
        return group.all_reduce(torch.zeros(100_000 if first else 100_001))
    if how == "dtype":
        return group.all_reduce(torch.zeros(5, dtype=torch.int32 if first else torch.float32))
    return group.all_reduce(torch.zeros(100_000 if first else 5))


@pytest.mark.parametrize("how", ["kind", "size", "large size", "dtype", "path"])
def test_disagreeing_members_are_told_what_each_called(how: str) -> None:
    def body(groups: list[ShmGroup]) -> list[str]:
        first = raised(lambda: disagreeing_calls(groups[0], how).wait())
        again = raised(groups[0].barrier)
        assert type(first) is type(again) is ProtocolError
        done.wait(30)
        return [str(first), str(again)]

    done = threading.Barrier(3)
    called = {
        "kind": ("broadcast(root=0) of 5 float32", "all_reduce(sum) of 5 float32"),
        "size": ("all_reduce(sum) of 5 float32", "all_reduce(sum) of 6 float32"),
        "large size": ("all_reduce(sum) of 100000 float32", "all_reduce(sum) of 100001 float32"),
        "dtype": ("all_reduce(sum) of 5 int32", "all_reduce(sum) of 5 float32"),
        "path": ("all_reduce(sum) of 100000 float32", "all_reduce(sum) of 5 float32"),
    }[how]
    for texts in on_threads(3, body):
        for text in texts:
            assert f"{{0: '{called[0]}', 1: '{called[1]}', 2: '{called[1]}'}}" in text


@pytest.mark.parametrize("size", [5, 100_000])
def test_a_silent_member_is_lost_at_the_deadline(size: int) -> None:
    done = threading.Barrier(3)

    def body(groups: list[ShmGroup]) -> str:
        text = ""
        if groups[0].index != 2:
            text = str(raised(lambda: groups[0].all_reduce(torch.zeros(size)).wait()))
        done.wait(30)
        return text

    for text in on_threads(3, body, timeout_s=0.5)[:2]:
        assert f"all_reduce(sum) of {size} float32 of ranks [0, 1, 2] waited 0.5 s" in text
        assert "ranks [2], which stayed silent" in text


def test_leaving_after_the_last_collective_is_no_death() -> None:
    """The fast member closes while another still waits for the slow one."""
    left = threading.Event()

    def body(groups: list[ShmGroup]) -> float:
        group, tensor = groups[0], torch.ones(3)
        if group.index == 2:
            assert left.wait(30)
        handle = group.all_reduce(tensor)
        if group.index == 0:
            left.set()
        handle.wait()
        return tensor[0].item()

    assert on_threads(3, body) == [3.0, 3.0, 3.0]


@pytest.mark.parametrize("size", [5, 100_000])
def test_a_member_that_closes_too_early_is_named(size: int) -> None:
    def body(groups: list[ShmGroup]) -> str:
        if groups[0].index == 1:
            return ""
        return str(raised(lambda: groups[0].all_reduce(torch.zeros(size)).wait()))

    text = on_threads(2, body)[0]
    assert "of ranks [0, 1] lost rank 1: it closed the group" in text


def test_a_closed_group_refuses_and_its_unfinished_handles_fail() -> None:
    closed = threading.Barrier(2)

    def body(groups: list[ShmGroup]) -> None:
        group = groups[0]
        handles: list[Any] = []
        if group.index == 0:
            handles = [group.all_reduce(torch.zeros(5)), group.all_reduce(torch.zeros(100_000))]
        group.close()
        group.close()
        for call in [group.barrier, *(handle.wait for handle in handles)]:
            assert isinstance(raised(call), CommError)
        closed.wait(30)

    on_threads(2, body)


def test_refused_calls_blame_the_call_and_leave_the_group_in_use() -> None:
    def body(groups: list[ShmGroup]) -> None:
        group = groups[0]
        for call, text in (
            (lambda: group.all_reduce(torch.zeros(3, dtype=torch.complex64)), "complex64"),
            (lambda: group.all_reduce(torch.zeros(4, 4).t()), "contiguous"),
            (lambda: group.all_reduce(torch.zeros(3, dtype=torch.bool)), "not of bool"),
            (lambda: group.all_reduce(torch.zeros(3), "mean"), "'mean'"),
            (lambda: group.broadcast(torch.zeros(3), 2), "root 2"),
            (lambda: group.all_gather(torch.zeros(5), torch.zeros(2)), "all_gather of ranks"),
            (lambda: group.reduce_scatter(torch.zeros(2), torch.zeros(5)), "5 torch.float32"),
        ):
            error = raised(call)
            assert isinstance(error, ProtocolError)
            assert text in str(error)
        group.barrier()

    on_threads(2, body)


def test_without_shared_memory_all_members_hear_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real, lock, calls = shm_bulk._reserve, threading.Lock(), []

    def reserve(num_bytes: int) -> Any:
        with lock:
            calls.append(num_bytes)
            return (None, "(no space)") if len(calls) == 1 else real(num_bytes)

    monkeypatch.setattr(shm_bulk, "_reserve", reserve)
    sockets = meshes(2), meshes(2)

    def member(rank: int) -> str:
        small, large = (mesh[rank] for mesh in sockets)
        return str(raised(lambda: ShmGroup((0, 1), rank, small, large, 30.0)))

    with ThreadPoolExecutor(2) as threads:
        texts = list(threads.map(member, range(2)))
    for text in texts:
        assert "of the group [0, 1] could not get 2097152 bytes of shared memory" in text


def test_a_buffer_without_shared_memory_is_an_ordinary_one(monkeypatch: Any) -> None:
    ready, refuse = threading.Barrier(2), threading.Event()
    real = os.posix_fallocate

    def fallocate(descriptor: int, offset: int, length: int) -> None:
        if refuse.is_set():
            raise OSError(28, "No space left on device")
        real(descriptor, offset, length)

    monkeypatch.setattr(shm_memory.os, "posix_fallocate", fallocate)

    def body(groups: list[ShmGroup]) -> None:
        ready.wait(30)
        refuse.set()
        with lock, pytest.warns(UserWarning, match="400000 bytes .*No space left"):
            buffer = groups[0].allocate(100_000, torch.float32).fill_(1)
        groups[0].all_reduce(buffer).wait()
        assert buffer.sum() == 200_000

    lock = threading.Lock()  # warnings are caught for the whole process
    on_threads(2, body)


@pytest.mark.parametrize("num_elements", [1, 5000])
def test_members_see_one_memory(num_elements: int) -> None:
    def body(groups: list[ShmGroup]) -> list[float]:
        (group,) = groups
        others = group.all_reduce(torch.ones(3))  # calls of all kinds keep their order
        common = group.allocate_common(3 * num_elements, torch.float64)
        others.wait()
        assert common is not None
        common.chunk(3)[group.index].fill_(group.index)
        group.barrier()
        seen = [float(part[-1]) for part in common.chunk(3)]
        group.barrier()
        with torch.inference_mode():
            common.add_(0)
        return seen

    assert on_threads(3, body) == [[0.0, 1.0, 2.0]] * 3


def test_without_shared_memory_nobody_has_a_common_one(monkeypatch: Any) -> None:
    ready, real = threading.Barrier(2), os.posix_fallocate

    def fallocate(descriptor: int, offset: int, length: int) -> None:
        if length == 100_000 * 4:
            raise OSError(28, "No space left on device")
        real(descriptor, offset, length)

    monkeypatch.setattr(shm_memory.os, "posix_fallocate", fallocate)

    def body(groups: list[ShmGroup]) -> Tensor | None:
        ready.wait(30)
        return groups[0].allocate_common(100_000, torch.float32)

    with pytest.warns(UserWarning, match="400000 bytes .*No space left"):
        assert on_threads(2, body) == [None, None]


def test_common_memories_of_different_sizes_are_refused() -> None:
    def body(groups: list[ShmGroup]) -> str:
        size = 10 + groups[0].index
        return str(raised(lambda: groups[0].allocate_common(size, torch.float32)))

    for text in on_threads(2, body):
        assert "0: 'share of 10 float32', 1: 'share of 11 float32'" in text


def holdings() -> tuple[int, int, int]:
    """Return how many descriptors, threads and shared mappings this process has."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return (
        len(list(Path("/proc/self/fd").iterdir())),
        threading.active_count(),
        maps.count("memfd:ganglion"),
    )


@pytest.mark.parametrize("closing", ["close", "drop"])
def test_a_hundred_groups_leak_nothing(closing: str) -> None:
    def once() -> None:
        sockets = meshes(2), meshes(2)
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda rank: use(rank, *sockets), range(2)))

    def use(rank: int, small: Any, large: Any) -> None:
        group = ShmGroup((0, 1), rank, small[rank], large[rank], 30.0, slot_bytes=SMALL_SLOT)
        group.all_reduce(group.allocate(20_000, torch.float32).fill_(1)).wait()
        group.all_reduce(torch.ones(20_000)).wait()
        group.barrier()
        if closing == "close":
            group.close()

    once()
    before = holdings()
    for _ in range(100 if closing == "close" else 5):
        once()
    assert holdings() == before
