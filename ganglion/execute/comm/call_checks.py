"""What may be asked of a collective whose sums Ganglion takes itself: shared memory and MPI."""

from __future__ import annotations

import torch
from torch import Tensor

from ganglion.errors import ProtocolError
from ganglion.execute.comm.calls import DTYPES
from ganglion.execute.comm.collectives import MAX, SUM

_CARRIED = frozenset(DTYPES)
_OPS = ("", SUM, MAX)


def flattened(tensor: Tensor, carrier: str) -> Tensor:
    """Return a flat view of a tensor; ProtocolError if `carrier` cannot carry it."""
    if not (tensor.is_cpu and tensor.dtype in _CARRIED and tensor.is_contiguous()):
        raise ProtocolError(
            f"{carrier} cannot carry a tensor of {tensor.dtype}, {tuple(tensor.shape)}, strides "
            f"{tensor.stride()}, on {tensor.device}: give it a contiguous one on the CPU with a "
            f"common dtype"
        )
    flat = tensor.detach()
    return flat if flat.dim() == 1 else flat.view(-1)


def check_options(
    kind: str, ranks: tuple[int, ...], op: str, root: int, dtype: torch.dtype
) -> None:
    """Raise ProtocolError unless `ranks` can do a collective of `kind` in this way."""
    if op not in _OPS or not 0 <= root < len(ranks) or (op and dtype == torch.bool):
        raise ProtocolError(
            f"{kind} of ranks {list(ranks)} cannot have op {op!r}, root {root} and {dtype}: ops "
            f"are {SUM!r} and {MAX!r}, not of bool, and roots are positions 0 to {len(ranks) - 1}"
        )


def check_sizes(kind: str, ranks: tuple[int, ...], whole: Tensor, part: Tensor) -> None:
    """Raise ProtocolError unless `whole` has one part for each of `ranks`."""
    if whole.numel() != part.numel() * len(ranks) or whole.dtype != part.dtype:
        raise ProtocolError(
            f"{kind} of ranks {list(ranks)} cannot join {part.numel()} {part.dtype} and "
            f"{whole.numel()} {whole.dtype}: the whole must be {len(ranks)} times the part, of "
            f"one dtype"
        )
