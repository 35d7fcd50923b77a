"""Where the weights and gradients of a piece come from: the device, or a master in the slot."""

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
class Piece:
    """One slice of a bucket: which, of what member, in which slot."""

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
        """What an optimizer sees: the shape of the parameter, if the piece is all of it."""
        part = self.bucket.slices[self.number]
        size = part.stop - part.start
        return self.member.shape if size == self.member.num_elements else (size,)

    def of(self, whole: Tensor) -> Tensor:
        """Return the part of a tensor that is shaped like the member: a view."""
        if self.shape == self.member.shape:
            return whole  # as it is, also if it does not lie in one stretch
        part = self.bucket.slices[self.number]
        return whole.view(-1)[part.start : part.stop]

    def room(self, entry: str, slot: Slot | None = None) -> Tensor:
        """Return the room of an entry of it; in its own slot unless another is given."""
        found = (slot or self.slot).piece(entry, self.bucket, self.number, self.member)
        return found.view(self.shape)


class Weights(Protocol):
    """Gives the optimizer what it works on, and takes what it made."""

    @property
    def entries(self) -> tuple[str, ...]:
        """What is moved with the state."""

    def weight(self, piece: Piece) -> Tensor:
        """Return the weights of a piece, to be updated in place."""

    def gradient(self, piece: Piece) -> Tensor:
        """Return their gradients."""

    def put_back(self, piece: Piece) -> None:
        """Take note that the weights of a piece are updated."""


class ResidentWeights:
    """Weights that stay on the device: the optimizer's own parameters."""

    entries: tuple[str, ...] = ()

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take the parameters in the order of the members."""
        self._parameters = parameters

    def weight(self, piece: Piece) -> Tensor:
        """Return a view of the parameter."""
        return piece.of(self._parameters[piece.owner].detach())

    def gradient(self, piece: Piece) -> Tensor:
        """Return a view of its gradient."""
        gradient = self._parameters[piece.owner].grad
        assert gradient is not None, f"{piece.member.name} has no gradient"
        return piece.of(gradient)

    def put_back(self, piece: Piece) -> None:
        """Do nothing: the parameter itself was updated."""


class MasterWeights:
    """Half-precision weights on the device, which follow a master that moves with the state."""

    entries: tuple[str, ...] = (MASTER,)

    def __init__(self, halves: Callable[[int], Tensor], gradients: Callable[[int], Tensor]) -> None:
        """Take weights and gradients, by number of the member."""
        self._halves = halves
        self._gradients = gradients
        self.factor: Tensor | None = None
        # Wide gradients: one bucket is updated at a time, so one room serves all slots.
        self.shared: Slot | None = None

    def weight(self, piece: Piece) -> Tensor:
        """Return the master in the slot."""
        return piece.room(MASTER)

    def gradient(self, piece: Piece) -> Tensor:
        """Return the gradient in full precision, times the factor."""
        wide = piece.room(_WIDE, self.shared)
        wide.copy_(piece.of(self._gradients(piece.owner)))
        return wide if self.factor is None else wide.mul_(self.factor)

    def put_back(self, piece: Piece) -> None:
        """Let the half-precision weights follow."""
        piece.of(self._halves(piece.owner)).copy_(piece.room(MASTER))
