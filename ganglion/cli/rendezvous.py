"""The rendezvous of processes that one launcher starts on one host: there is nobody to wait for.

torch's own rendezvous for a free port ("c10d") is made for many hosts: it waits for a random time
and writes a record with the whole call stack at each of its steps, which takes half a second here.
"""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

LOCAL_RENDEZVOUS = "ganglion_local"
_HOST = "localhost"
_TIMEOUT_S = 60


class LocalRendezvous(StaticTCPRendezvous):
    """One host whose store is open before its port is known to anyone, so that nobody takes it."""

    def __init__(self, run_id: str) -> None:
        """Open the store on a free port."""
        store = TCPStore(_HOST, 0, is_master=True, timeout=timedelta(seconds=_TIMEOUT_S))
        super().__init__(_HOST, store.port, rank=0, world_size=1, run_id=run_id, timeout=_TIMEOUT_S)
        self._store = store

    def get_backend(self) -> str:
        """Return the name under which torch elastic knows this class."""
        return LOCAL_RENDEZVOUS


def register_local_rendezvous() -> None:
    """Make `LOCAL_RENDEZVOUS` known to torch elastic."""
    rendezvous_handler_registry.register(LOCAL_RENDEZVOUS, _create)


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return LocalRendezvous(parameters.run_id)
