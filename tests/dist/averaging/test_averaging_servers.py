"""ElasticAverage with servers of their own, as a launcher would start them, one of which dies."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ganglion.errors import ConfigError
from ganglion.execute.averaging import ElasticAverage
from tests.support.crew import DEADLINE_S, Crew, await_true


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Crew]:
    made = Crew(tmp_path)
    yield made
    made.close()


class Bowl(nn.Module):
    """0.5 * |w - 3|^2, whose minimum is at 3."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((3000,), start, dtype=torch.float64))

    def forward(self) -> Tensor:
        return 0.5 * (self.w - 3.0).square().sum()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def script(folder: Path, rank: int, port: int) -> dict[str, Any]:
    """The same script on all processes: two workers and two servers."""
    os.environ |= {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "4"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
    }
    model = Bowl(float(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = ElasticAverage(
        model, optimizer, mode="async", beta=0.5, tau=1, servers=2, timeout_s=DEADLINE_S
    )
    if average.is_server:
        with pytest.raises(ConfigError, match="this process serves the centre and is no worker"):
            average.__enter__()
        seen = average.serve(snapshots=folder / "centers", every=5)
        return {"version": seen.version, "lost": sorted(seen.lost)}
    begun, steps = float(model.w.detach()[0]), 0
    with average:
        while not (folder / "stop").exists():
            model().backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    with average.center_weights():
        center = model.w.detach().clone()
    spread = float((center - 3.0).abs().max())
    average.close()
    return {"begun": begun, "steps": steps, "distance": spread}


def snapshots(folder: Path) -> int:
    return len(list((folder / "centers").glob("*.safetensors")))


@pytest.mark.parametrize("victim", [None, 3])
def test_workers_go_on_when_a_server_is_killed_and_started_again(
    crew: Crew, victim: int | None
) -> None:
    port = free_port()
    for rank in range(4):
        crew.start(f"rank{rank}", script, rank, port)
    await_true(lambda: snapshots(crew.folder) == 2, "a snapshot of each server")
    names = {2: "rank2", 3: "rank3"}
    if victim is not None:
        crew.signal(names[victim], signal.SIGKILL)
        assert crew.await_death(names[victim]) == signal.SIGKILL
        names[victim] = "again"
        crew.start("again", script, victim, port)
        (path,) = (crew.folder / "centers").glob("*-1.safetensors")
        before = path.stat().st_mtime_ns
        await_true(lambda: path.stat().st_mtime_ns > before, "a snapshot of the new server")
    (crew.folder / "stop").touch()
    workers = [crew.result(f"rank{rank}") for rank in (0, 1)]
    servers = [crew.result(name) for name in names.values()]
    assert [worker["begun"] for worker in workers] == [0.0, 0.0]  # the first worker's weights
    assert all(worker["distance"] < 3.0 for worker in workers)
    assert all(server["lost"] == [] for server in servers)
    num_steps = sum(worker["steps"] for worker in workers)
    if victim is None:  # every step exchanges with both
        assert [server["version"] for server in servers] == [num_steps] * 2
    else:  # what came after the last snapshot is lost with the server
        assert servers[0]["version"] == num_steps
        assert 5 < servers[1]["version"] <= num_steps
