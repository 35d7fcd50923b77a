"""The common start of workers: the weights of the first, or the newest known centre.

| workers          | centre                    | weights of new workers | of the others |
|------------------|---------------------------|------------------------|---------------|
| all are new      | the weights of the first  | the same               |               |
| some have trained | the newest that is known | the centre             | their own     |

So a start, a loss and a newcomer are handled alike. A new worker never provides the centre: its
random weights would spread to all.
"""

from __future__ import annotations

import io
import zlib
from typing import NamedTuple, Protocol

import torch

from ganglion.errors import ConfigError
from ganglion.execute.averaging.methods import Packed, State
from ganglion.execute.averaging.saved import PORTABLE
from ganglion.execute.comm import Group, broadcast_tensor


class TrainedMethod(Protocol):
    """A method that has exchanged before."""

    def state_dict(self) -> State:
        """Return the state, with the centre and its version."""


class _Record(NamedTuple):
    layout: int
    numel: int
    terms: int
    knows: int
    version: int


def common_start(
    packed: Packed, group: Group, old: TrainedMethod | None, terms: str
) -> State | None:
    """Agree on a start with the workers of `group`; return the state to load, None if all are new.

    `old` is the method of this worker so far, with nothing in flight; None if it is new. Raise
    ConfigError unless all workers have the same model and the same `terms`.
    """
    state = None if old is None else old.state_dict()
    places = _exchange(packed, group, state, terms)
    _check_alike(packed, group, places, terms)
    if not any(place.knows for place in places):
        group.broadcast(packed.gather(), 0).wait()
        packed.scatter()
        return None
    donor = max(range(len(places)), key=lambda i: (places[i].knows, places[i].version, -i))
    shared = _share(group, donor, state)
    if state is None:
        packed.gather().copy_(shared["center"])
        packed.scatter()
    return {**shared, "sums": state["sums"]} if state is not None and "sums" in state else shared


def _exchange(packed: Packed, group: Group, state: State | None, terms: str) -> list[_Record]:
    """Return the record of every member."""
    layout = zlib.crc32(f"{packed.names} {packed.numels} {packed.flat.dtype}".encode())
    version = -1 if state is None else int(state["version"]) - int(state.get("lag", 0))
    known = int(state is not None)
    own = torch.tensor([layout, packed.numel, zlib.crc32(terms.encode()), known, version])
    table = torch.empty(len(own) * group.size, dtype=own.dtype)
    group.all_gather(table, own).wait()
    return [_Record(*row) for row in table.view(group.size, -1).tolist()]


def _check_alike(packed: Packed, group: Group, places: list[_Record], terms: str) -> None:
    own = places[group.index]
    for rank, place in zip(group.ranks, places, strict=True):
        if (place.layout, place.numel) != (own.layout, own.numel):
            raise ConfigError(
                f"this worker packs {own.numel} elements of {len(packed.names)} tensors, rank "
                f"{rank} packs {place.numel} or others: build the same model on all workers"
            )
        if place.terms != own.terms:
            raise ConfigError(
                f"rank {rank} averages with other arguments than this worker ({terms}): give "
                f"ElasticAverage the same on all workers"
            )


def _share(group: Group, donor: int, state: State | None) -> State:
    """Return the donor's centre and its portable state, on every member."""
    payload = None
    if group.index == donor:
        assert state is not None, "a donor knows the centre"
        file = io.BytesIO()
        torch.save({key: state[key] for key in ("center", *PORTABLE) if key in state}, file)
        payload = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    payload = broadcast_tensor(group, payload, donor, torch.device("cpu"))
    shared: State = torch.load(io.BytesIO(payload.numpy().tobytes()), weights_only=True)
    return shared
