"""The server process of part `wall`: it serves one centre after the other, as it is told.

    told      a ServerJob of one centre     then, when its workers have left, a span of time
    tells                                   the seconds of messages in that span

The centre is that of `ElasticAverage(..., servers=1)`, whose door is slow.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch

from benchmarks.averaging.delay import Carrier, SlowListener
from benchmarks.averaging.training import make_model
from ganglion.decide.simulator.averaging.costs import MessagePrice
from ganglion.execute.averaging.average import ElasticAverage
from ganglion.execute.averaging.served import server


@dataclass(frozen=True)
class ServerJob:
    """What the server must know of a centre: what a launcher would have set, and the price."""

    environment: Mapping[str, str]
    options: Mapping[str, Any]
    price: MessagePrice
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
    """The server process as a worker sees it; workers get a copy that talks to the same one."""

    def __init__(self, pipe: Connection, timeout_s: float) -> None:
        self._pipe, self._timeout_s = pipe, timeout_s

    @classmethod
    def start(cls, preloaded: Sequence[str], timeout_s: float) -> OwnServer:
        """Start the process, which ends with this one, as a fork of one that has imported all."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(preloaded))
        ours, theirs = context.Pipe()
        context.Process(target=_serve_all, args=(theirs,), daemon=True).start()
        theirs.close()
        return cls(ours, timeout_s)

    def begin(self, job: ServerJob) -> None:
        """Let it serve a centre."""
        self._pipe.send(job)

    def carried_s(self, begin_s: float, end_s: float) -> float:
        """Return what messages took in a span, once the centre has no workers any more."""
        self._pipe.send((begin_s, end_s))
        if not self._pipe.poll(self._timeout_s):
            raise TimeoutError(f"the server still serves after {self._timeout_s:g} s")
        return float(self._pipe.recv())


def _serve_all(pipe: Connection) -> None:
    torch.set_num_threads(1)
    try:
        while True:
            carrier = _serve(pipe.recv())
            pipe.send(carrier.carried_s(*pipe.recv()))
    except EOFError:
        return  # nobody has centres to serve any more


def _serve(job: ServerJob) -> Carrier:
    """Serve a centre until all workers have left; return what carried its messages."""
    os.environ.update(job.environment)
    carrier = Carrier(job.price, job.num_parts)
    model = make_model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mock.patch.object(server, "CenterListener", partial(SlowListener, carrier=carrier)):
        ElasticAverage(model, optimizer, **job.options).serve()
    return carrier
