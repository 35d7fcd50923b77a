"""The server process of part `wall`: it serves one centre after the other, as its input says.

    input    a ServerJob of one centre     then, when its workers have left, a span of time
    output                                 the seconds of messages in that span

Both are lines of JSON. The centre is that of `ElasticAverage(..., servers=1)`, whose door is slow.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from averaging_delay import Carrier, SlowDoor
from averaging_training import make_model

from ganglion.averaging import server
from ganglion.averaging.average import ElasticAverage
from ganglion.simulator.averaging_costs import MessagePrice


@dataclass(frozen=True)
class ServerJob:
    """What the server must know of a centre: what a launcher would have set, and prices."""

    environment: Mapping[str, str]
    options: Mapping[str, Any]
    message_s: float
    byte_s: float
    num_parts: int


def launch_environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """Return what torchrun sets for the processes of one host."""
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": num_ranks,
        "MASTER_PORT": port,
    }
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(n) for name, n in numbers.items()}}


class OwnServer:
    """The server process as the worker sees it that started it; it ends with its input."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(self, job: ServerJob) -> None:
        """Let it serve a centre."""
        self._tell(asdict(job))

    def carried_s(self, begin_s: float, end_s: float) -> float:
        """Return what messages took in a span, once the centre has no workers any more."""
        self._tell([begin_s, end_s])
        assert self._process.stdout is not None, "it is a pipe"
        return float(json.loads(self._process.stdout.readline()))

    def _tell(self, what: Any) -> None:
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()


def serve(job: ServerJob) -> Carrier:
    """Serve a centre until all workers have left; return what carried its messages."""
    os.environ.update(job.environment)
    carrier = Carrier(MessagePrice(job.message_s, job.byte_s), job.num_parts)
    model = make_model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mock.patch.object(server, "Door", partial(SlowDoor, carrier=carrier)):
        ElasticAverage(model, optimizer, **job.options).serve()
    return carrier


def main() -> None:
    torch.set_num_threads(1)
    while line := sys.stdin.readline():
        carrier = serve(ServerJob(**json.loads(line)))
        begin_s, end_s = json.loads(sys.stdin.readline())
        print(json.dumps(carrier.carried_s(begin_s, end_s)), flush=True)


if __name__ == "__main__":
    main()
