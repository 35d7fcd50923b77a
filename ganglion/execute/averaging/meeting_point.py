"""Where workers begin together: at the first one's weights, or at the centre of those who know it.

| here are         | the centre is             | weights of new workers | of the others |
|------------------|---------------------------|------------------------|---------------|
| only new workers | the weights of the first  | the same               |               |
| some who trained | the newest that is known  | the centre             | their own     |

So a start, a loss and a newcomer are one thing. A new worker is never asked for the centre: its
random weights would become everybody's truth.
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


class Knowing(Protocol):
    """A method that has exchanged before."""

    def state_dict(self) -> State:
        """Return its state, in which are the centre and its version."""


class _Place(NamedTuple):
    layout: int
    numel: int
    terms: int
    knows: int
    version: int


def gather_around(packed: Packed, group: Group, old: Knowing | None, terms: str) -> State | None:
    """Bring the workers of `group` together; return what a method shall load, None at a start.

    `old` is what this worker exchanged by so far, with nothing in flight; None if it is new. All
    must have the same model and the same `terms`.
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


def _exchange(packed: Packed, group: Group, state: State | None, terms: str) -> list[_Place]:
    """Return where every member stands."""
    layout = zlib.crc32(f"{packed.names} {packed.numels} {packed.flat.dtype}".encode())
    version = -1 if state is None else int(state["version"]) - int(state.get("lag", 0))
    known = int(state is not None)
    own = torch.tensor([layout, packed.numel, zlib.crc32(terms.encode()), known, version])
    table = torch.empty(len(own) * group.size, dtype=own.dtype)
    group.all_gather(table, own).wait()
    return [_Place(*row) for row in table.view(group.size, -1).tolist()]


def _check_alike(packed: Packed, group: Group, places: list[_Place], terms: str) -> None:
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
    """Return the donor's centre and what belongs to it, on every member."""
    payload = None
    if group.index == donor:
        assert state is not None, "a donor knows the centre"
        file = io.BytesIO()
        torch.save({key: state[key] for key in ("center", *PORTABLE) if key in state}, file)
        payload = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    payload = broadcast_tensor(group, payload, donor, torch.device("cpu"))
    shared: State = torch.load(io.BytesIO(payload.numpy().tobytes()), weights_only=True)
    return shared
