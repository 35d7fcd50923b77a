"""The weights and gradients of a slice: on the device, or a master in the slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from ganglion.decide.schedules.buckets import UpdateBucket
from ganglion.execute.offload.store import Member, Slot

MASTER = "master"
_WIDE = "gradient"


@dataclass(frozen=True, slots=True)
class BucketSlice:
    """One slice of a bucket, with its member and its slot."""

    bucket: UpdateBucket
    number: int
    member: Member
    slot: Slot

    @property
    def owner(self) -> int:
        """The number of the member that it belongs to."""
        return self.bucket.slices[self.number].member

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape an optimizer sees: that of the parameter, if the slice is all of it."""
        part = self.bucket.slices[self.number]
        size = part.stop - part.start
        return self.member.shape if size == self.member.num_elements else (size,)

    def of(self, whole: Tensor) -> Tensor:
        """Return this slice of a tensor that is shaped like the member, as a view."""
        if self.shape == self.member.shape:
            return whole  # also if it is not contiguous
        part = self.bucket.slices[self.number]
        return whole.view(-1)[part.start : part.stop]

    def room(self, entry: str, slot: Slot | None = None) -> Tensor:
        """Return the memory of an entry, in its own slot unless another is given."""
        found = (slot or self.slot).piece(entry, self.bucket, self.number, self.member)
        return found.view(self.shape)


class Weights(Protocol):
    """Gives an optimizer weights and gradients, and stores the updated weights."""

    @property
    def entries(self) -> tuple[str, ...]:
        """The entries that are moved with the state."""

    def weight(self, piece: BucketSlice) -> Tensor:
        """Return the weights of a slice, to be updated in place."""

    def gradient(self, piece: BucketSlice) -> Tensor:
        """Return their gradients."""

    def put_back(self, piece: BucketSlice) -> None:
        """Store the updated weights of a slice."""


class ResidentWeights:
    """Weights that stay on the device: the optimizer's own parameters."""

    entries: tuple[str, ...] = ()

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take the parameters in the order of the members."""
        self._parameters = parameters

    def weight(self, piece: BucketSlice) -> Tensor:
        """Return a view of the parameter."""
        return piece.of(self._parameters[piece.owner].detach())

    def gradient(self, piece: BucketSlice) -> Tensor:
        """Return a view of its gradient."""
        gradient = self._parameters[piece.owner].grad
        assert gradient is not None, f"{piece.member.name} has no gradient"
        return piece.of(gradient)

    def put_back(self, piece: BucketSlice) -> None:
        """Do nothing: the parameter itself was updated."""


class MasterWeights:
    """Half-precision weights on the device, with a master that moves with the state."""

    entries: tuple[str, ...] = (MASTER,)

    def __init__(self, halves: Callable[[int], Tensor], gradients: Callable[[int], Tensor]) -> None:
        """Take weights and gradients, by number of the member."""
        self._halves = halves
        self._gradients = gradients
        self.factor: Tensor | None = None
        # Wide gradients: one bucket is updated at a time, so one room serves all slots.
        self.shared: Slot | None = None

    def weight(self, piece: BucketSlice) -> Tensor:
        """Return the master in the slot."""
        return piece.room(MASTER)

    def gradient(self, piece: BucketSlice) -> Tensor:
        """Return the gradient in full precision, times the factor."""
        wide = piece.room(_WIDE, self.shared)
        wide.copy_(piece.of(self._gradients(piece.owner)))
        return wide if self.factor is None else wide.mul_(self.factor)

    def put_back(self, piece: BucketSlice) -> None:
        """Copy the master to the half-precision weights."""
        piece.of(self._halves(piece.owner)).copy_(piece.room(MASTER))
