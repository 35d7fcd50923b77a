"""The state of optimizers by buckets: read state, step over slices, write state back.

State belongs to an optimizer's own parameters, its templates: `optimizer.state[p]["exp_avg"]` is
always a view of the tier, so that saving and loading see what updates see. Entries of other shapes,
such as counts of steps, stay in memory; each slice steps with a copy of them, and the last copies
are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ganglion.decide.schedules.buckets import NUM_SLOTS, UpdateBucket, cut_update
from ganglion.execute.offload.sliced_optimizer import (
    Named,
    State,
    copied,
    foreseen_entries,
    is_elementwise,
    is_moved,
    over_pieces,
    own_numbers,
    settings,
)
from ganglion.execute.offload.store import Member, Slot, StateStore
from ganglion.execute.offload.weights import BucketSlice, Weights


class OptimizerBuckets:
    """The state of some optimizers, by buckets."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        members: Sequence[Member],
        templates: Sequence[nn.Parameter],
        store: StateStore,
        weights: Weights,
        bucket_size: int,
        device: torch.device,
    ) -> None:
        """Cut the parameters of some optimizers, `templates`, described by `members`."""
        self._optimizers = optimizers
        self._members = members
        self._store = store
        self._weights = weights
        self._device = device
        self._templates = templates
        places = _places(optimizers)
        self._at = [places[id(template)] for template in templates]
        self.buckets = self._cut(bucket_size)
        sizes = [store.bucket_bytes(bucket) for bucket in self.buckets]
        self.slot_bytes = max(sizes, default=0)
        self._slots = [Slot(self.slot_bytes, device) for _ in range(NUM_SLOTS)]
        self._views: dict[tuple[int, str], Tensor] = {}
        self._present: list[tuple[str, ...]] = []
        self._written: dict[int, list[str]] = {}
        self._fresh: dict[int, State] = {}
        # What the copies of optimizers count in themselves and in their groups.
        self._own: dict[int, State] = {}
        self._settings: dict[tuple[int, int], State] = {}
        for optimizer in optimizers:
            for entry in foreseen_entries(optimizer):
                store.reserve(entry)
        self.adopt()

    # --- around an update ----------------------------------------------------------------------

    def prepare(self) -> None:
        """List the entries to read for the next update."""
        self.adopt()
        self._present = []
        for bucket in self.buckets:
            entries = dict.fromkeys(self._weights.entries)
            for part in bucket.slices:
                state = self._state(part.member)
                template = self._templates[part.member]
                entries |= dict.fromkeys(e for e, v in state.items() if is_moved(e, v, template))
            self._present.append(tuple(entries))

    def commit(self) -> None:
        """Store the state after an update in the optimizers, once all buckets are written."""
        for member, fresh in self._fresh.items():
            self._state(member).update(fresh)
        for number, own in self._own.items():
            self._optimizers[number].__dict__.update(own)
        for (number, group), changed in self._settings.items():
            self._optimizers[number].param_groups[group].update(changed)
        self._fresh, self._own, self._settings = {}, {}, {}

    def adopt(self) -> None:
        """Move state to the tier that a constructor or a load has made."""
        is_new = False
        for number, template in enumerate(self._templates):
            state = self._state(number)
            for entry, value in state.items():
                is_ours = value is self._views.get((number, entry))
                if is_moved(entry, value, template) and not is_ours:
                    state[entry] = self.view(number, entry).copy_(value)
                    is_new = True
        if is_new:
            self._store.release()

    def view(self, member: int, entry: str) -> Tensor:
        """Return the one view of an entry on the tier."""
        key = (member, entry)
        if key not in self._views:
            self._views[key] = self._store.view(entry, member)
        return self._views[key]

    def rooms(self) -> list[Tensor]:
        """Return the memory of the slots."""
        return [room for slot in self._slots for room in slot.rooms()]

    # --- moves ---------------------------------------------------------------------------------

    def read(self, bucket: int, slot: int) -> int:
        """Read the state of a bucket into a slot; return the bytes moved."""
        return sum(
            self._store.read(entry, self.buckets[bucket], self._slots[slot].room(entry))
            for entry in self._present[bucket]
        )

    def write(self, bucket: int, slot: int) -> int:
        """Write the state of a bucket back; return the bytes moved."""
        return sum(
            self._store.write(entry, self.buckets[bucket], self._slots[slot].room(entry))
            for entry in self._written.pop(bucket)
        )

    def update(self, bucket: int, slot: int) -> None:
        """Step every optimizer over its slices of a bucket."""
        cut, room = self.buckets[bucket], self._slots[slot]
        pieces = [
            BucketSlice(cut, n, self._members[s.member], room) for n, s in enumerate(cut.slices)
        ]
        written = dict.fromkeys(self._weights.entries)
        for optimizer, groups in self._dealt(pieces).items():
            written |= dict.fromkeys(self._step(optimizer, groups))
        for piece in pieces:
            self._weights.put_back(piece)
        self._written[bucket] = list(written)

    def describe(self, bucket: int) -> str:
        """Return the name of a bucket, with its parameters."""
        names = [self._members[part.member].name for part in self.buckets[bucket].slices]
        last = f" to {names[-1]}" if len(names) > 1 else ""
        return f"bucket {bucket} of {len(self.buckets)} ({names[0]}{last})"

    # --- parts ---------------------------------------------------------------------------------

    def _step(self, optimizer: int, groups: Mapping[int, Sequence[BucketSlice]]) -> list[str]:
        """Step one optimizer over its slices; return the entries to write back."""
        made: list[tuple[BucketSlice, nn.Parameter]] = []
        state: dict[nn.Parameter, State] = {}
        parameters: dict[int, list[Named]] = {}
        for group, pieces in groups.items():
            for piece in pieces:
                parameter = self._parameter(piece)
                state[parameter] = self._piece_state(piece)
                name = self._members[piece.owner].name
                parameters.setdefault(group, []).append((name, parameter))
                made.append((piece, parameter))
        copy = over_pieces(self._optimizers[optimizer], parameters, state)
        copy.step()
        self._own[optimizer] = own_numbers(copy)
        for group, changed in zip(groups, copy.param_groups, strict=True):
            self._settings[optimizer, group] = settings(changed)
        return [e for piece, p in made for e in self._keep(piece, p, copy.state.get(p, {}))]

    def _parameter(self, piece: BucketSlice) -> nn.Parameter:
        parameter = nn.Parameter(self._weights.weight(piece))
        parameter.grad = self._weights.gradient(piece)
        return parameter

    def _piece_state(self, piece: BucketSlice) -> State:
        """Return the state of a slice: from the slot, and copies of entries in memory."""
        template = self._templates[piece.owner]
        return {
            entry: piece.room(entry)
            if is_moved(entry, value, template)
            else self._in_memory(piece, value)
            for entry, value in self._state(piece.owner).items()
        }

    def _in_memory(self, piece: BucketSlice, value: object) -> object:
        """Return a copy of an entry that is not moved, on the device that the optimizer needs."""
        optimizer, number = self._at[piece.owner]
        group = self._optimizers[optimizer].param_groups[number]
        # Fused updates need their counts on the GPU, but a load makes them on the host.
        on_device = group.get("fused") or group.get("capturable")
        if on_device and isinstance(value, Tensor):
            return value.to(self._device, copy=True)
        return copied(value)

    def _keep(self, piece: BucketSlice, parameter: nn.Parameter, state: State) -> list[str]:
        """Keep the state of a slice after its step; return which entries are in the slot."""
        moved = []
        fresh = self._fresh.setdefault(piece.owner, {})
        for entry, value in state.items():
            if not is_moved(entry, value, parameter):
                fresh[entry] = value
                continue
            room = piece.room(entry)
            if value.data_ptr() != room.data_ptr():  # made just now
                room.copy_(value)
            fresh[entry] = self.view(piece.owner, entry)
            moved.append(entry)
        return moved

    def _state(self, member: int) -> State:
        optimizer = self._optimizers[self._at[member][0]]
        found: State = optimizer.state[self._templates[member]]
        return found

    def _dealt(self, pieces: Sequence[BucketSlice]) -> dict[int, dict[int, list[BucketSlice]]]:
        """Return slices by the numbers of their optimizer and its group."""
        dealt: dict[int, dict[int, list[BucketSlice]]] = {}
        for piece in pieces:
            optimizer, group = self._at[piece.owner]
            dealt.setdefault(optimizer, {}).setdefault(group, []).append(piece)
        return dealt

    def _cut(self, bucket_size: int) -> tuple[UpdateBucket, ...]:
        divisible = [
            is_elementwise(self._optimizers[optimizer]) and template.is_contiguous()
            for (optimizer, _), template in zip(self._at, self._templates, strict=True)
        ]
        sizes = [member.num_elements for member in self._members]
        return cut_update(sizes, divisible, [m.dtype for m in self._members], bucket_size)


def _places(optimizers: Sequence[Optimizer]) -> dict[int, tuple[int, int]]:
    """Return the numbers of optimizer and group of every parameter, by its id."""
    return {
        id(parameter): (number, group_number)
        for number, optimizer in enumerate(optimizers)
        for group_number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
