"""Flat buckets: gradients land in them, are summed over replicas, and clip like torch's own."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ganglion.decide.topology import Mesh
from ganglion.errors import ConfigError
from ganglion.execute.comm import SoloGroup, World, run_threads
from ganglion.execute.gradients import GradientReducer, Reach, clip_factor, global_norm
from ganglion.trace import COMM, Recorder

ONE_AT_A_TIME = threading.Lock()


def make_layers() -> nn.Sequential:
    with ONE_AT_A_TIME, torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))


def reducer_of(model: nn.Module, group: object, **options: object) -> GradientReducer:
    settings: dict[str, object] = {"bucket_bytes": 200, "overlap": True, **options}
    parameters, reach = dict(model.named_parameters()), Reach(group)  # type: ignore[arg-type]
    return GradientReducer(parameters, reach, Recorder(0), **settings)  # type: ignore[arg-type]


def test_gradients_are_views_and_accumulate() -> None:
    plain, flat = make_layers(), make_layers()
    reducer = reducer_of(flat, SoloGroup(0))
    assert len(reducer.buffers) > 2
    inputs = torch.randn(2, 3, 4)
    reducer.zero()
    for part in inputs:
        plain(part).sum().backward()
        flat(part).sum().backward()
    reducer.arm()
    reducer.finish(0)
    for (name, wanted), parameter in zip(plain.named_parameters(), flat.parameters(), strict=True):
        assert torch.equal(wanted.grad, parameter.grad), name  # type: ignore[arg-type]
    total = sum(float(buffer.sum()) for buffer in reducer.buffers)
    assert total == pytest.approx(sum(float(p.grad.sum()) for p in plain.parameters()))  # type: ignore[union-attr]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_overlap_is_bitwise_equal_to_waiting(num_ranks: int) -> None:
    def body(world: World) -> list[list[torch.Tensor]]:
        results = []
        for overlap in (True, False):
            model = make_layers()
            reducer = reducer_of(model, world.group("data"), overlap=overlap)
            reducer.zero()
            reducer.arm()
            generator = torch.Generator().manual_seed(world.rank)
            model(torch.randn(5, 4, generator=generator)).pow(2).sum().backward()
            reducer.finish(0)
            results.append([buffer.clone() for buffer in reducer.buffers])
        return results

    for overlapped, waited in run_threads(Mesh(data=num_ranks), body):
        assert all(torch.equal(a, b) for a, b in zip(overlapped, waited, strict=True))


def test_reductions_start_during_backward_and_in_one_order() -> None:
    """The first bucket must be under way before backward reaches the first layer."""

    def body(world: World) -> tuple[int, int]:
        model = make_layers()
        reducer = reducer_of(model, world.group("data"))
        started_before_first_layer = -1

        def note(parameter: torch.Tensor) -> None:
            nonlocal started_before_first_layer
            started_before_first_layer = len(reducer._started)

        model[0].weight.register_post_accumulate_grad_hook(note)
        reducer.zero()
        reducer.arm()
        model(torch.ones(1, 4)).sum().backward()
        started = len(reducer._started)
        reducer.finish(0)
        return started_before_first_layer, started

    for early, after_backward in run_threads(Mesh(data=2), body):
        assert early >= 1
        assert after_backward >= early


def test_unused_parameters_do_not_hang() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    def body(world: World) -> float:
        model = Half()
        reducer = reducer_of(model, world.group("data"))
        for _ in range(2):
            reducer.zero()
            reducer.arm()
            model(torch.ones(1, 4)).sum().backward()
            reducer.finish(0)
        return float(model.unused.weight.grad.abs().sum())  # type: ignore[union-attr]

    assert run_threads(Mesh(data=2), body) == [0.0, 0.0]


def test_frozen_parameters_and_mixed_dtypes() -> None:
    model = make_layers()
    model[0].weight.requires_grad_(False)
    model[3].to(torch.float64)
    reducer = reducer_of(model, SoloGroup(0))
    assert {buffer.dtype for buffer in reducer.buffers} == {torch.float32, torch.float64}
    assert model[0].weight.grad is None


def test_replaced_gradients_are_noticed() -> None:
    model = make_layers()
    reducer = reducer_of(model, SoloGroup(0))
    reducer.zero()
    model.zero_grad(set_to_none=True)
    with pytest.raises(ConfigError, match="a gradient was replaced during the step"):
        model(torch.ones(1, 4)).sum().backward()
    reducer.zero()
    model(torch.ones(1, 4)).sum().backward()


def test_reductions_are_traced_with_their_bytes() -> None:
    model = make_layers()
    recorder = Recorder(0)
    parameters = dict(model.named_parameters())
    reach = Reach(SoloGroup(0))
    reducer = GradientReducer(parameters, reach, recorder, bucket_bytes=200, overlap=True)
    reducer.arm()
    reducer.finish(4)
    events = recorder.events()
    assert {(e.lane, e.kind, e.step, e.axis) for e in events} == {(COMM, "reduce", 4, "data")}
    assert sum(e.bytes for e in events) == 4 * sum(p.numel() for p in parameters.values())


class UsedTwice(nn.Module):
    """One layer in two places, each recomputed in backward, or (None) kept."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        with ONE_AT_A_TIME, torch.random.fork_rng():
            torch.manual_seed(3)
            self.shared, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self._once(x)
        return self.last(x)

    def _once(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            return self.shared(x)
        # Threads share torch's generator: what one of them restores would be seen by the others,
        # which may just draw their first weights.
        return checkpoint(self.shared, x, use_reentrant=self.reentrant, preserve_rng_state=False)


def reduced_gradients(world: World, *, reentrant: bool | None, overlap: bool) -> torch.Tensor:
    model = UsedTwice(reentrant)
    reducer = reducer_of(model, world.group("data"), overlap=overlap)
    for _ in range(2):
        reducer.zero()
        reducer.arm()
        model(torch.ones(1, 4, requires_grad=True)).sum().backward()
        reducer.finish(0)
    return torch.cat(reducer.buffers)


@pytest.mark.parametrize(
    ("reentrant", "overlap"), [(None, True), (False, True), (True, False)], ids=str
)
def test_a_parameter_may_be_used_twice(reentrant: bool | None, overlap: bool) -> None:
    plain = UsedTwice(None)
    plain(torch.ones(1, 4)).sum().backward()
    expected = sum(2 * float(p.grad.sum()) for p in plain.parameters())  # type: ignore[union-attr]

    def body(world: World) -> torch.Tensor:
        return reduced_gradients(world, reentrant=reentrant, overlap=overlap)

    for gradients in run_threads(Mesh(data=2), body):
        assert float(gradients.sum()) == pytest.approx(expected)


def test_a_gradient_that_is_final_twice_is_refused_by_name() -> None:
    """The first all-reduce would run while backward still adds to its buffer."""
    with pytest.raises(ConfigError, match=r"'shared\.\w+' became final twice.*use_reentrant=False"):
        run_threads(
            Mesh(data=2), lambda world: reduced_gradients(world, reentrant=True, overlap=True)
        )


class Stamped:
    """A handle that was done at a known time, however late it is waited for."""

    def __init__(self, finished_s: float | None) -> None:
        self.finished_s = finished_s

    def wait(self) -> None:
        pass


class StampedGroup(SoloGroup):
    """A group of one whose reductions end at a given time."""

    def __init__(self, finished_s: float | None) -> None:
        super().__init__(0)
        self.finished_s = finished_s

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> Stamped:
        return Stamped(self.finished_s)


@pytest.mark.parametrize(
    ("finished_s", "end_s"), [(1.5, 1.5), (None, 2.0), (0.5, 2.0), (9.0, 2.0)], ids=str
)
def test_a_reduction_ends_when_it_was_done(finished_s: float | None, end_s: float) -> None:
    """Started at 1 and awaited at 2; a time outside of that is of another clock."""
    times = iter([1.0, 2.0])
    recorder = Recorder(0, clock=lambda: next(times))
    reducer = GradientReducer(
        {"w": nn.Parameter(torch.zeros(3))},
        Reach(StampedGroup(finished_s)),
        recorder,
        bucket_bytes=200,
        overlap=True,
    )
    reducer.arm()
    reducer.finish(0)
    assert [(e.start_s, e.end_s) for e in recorder.events()] == [(1.0, end_s)]


class Late:
    """Gradients of which a part, 5, comes after autograd is done."""

    def __init__(self, late: nn.Parameter) -> None:
        self.late = late
        self.log: list[str] = []

    def begin(self, parameter: Tensor) -> None:
        self.log.append("begin" if parameter is self.late else "other")

    def finish(self, parameter: Tensor) -> None:
        if parameter is self.late and "finish" not in self.log:
            self.log.append("finish")
            assert parameter.grad is not None
            parameter.grad += 5


def test_a_bucket_waits_for_gradients_that_come_late() -> None:
    def body(world: World) -> tuple[list[str], Tensor]:
        model = make_layers()
        late = Late(model[3].weight)
        reducer = reducer_of(model, world.group("data"), late=late)
        reducer.zero()
        reducer.arm()
        model(torch.zeros(1, 4)).sum().backward()
        seen = list(late.log)
        reducer.finish(0)
        assert model[3].weight.grad is not None
        return seen, model[3].weight.grad - 10

    plain = make_layers()
    plain(torch.zeros(1, 4)).sum().backward()
    wanted = plain[3].weight.grad
    assert wanted is not None
    for seen, gradient in run_threads(Mesh(data=2), body):
        # In backward already, and not before autograd was done with it.
        assert seen.index("begin") < seen.index("finish") < len(seen) - 1
        torch.testing.assert_close(gradient, 2 * wanted)


@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_clipping_equals_torchs(max_norm: float) -> None:
    plain, flat = make_layers(), make_layers()
    reducer = reducer_of(flat, SoloGroup(0))
    for model in (plain, flat):
        model(torch.ones(3, 4)).sum().backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
    norm = global_norm(reducer.buffers)
    factor = clip_factor(norm, max_norm)
    for buffer in reducer.buffers if factor is not None else ():
        buffer.mul_(factor)
    torch.testing.assert_close(norm, expected)
    for wanted, parameter in zip(plain.parameters(), flat.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, wanted.grad)


def test_norm_of_nothing_is_zero() -> None:
    assert float(global_norm([])) == 0.0


def test_the_norm_has_the_widest_dtype_of_the_buffers() -> None:
    buffers = [torch.full((3,), 2.0, dtype=dtype) for dtype in (torch.float32, torch.float64)]
    assert global_norm(buffers).dtype == torch.float64
    assert global_norm([buffers[0].bfloat16()]).dtype == torch.float32


def test_a_closed_reducer_does_not_see_later_backwards() -> None:
    def body(world: World) -> None:
        model = make_layers()
        reducer = reducer_of(model, world.group("data"))
        reducer.zero()
        reducer.arm()
        reducer.close()
        for _ in range(2):  # hooks that are left would call the second gradient "final twice"
            model(torch.ones(3, 4)).sum().backward()

    run_threads(Mesh(data=2), body)
