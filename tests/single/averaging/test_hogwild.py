"""A centre without locks: right when nobody races, finite when all do, and losses are measured."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ganglion.decide.schedules.exchanges.elastic_rates import ElasticRate
from ganglion.decide.topology import Mesh
from ganglion.errors import ConfigError, PeerLost, ProtocolError
from ganglion.execute.averaging.methods.hogwild import HogwildEasgd, HogwildSgd
from ganglion.execute.averaging.methods.packed import Packed
from ganglion.execute.averaging.methods.shared_center import SharedCenter
from ganglion.execute.comm import World, run_threads

ALPHA, LR = 0.2, 0.1
DEADLINE_S = 30.0


class Bowl(nn.Module):
    """A quadratic, 0.5 * |w - target|^2: its gradient is w - target."""

    def __init__(self, numel: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(numel, dtype=dtype))

    def forward(self, target: float) -> Tensor:
        return 0.5 * (self.w - target).square().sum()


def make(kind: str, model: nn.Module, center: SharedCenter, worker: int, **options: Any) -> Any:
    packed = Packed(model)
    if kind == "sgd":
        return HogwildSgd(packed, center, worker, **options)
    return HogwildEasgd(packed, center, ElasticRate(alpha=ALPHA), worker, **options)


def steps(kind: str, center: SharedCenter, worker: int, **options: Any) -> Iterator[Any]:
    """Train a bowl whose target is the worker's number + 1; yield the method after every step."""
    model = Bowl(center.flat.numel(), center.flat.dtype)
    method = make(kind, model, center, worker, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    while True:
        method.begin_pass()
        model(worker + 1.0).backward()
        method.before_step(LR)
        optimizer.step()
        optimizer.zero_grad()
        method.after_step(LR)
        yield method, model


def serial(kind: str, num_steps: int, tau: int) -> tuple[float, list[float]]:
    """Two workers that take turns, by hand; return the centre and the weights."""
    center, weights, base = 1.0, [1.0, 1.0], [1.0, 1.0]
    for step in range(num_steps):
        for worker in (0, 1):
            gradient = weights[worker] - (worker + 1.0)
            if kind == "easgd":
                force = ALPHA * (weights[worker] - center) if step % tau == 0 else 0.0
                center += force
                weights[worker] -= LR * gradient + force
            else:
                weights[worker] -= LR * gradient
                if (step + 1) % tau == 0:
                    center += weights[worker] - base[worker]
                    weights[worker] = base[worker] = center
    return center, weights


@pytest.mark.parametrize("tau", [1, 3])
@pytest.mark.parametrize("kind", ["easgd", "sgd"])
def test_workers_that_take_turns_equal_the_serial_loop(kind: str, tau: int) -> None:
    shared = SharedCenter.in_process(torch.ones(64, dtype=torch.float64), 2)
    runs = [steps(kind, shared, worker, tau=tau) for worker in (0, 1)]
    for _ in range(7):
        last = [next(run) for run in runs]
    center, weights = serial(kind, 7, tau)
    assert shared.flat.tolist() == pytest.approx([center] * 64, abs=1e-12)
    for worker, (_, model) in enumerate(last):
        assert model.w.tolist() == pytest.approx([weights[worker]] * 64, abs=1e-12)
    metrics = last[0][0].metrics()
    assert metrics.num_steps == 7
    assert metrics.num_exchanges == (3 if (kind, tau) == ("easgd", 3) else 7 // tau)
    assert metrics.lost_update < 1e-12
    assert last[0][0].center().tolist() == shared.flat.tolist()


def test_without_gradients_the_sum_is_kept() -> None:
    shared = SharedCenter.in_process(torch.zeros(64, dtype=torch.float64), 3)
    methods = []
    for worker in range(3):
        method = make("easgd", Bowl(64), shared, worker)
        method._packed.flat.add_(worker + 1.0)
        methods.append(method)
    for _ in range(5):
        for method in methods:
            method.before_step(0.0)
            method.after_step(0.0)
    total = shared.flat + sum(method._packed.flat for method in methods)
    assert total.tolist() == pytest.approx([6.0] * 64, abs=1e-12)
    assert shared.flat[0] > 0.5


class Contended(SharedCenter):
    """Stretches the moment between reading a word and writing it until all have read."""

    barrier: threading.Barrier

    def _write(self, delta: Tensor) -> None:
        read = self.flat.clone()
        self.barrier.wait(DEADLINE_S)
        self.flat.copy_(read + delta)


def test_updates_that_are_lost_are_measured() -> None:
    """Both read 0 and write 0 + 1: one of the two additions is gone, in every element."""
    shared = Contended.in_process(torch.zeros(100, dtype=torch.float64), 2)
    assert isinstance(shared, Contended)
    shared.barrier = threading.Barrier(2)
    delta = torch.ones(100, dtype=torch.float64)
    run_threads(Mesh(data=2), lambda world: shared.add(world.rank, delta), timeout_s=DEADLINE_S)
    assert shared.flat.tolist() == [1.0] * 100
    assert shared.lost_update() == pytest.approx(10.0)  # the norm of what is missing
    assert shared.version == 2


def test_the_same_additions_without_contention_lose_nothing() -> None:
    shared = SharedCenter.in_process(torch.zeros(10_000, dtype=torch.float64), 2)
    for worker in (0, 1):
        shared.add(worker, torch.ones(10_000, dtype=torch.float64))
    assert shared.lost_update() == 0.0
    shared.flat[:5000] -= 1.0  # half of one addition
    assert shared.lost_update() == pytest.approx(5000**0.5, rel=1e-3)


@pytest.mark.parametrize("kind", ["easgd", "sgd"])
def test_racing_threads_stay_finite_and_near_the_optimum(kind: str) -> None:
    num_workers, numel = 4, 200_000
    shared = SharedCenter.in_process(torch.zeros(numel), num_workers)
    start = threading.Barrier(num_workers)

    def body(world: World) -> Any:
        run = steps(kind, shared, world.rank)
        start.wait(DEADLINE_S)
        for _ in range(60):
            method, _ = next(run)
        return method.metrics()

    found = run_threads(Mesh(data=num_workers), body, timeout_s=DEADLINE_S)
    assert torch.isfinite(shared.flat).all()
    assert shared.version == sum(metrics.num_exchanges for metrics in found)
    # Targets are 1, 2, 3, 4; whoever comes last pulls most.
    assert 0.5 < shared.flat.min() <= shared.flat.max() < 4.5
    assert all(metrics.lost_update >= 0 for metrics in found)


def test_an_update_from_old_weights_is_not_added() -> None:
    shared = SharedCenter.in_process(torch.zeros(64, dtype=torch.float64), 2)
    slow, fast = steps("sgd", shared, 0, max_staleness=3), steps("sgd", shared, 1)
    next(slow)
    for _ in range(3):
        next(fast)
    before = float(shared.flat[0])
    next(slow)  # 3 behind: added
    assert float(shared.flat[0]) != before
    for _ in range(4):
        next(fast)
    before = float(shared.flat[0])
    method, model = next(slow)  # 4 behind: read anew instead
    assert float(shared.flat[0]) == before == float(model.w.detach()[0])
    metrics = method.metrics()
    assert (metrics.num_exchanges, metrics.num_discarded) == (2, 1)
    assert metrics.staleness == {0: 1, 3: 1, 4: 1}


def test_a_worker_that_slept_after_reading_reads_again() -> None:
    shared = SharedCenter.in_process(torch.zeros(64, dtype=torch.float64), 1)
    method = make("easgd", Bowl(64), shared, 0)  # the limit is 4 for one worker
    method._packed.flat.fill_(1.0)
    look, naps = method._look, [5, 0]

    def look_and_sleep() -> None:
        look()
        for _ in range(naps.pop(0)):
            shared.add(0, torch.full((64,), 0.1, dtype=torch.float64))

    method._look = look_and_sleep
    method.before_step(LR)
    assert shared.flat.tolist() == pytest.approx([0.5 + ALPHA * (1.0 - 0.5)] * 64)
    assert method.metrics().staleness == {5: 1, 0: 1}


def test_all_who_map_the_file_write_one_centre(tmp_path: Path) -> None:
    path = tmp_path / "center"
    first = SharedCenter.create(path, torch.arange(70, dtype=torch.float32), 3)
    other = SharedCenter.attach(path, timeout_s=1.0)
    assert other.num_workers == 3
    other.add(2, torch.ones(70))
    assert first.flat.tolist() == [i + 1.0 for i in range(70)]
    assert (first.version, first.lost_update()) == (1, 0.0)
    assert list(tmp_path.iterdir()) == [path]


def test_counts_and_the_centre_resume() -> None:
    for kind in ("easgd", "sgd"):
        shared = SharedCenter.in_process(torch.ones(64, dtype=torch.float64), 1)
        run = steps(kind, shared, 0, tau=3)
        for _ in range(4):
            method, _ = next(run)
        state, weights = method.state_dict(), method._packed.flat.clone()
        fresh = SharedCenter.in_process(torch.zeros(64, dtype=torch.float64), 1)
        again = steps(kind, fresh, 0, tau=3)
        method, _ = next(again)
        method.load_state_dict(state)
        method._packed.flat.copy_(weights)
        for _ in range(4):
            next(run)
            next(again)
        assert torch.equal(fresh.flat, shared.flat)
        assert fresh.lost_update() < 1e-12


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    shared = SharedCenter.in_process(torch.zeros(64), 2)
    with pytest.raises(ConfigError, match="worker = 2: this centre has workers 0 to 1"):
        make("sgd", Bowl(64, torch.float32), shared, 2)
    with pytest.raises(ConfigError, match="tau = 0"):
        make("sgd", Bowl(64, torch.float32), shared, 0, tau=0)
    with pytest.raises(ProtocolError, match=r"128 weights of torch.float32, the centre 64"):
        make("sgd", Bowl(65, torch.float32), shared, 0)
    with pytest.raises(ConfigError, match="num_workers = 0"):
        SharedCenter.in_process(torch.zeros(2), 0)
    with pytest.raises(ConfigError, match="bfloat16 cannot be shared"):
        SharedCenter.in_process(torch.zeros(2, dtype=torch.bfloat16), 1)
    with pytest.raises(PeerLost, match=r"no centre appeared at .*nowhere within 0.05 s"):
        SharedCenter.attach(tmp_path / "nowhere", timeout_s=0.05)
    (tmp_path / "junk").write_bytes(bytes(4096))
    with pytest.raises(ProtocolError, match="holds no centre"):
        SharedCenter.attach(tmp_path / "junk")
    rate = ElasticRate(alpha=0.9, unsafe=True)
    method = HogwildEasgd(Packed(Bowl(64, torch.float32)), shared, rate, 0)
    with pytest.raises(ConfigError, match="diverges in mode 'hogwild'"):
        method.before_step(LR)
