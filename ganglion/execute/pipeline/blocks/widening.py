"""Widening: weights stored in half precision, a block computed in fp32 while it runs.

For processors whose products in half precision are slow. A block runs with fp32 copies of its
parameters, and none of them outlives the block: what autograd would keep of a copy is kept as a
note of which part of which parameter it was, and is widened again when backward asks for it:

    forward    p (half) --widen--> copy ---> block        saved: (p, shape, strides, offset)
    backward   p (half) --widen--> copy ---> gradients    of the copy, rounded to that of p

The caller of backward has selected the weights of the forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from ganglion.execute.offload import Hooks


class WidenedCall:
    """Runs blocks in fp32, from parameters that are stored in half."""

    def __init__(self, leaves: Callable[[nn.Parameter], bool] = lambda parameter: False) -> None:
        """Leave some parameters to layers that widen them themselves."""
        self._leaves = leaves

    def __call__(self, block: nn.Module, hidden: Tensor, hooks: Hooks | None = None) -> Tensor:
        """Return what a block makes of its input, in fp32; what else is saved goes to `hooks`."""
        stored = {name: p for name, p in block.named_parameters() if self._is_narrow(p)}
        copies = {name: p.float() for name, p in stored.items()}
        owners = {_place(copy): stored[name] for name, copy in copies.items()}

        def pack(tensor: Tensor) -> object:
            owner = owners.get(_place(tensor))
            if owner is not None:
                return _Note.of(tensor, owner)
            return tensor if hooks is None else hooks.pack(tensor)

        def unpack(kept: Any) -> Tensor:
            if isinstance(kept, _Note):
                return kept.widened()
            found: Tensor = kept if hooks is None else hooks.unpack(kept)
            return found

        with saved_tensors_hooks(pack, unpack):
            output: Tensor = functional_call(block, copies, (_wide(hidden),))
        return _wide(output)

    def _is_narrow(self, parameter: nn.Parameter) -> bool:
        is_half = parameter.is_floating_point() and parameter.dtype.itemsize < 4
        return is_half and not self._leaves(parameter)


class _Note(NamedTuple):
    """Which part of a widened parameter a tensor was."""

    owner: nn.Parameter
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor, owner: nn.Parameter) -> _Note:
        return cls(owner, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()))

    def widened(self) -> Tensor:
        return self.owner.detach().float().as_strided(self.size, self.stride, self.offset)


def _place(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, which its views share."""
    return tensor.untyped_storage().data_ptr()


def _wide(value: Tensor) -> Tensor:
    """Widen what is passed between blocks; what is no tensor is passed as it is."""
    is_half = isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize < 4
    return value.float() if is_half else value
