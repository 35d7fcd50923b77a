"""Asynchronous averaging over real processes: killed, stalled, late and replaced ones.

Weights are the same in all elements and gradients are mostly off, so every exchange moves worker
and centre by one and the same number, which the server writes down.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from ganglion.decide.schedules.exchanges.elastic_rates import ElasticRate
from ganglion.decide.schedules.exchanges.served import EXCHANGE
from ganglion.execute.averaging.methods.hogwild import HogwildEasgd
from ganglion.execute.averaging.methods.packed import Packed
from ganglion.execute.averaging.methods.shared_center import SharedCenter
from ganglion.execute.averaging.served.methods import ServedEasgd
from ganglion.execute.averaging.served.rules import Elastic
from ganglion.execute.averaging.served.server import CenterServer
from ganglion.execute.averaging.served.shards import ShardedCenter
from ganglion.execute.averaging.served.snapshot import Snapshots, load_snapshot
from tests.support.crew import DEADLINE_S, Crew, await_true

RUN, ALPHA = "processes", 0.25
# Far longer than a test may take: a server that drops the dead by the deadline only is too late.
SERVER_DEADLINE_S = 300.0
SMALL, LARGE = 64, 2 << 20  # elements; the large do not fit the buffers of a socket


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Crew]:
    made = Crew(tmp_path)
    yield made
    made.close()


def saved_version(folder: Path) -> int:
    """Return how many exchanges the last snapshot has seen, without reading the weights."""
    if not (folder / "snapshot").exists():
        return 0
    with safe_open(folder / "snapshot", framework="pt") as file:
        return int(file.metadata()["version"])


# --- what the processes do ------------------------------------------------------------------------


class Bowl(nn.Module):
    """0.5 * |w - 3|^2, whose gradient is w - 3."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(numel, dtype=torch.float64))

    def forward(self) -> Tensor:
        return 0.5 * (self.w - 3.0).square().sum()


class Ledger(Elastic):
    """Writes down how far each exchange moved the centre."""

    def __init__(self) -> None:
        super().__init__()
        self.moves: list[float] = []

    def apply(self, center: Tensor, sent: Tensor, rate: float, reply: Tensor) -> bool:
        before = float(center[0])
        result = super().apply(center, sent, rate, reply)
        self.moves.append(float(center[0]) - before)
        return result


def open_store(folder: Path) -> dist.FileStore:
    return dist.FileStore(str(folder / "store"))


def serve(folder: Path, num_workers: int, numel: int, options: dict[str, Any]) -> dict[str, Any]:
    center = torch.ones(numel, dtype=torch.float64)
    return run_server(CenterServer, folder, center, num_workers, options)


def serve_again(folder: Path, num_workers: int, options: dict[str, Any]) -> dict[str, Any]:
    """Take the place of a server that is gone."""
    snapshot = load_snapshot(folder / "snapshot")
    options = {"version": snapshot.version, **options}
    return run_server(CenterServer, folder, snapshot.center, num_workers, options)


def run_server(
    make: type[CenterServer],
    folder: Path,
    center: Tensor,
    num_workers: int,
    options: dict[str, Any],
) -> dict[str, Any]:
    ledger = Ledger()
    snapshots = Snapshots(folder / "snapshot", 5)
    server = make(
        center,
        ledger,
        open_store(folder),
        run_id=RUN,
        num_workers=num_workers,
        timeout_s=SERVER_DEADLINE_S,
        is_recording=True,
        snapshots=snapshots,
        **options,
    )
    server.serve()
    workers = [e.worker for e in server.books.record or () if e.kind == EXCHANGE]
    spread = float(server.center.max() - server.center.min())
    lost = sorted(server.metrics().lost)
    moves = list(zip(workers, ledger.moves, strict=True))
    return {"center": float(server.center[0]), "spread": spread, "moves": moves, "lost": lost}


def work(
    folder: Path,
    worker: int,
    numel: int,
    lr: float,
    num_steps: int | None,
    doom: str,
    least: int = 1,
) -> dict[str, Any]:
    """Train for `num_steps`, or for `least` and until the test says stop; meet doom in step 5."""
    model = Bowl(numel)
    packed = Packed(model)
    store = open_store(folder)
    center = ShardedCenter(store, packed.flat, run_id=RUN, worker=worker, timeout_s=DEADLINE_S)
    rate = ElasticRate(alpha=ALPHA)
    method = ServedEasgd(packed, center, rate, lambda: lr, num_workers=3, tau=1)
    joined_at = (center.parts[0].link.version, float(packed.flat[0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    packed.flat.add_(worker + 1.0)
    begun, step = float(packed.flat[0]), 0
    while step < (num_steps or least) or (num_steps is None and not (folder / "stop").exists()):
        if step == 5:
            meet_doom(doom, folder, method, center)
        method.begin_pass()
        model().backward()
        method.before_step(lr)
        optimizer.step()
        optimizer.zero_grad()
        method.after_step(lr)
        step += 1
        at_work(folder, worker).touch()
    calls = center.parts[0].link.num_connections
    method.close()
    ended = float(packed.flat[0])
    return {"begun": begun, "ended": ended, "joined_at": joined_at, "calls": calls, "steps": step}


def at_work(folder: Path, worker: int) -> Path:
    """Return the file that exists once a worker has trained for a step."""
    return folder / f"at_work_{worker}"


def meet_doom(doom: str, folder: Path, method: ServedEasgd, center: ShardedCenter) -> None:
    """Be killed or stopped at some phase of an exchange."""
    (folder / doom).touch()
    if doom == "before_send":
        os.kill(os.getpid(), signal.SIGKILL)
    elif doom == "mid_send":
        method.begin_pass()
        line = center.parts[0].link._client._transport
        assert line is not None
        assert line._backlog, "all of the message is on its way"
        os.kill(os.getpid(), signal.SIGKILL)
    elif doom == "after_send":
        method.begin_pass()
        center.parts[0].link._client.flush(DEADLINE_S)
        os.kill(os.getpid(), signal.SIGKILL)
    elif doom == "after_reply":
        method.begin_pass()
        method.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    elif doom == "stall":
        method.begin_pass()
        os.kill(os.getpid(), signal.SIGSTOP)


# --- tests ----------------------------------------------------------------------------------------


def assert_conserved(center: dict[str, Any], workers: dict[int, dict[str, Any]]) -> None:
    """The centre moved by what was written down, and each of these workers the other way."""
    assert center["center"] == pytest.approx(1.0 + sum(m for _, m in center["moves"]), abs=1e-12)
    assert center["spread"] == 0.0
    for number, worker in workers.items():
        moved = sum(move for who, move in center["moves"] if who == number)
        assert moved != 0.0
        assert worker["begun"] - worker["ended"] == pytest.approx(moved, abs=1e-12)


@pytest.mark.parametrize(
    ("doom", "numel", "listen_on", "num_exchanges"),
    [
        ("before_send", SMALL, None, (5, 5)),
        ("mid_send", LARGE, "127.0.0.1", (5, 5)),
        ("after_send", SMALL, "127.0.0.1", (5, 6)),
        ("after_reply", SMALL, None, (6, 6)),
    ],
)
def test_the_others_go_on_without_a_worker_that_is_killed(
    crew: Crew, doom: str, numel: int, listen_on: str | None, num_exchanges: tuple[int, int]
) -> None:
    """An exchange that was not received whole is no exchange; what was received counts."""
    crew.start("server", serve, 3, numel, {"listen_on": listen_on})
    crew.start("w0", work, 0, numel, 0.0, None, "")
    crew.start("w1", work, 1, numel, 0.0, None, "")
    crew.start("w2", work, 2, numel, 0.0, None, doom)
    assert crew.await_death("w2") == signal.SIGKILL
    assert (crew.folder / doom).exists()
    version = saved_version(crew.folder)
    await_true(lambda: saved_version(crew.folder) >= version + 10, "exchanges of the others")
    (crew.folder / "stop").touch()
    workers = {number: crew.result(f"w{number}") for number in (0, 1)}
    center = crew.result("server")
    assert center["lost"] == [2]
    low, high = num_exchanges
    assert low <= sum(who == 2 for who, _ in center["moves"]) <= high
    assert_conserved(center, workers)


def test_the_others_go_on_while_a_worker_stalls(crew: Crew) -> None:
    crew.start("server", serve, 3, SMALL, {})
    crew.start("w0", work, 0, SMALL, 0.0, None, "")
    crew.start("w1", work, 1, SMALL, 0.0, None, "")
    crew.start("w2", work, 2, SMALL, 0.0, 50, "stall")
    await_true(lambda: crew.is_stopped("w2"), "the stall")
    version = saved_version(crew.folder)
    await_true(lambda: saved_version(crew.folder) >= version + 20, "exchanges of the others")
    (crew.folder / "stop").touch()
    workers = {number: crew.result(f"w{number}") for number in (0, 1)}
    crew.signal("w2", signal.SIGCONT)
    workers[2] = crew.result("w2")
    center = crew.result("server")
    assert center["lost"] == []
    assert sum(who == 2 for who, _ in center["moves"]) == 50
    assert_conserved(center, workers)


def test_who_joins_in_the_middle_starts_at_the_centre(crew: Crew) -> None:
    crew.start("server", serve, 3, SMALL, {})
    for number in (0, 1):
        crew.start(f"w{number}", work, number, SMALL, 0.0, None, "")
    await_true((crew.folder / "snapshot").exists, "the fifth exchange")
    crew.start("w2", work, 2, SMALL, 0.0, 10, "")
    workers = {2: crew.result("w2")}
    (crew.folder / "stop").touch()
    workers |= {number: crew.result(f"w{number}") for number in (0, 1)}
    center = crew.result("server")
    version, weight = workers[2]["joined_at"]
    assert version >= 5
    then = 1.0 + sum(move for _, move in center["moves"][:version])
    assert weight == pytest.approx(then, abs=1e-12)
    assert weight != 1.0
    assert_conserved(center, workers)


def test_a_killed_server_is_replaced_from_its_snapshot(crew: Crew) -> None:
    """With gradients: the minimum is at 3, and the workers find it in spite of the loss."""
    crew.start("server", serve, 2, SMALL, {})
    for number in (0, 1):
        crew.start(f"w{number}", work, number, SMALL, 0.1, None, "", 100)
    await_true((crew.folder / "snapshot").exists, "the fifth exchange")
    for number in (0, 1):
        await_true(at_work(crew.folder, number).exists, f"worker {number}")
    crew.signal("server", signal.SIGKILL)
    assert crew.await_death("server") == signal.SIGKILL
    version = saved_version(crew.folder)
    crew.start("again", serve_again, 2, {})
    later = version + 100
    await_true(lambda: saved_version(crew.folder) > later, "100 exchanges")
    (crew.folder / "stop").touch()
    workers = [crew.result(f"w{number}") for number in (0, 1)]
    center = crew.result("again")
    assert all(worker["calls"] >= 2 for worker in workers)
    assert len(center["moves"]) > 100
    assert center["center"] == pytest.approx(3.0, abs=0.05)
    assert all(worker["ended"] == pytest.approx(3.0, abs=0.05) for worker in workers)


def race(folder: Path, worker: int, num_steps: int, doom: int) -> dict[str, float]:
    shared = SharedCenter.attach(folder / "center", timeout_s=DEADLINE_S)
    model = Bowl(100_000)
    method = HogwildEasgd(Packed(model), shared, ElasticRate(alpha=ALPHA), worker)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(num_steps):
        if step == doom:
            os.kill(os.getpid(), signal.SIGKILL)
        method.begin_pass()
        model().backward()
        method.before_step(0.1)
        optimizer.step()
        optimizer.zero_grad()
        method.after_step(0.1)
    return {"exchanges": method.metrics().num_exchanges, "ended": float(model.w.detach()[0])}


def test_processes_race_on_shared_memory_and_one_is_killed(crew: Crew) -> None:
    first = Packed(Bowl(100_000)).flat
    center = SharedCenter.create(crew.folder / "center", torch.ones_like(first), 3)
    crew.start("w0", race, 0, 150, -1)
    crew.start("w1", race, 1, 150, -1)
    crew.start("w2", race, 2, 150, 40)
    assert crew.await_death("w2") == signal.SIGKILL
    results = [crew.result(f"w{number}") for number in (0, 1)]
    assert center.version == 340
    assert [result["exchanges"] for result in results] == [150, 150]
    trained = center.flat[:100_000]
    assert torch.isfinite(trained).all()
    assert trained.min() > 2.5
    assert trained.max() < 3.5
    assert center.lost_update() >= 0.0
