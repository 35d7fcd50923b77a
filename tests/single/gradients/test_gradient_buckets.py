"""Sets of flat gradients: one is summed over the replicas while backward adds to another."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ganglion.decide.topology import Mesh
from ganglion.errors import CommError, ConfigError
from ganglion.execute.comm import Group, Handle, SoloGroup, run_threads
from ganglion.execute.comm.shm.group import ShmGroup
from ganglion.execute.gradients import GradientBuckets, Reach
from ganglion.trace import COMM, Recorder

pytestmark = pytest.mark.timeout(60)

Body = Callable[[Group], Any]
WIDTH = 40


class Layers(nn.Module):
    """Layers whose gradients are whole numbers, so that every order of summation is exact."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.ones(WIDTH, WIDTH, dtype=dtype)) for dtype in dtypes
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return a sum in which the gradient of weight `i` is `(i + 1) * x` in every row."""
        terms = [(i + 1) * (w * x.to(w.dtype)).sum().double() for i, w in enumerate(self.weights)]
        return torch.stack(terms).sum()


def floats() -> Layers:
    return Layers(*[torch.float32] * 4)


def row(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, (WIDTH,), generator=generator).float()


def buckets_of(
    model: nn.Module, group: Group, num_sets: int = 2, recorder: Recorder | None = None
) -> GradientBuckets:
    """Return buckets of two weights or less, that is at least two a set."""
    parameters = dict(model.named_parameters())
    recorder = Recorder(0) if recorder is None else recorder
    bound = 2 * 4 * WIDTH * WIDTH
    reach = Reach(group)
    return GradientBuckets(parameters, reach, recorder, bucket_bytes=bound, num_sets=num_sets)


def gradients(model: nn.Module) -> list[Tensor]:
    """Return copies of what p.grad holds."""
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def plain_gradients(make: Callable[[], Layers], seeds: list[int]) -> list[Tensor]:
    """Return what one process gets from all those rows, without any bucket."""
    model = make()
    for seed in seeds:
        model(row(seed)).backward()
    return gradients(model)


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def on_local(size: int, body: Body) -> list[Any]:
    """Run `body` on threads whose handles know their end only once waited for."""
    return run_threads(Mesh(data=size), lambda world: body(world.group("data")))


def on_shm(size: int, body: Body, **sizes: int) -> list[Any]:
    """Run `body` on threads that share memory like processes; their handles tell."""
    ranks = range(size)
    pairs = {(a, b, c): socket.socketpair() for a in ranks for b in range(a) for c in range(2)}

    def sockets(rank: int, channel: int) -> dict[int, socket.socket]:
        return {
            peer: pairs[max(rank, peer), min(rank, peer), channel][rank < peer]
            for peer in ranks
            if peer != rank
        }

    def member(rank: int) -> Any:
        group = ShmGroup(tuple(ranks), rank, sockets(rank, 0), sockets(rank, 1), 30.0, **sizes)
        try:
            return body(group)
        finally:
            group.close()

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(member, rank) for rank in ranks]
        return [future.result(timeout=50) for future in futures]


def on_shm_in_place(size: int, body: Body) -> list[Any]:
    """The same, with every collective carried like a large one: straight from buffer to buffer."""
    return on_shm(size, body, eager_bytes=0)


TELLING = [on_shm, on_shm_in_place]


# --- selecting and zeroing ----------------------------------------------------------------------


def test_backward_adds_to_the_selected_set_only() -> None:
    model = floats()
    buckets = buckets_of(model, SoloGroup(0), num_sets=3)
    assert len(buckets.layout) >= 2
    model(row(0)).backward()
    buckets.select(2)
    model(row(1)).backward()
    model(row(2)).backward()
    assert equal(gradients(model), plain_gradients(floats, [1, 2]))
    buckets.select(0)
    assert equal(gradients(model), plain_gradients(floats, [0]))
    assert not any(buffer.any() for buffer in buckets.buffers(1))


def test_gradients_are_views_into_the_buffers() -> None:
    model = floats()
    buckets = buckets_of(model, SoloGroup(0))
    for which in (1, 0):
        buckets.select(which)
        for buffer in buckets.buffers(which):
            buffer.fill_(which + 5)
        assert all(bool((gradient == which + 5).all()) for gradient in gradients(model))
    assert sum(b.numel() for b in buckets.buffers(0)) == sum(p.numel() for p in model.parameters())


def test_zeroing_touches_one_set_and_leaves_the_selection() -> None:
    model = floats()
    buckets = buckets_of(model, SoloGroup(0))
    for which in (1, 0):
        buckets.select(which)
        model(row(which)).backward()
    buckets.zero(1)
    assert not any(buffer.any() for buffer in buckets.buffers(1))
    assert equal(gradients(model), plain_gradients(floats, [0]))


@pytest.mark.parametrize("which", [0, 1])
def test_replaced_gradients_are_noticed_in_every_set(which: int) -> None:
    model = floats()
    buckets = buckets_of(model, SoloGroup(0))
    buckets.select(which)
    model.zero_grad(set_to_none=True)
    with pytest.raises(ConfigError, match="a gradient was replaced during the step"):
        model(row(0)).backward()
    buckets.select(which)
    model(row(0)).backward()
    buckets.close()
    model.zero_grad(set_to_none=True)
    model(row(0)).backward()  # theirs again


def test_frozen_parameters_have_no_gradient() -> None:
    model = floats()
    model.weights[1].requires_grad_(False)
    buckets = buckets_of(model, SoloGroup(0))
    buckets.select(1)
    assert model.weights[1].grad is None
    assert len(buckets.parameters) == 3


# --- summing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [on_local, *TELLING])
def test_two_sets_in_turn_while_the_other_is_reduced(run: Callable[..., list[Any]]) -> None:
    """Step t is reduced while t + 1 is computed; one rank is always late, so it really is."""
    num_steps = 4
    computed = [threading.Event() for _ in range(num_steps)]

    def body(group: Group) -> list[list[Tensor]]:
        model = floats()
        buckets = buckets_of(model, group)
        sums = []

        def collect(step: int) -> None:
            buckets.wait(step % 2)
            sums.append([buffer.clone() for buffer in buckets.buffers(step % 2)])

        for step in range(num_steps):
            buckets.zero(step % 2)
            buckets.select(step % 2)
            model(row(10 * step + group.index)).backward()
            if step:
                if group.index == 0:
                    assert not buckets.is_done((step - 1) % 2)
                    computed[step].set()
                else:
                    assert computed[step].wait(30)
                    buckets.start((step - 1) % 2, step - 1)
                collect(step - 1)
            if group.index == 0 or step == num_steps - 1:
                buckets.start(step % 2, step)
        collect(num_steps - 1)
        group.barrier()
        return sums

    expected = []
    for step in range(num_steps):
        model = floats()
        reference = buckets_of(model, SoloGroup(0))
        for rank in range(2):
            model(row(10 * step + rank)).backward()
        expected.append(reference.buffers(0))
    for sums in run(2, body):
        assert all(equal(got, wanted) for got, wanted in zip(sums, expected, strict=True))


@pytest.mark.parametrize("run", [on_local, *TELLING])
@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_exact_in_every_dtype(run: Callable[..., list[Any]], size: int) -> None:
    def mixed() -> Layers:
        return Layers(torch.float32, torch.bfloat16, torch.float64, torch.float32)

    def body(group: Group) -> tuple[list[Tensor], set[torch.dtype]]:
        model = mixed()
        buckets = buckets_of(model, group)
        buckets.select(1)
        model(row(group.index)).backward()
        buckets.start(1, 0)
        buckets.wait(1)
        group.barrier()
        return gradients(model), {buffer.dtype for buffer in buckets.buffers(1)}

    expected = plain_gradients(mixed, list(range(size)))
    for sums, dtypes in run(size, body):
        assert equal(sums, expected)
        assert dtypes == {torch.float32, torch.bfloat16, torch.float64}


def test_host_memory_comes_from_the_group_set_by_set() -> None:
    class Lender(SoloGroup):
        def __init__(self) -> None:
            super().__init__(0)
            self.lent: list[int] = []

        def allocate(self, num_elements: int, dtype: torch.dtype) -> Tensor:
            memory = torch.full((num_elements,), float("nan"), dtype=dtype)
            self.lent.append(memory.data_ptr())
            return memory

    group = Lender()
    buckets = buckets_of(floats(), group)
    buffers = [*buckets.buffers(0), *buckets.buffers(1)]
    assert [buffer.data_ptr() for buffer in buffers] == group.lent
    assert len(set(group.lent)) == len(group.lent)
    assert not any(buffer.any() for buffer in buffers)


# --- knowing when it is over --------------------------------------------------------------------


class ManualHandle:
    """A reduction that is over when the test says so; waiting for it before is an error."""

    started_s: float | None = 0.0

    def __init__(self) -> None:
        self.finished_s: float | None = None

    def is_done(self) -> bool:
        return self.finished_s is not None

    def wait(self) -> None:
        if self.finished_s is None:
            raise CommError("never")


class ManualGroup(SoloGroup):
    """A group that claims two members and leaves the reductions to the test."""

    def __init__(self) -> None:
        super().__init__(0)
        self.size = 2
        self.handles: list[ManualHandle] = []

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Handle:
        self.handles.append(ManualHandle())
        return self.handles[-1]


def test_a_set_is_done_when_each_bucket_is() -> None:
    group = ManualGroup()
    buckets = buckets_of(floats(), group)
    num_buckets = len(buckets.layout)
    assert not buckets.is_done(0)
    buckets.start(0, 7)
    buckets.start(1, 8)
    assert len(group.handles) == 2 * num_buckets
    for handle in group.handles[:num_buckets]:
        assert not buckets.is_done(0)
        handle.finished_s = 1.0
    assert buckets.is_done(0)
    assert not buckets.is_done(1)
    buckets.wait(0)
    assert buckets.is_done(0)
    buckets.zero(0)
    assert not buckets.is_done(0)


def test_buckets_started_one_by_one_are_not_done_before_all_are() -> None:
    group = ManualGroup()
    buckets = buckets_of(floats(), group)
    for _ in range(2):  # the second time, over the sums of the first
        buckets.start_bucket(0, 0)
        group.handles[-1].finished_s = 1.0
        assert not buckets.is_done(0)
        assert len(buckets.started(0)) == 1
        buckets.start(0, 3)
        assert len(buckets.started(0)) == len(buckets.layout)
        for handle in group.handles:
            handle.finished_s = 1.0
        assert buckets.is_done(0)
        buckets.wait(0)
        assert not buckets.started(0)
    assert len(group.handles) == 2 * len(buckets.layout)


def test_buckets_can_be_waited_for_one_by_one() -> None:
    group, recorder = ManualGroup(), Recorder(0)
    buckets = buckets_of(floats(), group, recorder=recorder)
    num_buckets = len(buckets.layout)
    for _ in range(2):
        buckets.start(0, 3)
        with pytest.raises(AssertionError, match="bucket 1 is not next to wait for"):
            buckets.wait_bucket(0, 1)
        first, *others = group.handles[-num_buckets:]
        first.finished_s = 1.0
        buckets.wait_bucket(0, 0)
        assert not buckets.is_done(0)
        for handle in others:
            handle.finished_s = 1.0
        buckets.wait(0)  # for those that are left
        assert buckets.is_done(0) and not buckets.started(0)
    assert len(recorder) == 2 * num_buckets
    buckets.start(0, 4)
    with pytest.raises(CommError, match="never"):
        buckets.wait_bucket(0, 0)
    assert not buckets.is_done(0)


def test_a_failed_reduction_is_never_done_and_waiting_says_why() -> None:
    buckets = buckets_of(floats(), ManualGroup())
    buckets.start(1, 0)
    with pytest.raises(CommError, match="never"):
        buckets.wait(1)
    assert not buckets.is_done(1)
    with pytest.raises(AssertionError, match="set 1 was not started, or failed"):
        buckets.wait(1)


def test_misuse_is_caught() -> None:
    buckets = buckets_of(floats(), ManualGroup())
    with pytest.raises(AssertionError, match="set 1 was not started"):
        buckets.wait(1)
    with pytest.raises(AssertionError, match="bucket 1 is not next"):
        buckets.start_bucket(1, 1)
    buckets.start(1, 0)
    with pytest.raises(AssertionError, match="set 1 is still being reduced"):
        buckets.zero(1)
    buckets.zero(0)


@pytest.mark.parametrize("run", TELLING)
def test_the_end_is_seen_without_waiting(run: Callable[..., list[Any]]) -> None:
    """Shared memory tells; nothing here waits before the sums are in place."""

    def body(group: Group) -> list[Tensor]:
        model = floats()
        buckets = buckets_of(model, group)
        model(row(group.index)).backward()
        buckets.start(0, 0)
        while not buckets.is_done(0):
            os.sched_yield()
        seen = gradients(model)
        buckets.wait(0)
        group.barrier()
        return seen

    for seen in run(2, body):
        assert equal(seen, plain_gradients(floats, [0, 1]))


def test_threads_tell_without_waiting() -> None:
    def body(group: Group) -> tuple[bool, bool]:
        buckets = buckets_of(floats(), group)
        buckets.start(0, 0)
        group.barrier()  # all members have started, so the sums exist
        before = buckets.is_done(0)
        buckets.wait(0)
        return before, buckets.is_done(0)

    assert on_local(2, body) == [(True, True)] * 2


def test_a_group_of_one_is_done_at_once() -> None:
    model = floats()
    recorder = Recorder(0)
    buckets = buckets_of(model, SoloGroup(0), recorder=recorder)
    buckets.select(1)
    model(row(3)).backward()
    buckets.start(1, 5)
    assert buckets.is_done(1)
    assert not buckets.is_done(0)
    buckets.wait(1)
    assert equal(gradients(model), plain_gradients(floats, [3]))
    assert len(recorder) == len(buckets.layout)


def test_no_parameters_are_no_work() -> None:
    buckets = buckets_of(nn.Tanh(), ManualGroup())
    assert not buckets.is_done(0)
    buckets.start(0, 0)
    assert buckets.is_done(0)
    buckets.wait(0)


def test_each_bucket_leaves_one_event_with_its_step_and_true_end() -> None:
    times = iter(float(t) for t in range(100))
    recorder = Recorder(0, clock=lambda: next(times))
    group = ManualGroup()
    buckets = buckets_of(floats(), group, recorder=recorder)
    num_buckets = len(buckets.layout)
    for which, step in ((0, 7), (1, 8)):
        buckets.start(which, step)
    for number, handle in enumerate(group.handles):  # bucket `number` was started at `number`
        handle.finished_s = number + 0.5
    for which in (1, 0, 0):  # in any order; a second time is free
        buckets.wait(which)
    events = recorder.events()
    assert {(e.lane, e.kind, e.axis) for e in events} == {(COMM, "reduce", "data")}
    assert [e.step for e in events] == [8] * num_buckets + [7] * num_buckets
    assert [e.end_s - e.start_s for e in events] == [0.5] * 2 * num_buckets
    assert [e.bytes for e in events] == [b.nbytes for b in buckets.buffers(0)] * 2
