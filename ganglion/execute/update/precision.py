"""What a plan's precision does to tensors: which are stored in half, and what stays in fp32.

weights, gradients, activations    half precision ("bf16_master", "fp16_master")
masters, optimizer state, loss     fp32
norms with running statistics      fp32: a mean over a whole run cannot be kept in half
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ganglion.decide.plan import BF16_MASTER, FP16_MASTER, Plan
from ganglion.errors import ConfigError
from ganglion.execute.models import LossFn

_STORED = {BF16_MASTER: torch.bfloat16, FP16_MASTER: torch.float16}
_WIDENED = (torch.float32, torch.bfloat16, torch.float16)  # what an fp32 master can be made of


def as_input(tensor: Tensor, plan: Plan) -> Tensor:
    """Return data of a batch as the first block takes it: numbers in half, if it computes so."""
    if plan.has_masters and not plan.compute_fp32 and tensor.is_floating_point():
        return tensor.to(_STORED[plan.precision])
    return tensor


def wide(tensor: Tensor) -> Tensor:
    """Return a tensor in fp32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which a plan's precision computes."""
    if precision == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


class WideLoss(nn.Module):
    """A loss of outputs in half precision, computed in fp32."""

    def __init__(self, loss_fn: LossFn) -> None:
        """Take any loss; one that is a module stays visible as such."""
        super().__init__()
        self._loss_fn = loss_fn

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Widen the output, and return its loss."""
        return self._loss_fn(wide(output), target)


MakeMasters = Callable[[Mapping[str, nn.Parameter]], dict[str, nn.Parameter]]


def take_masters(
    modules: Iterable[nn.Module],
    parameters: Mapping[str, nn.Parameter],
    precision: str,
    make: MakeMasters | None = None,
    on_taken: Callable[[], None] = lambda: None,
) -> dict[str, nn.Parameter]:
    """Store parameters in half from now on; return fp32 masters of the trained ones by name.

    The masters are the values before rounding, in one flat piece of memory unless somebody else
    is to `make` them. Each parameter gives its own memory back in its turn, before `on_taken`.
    """
    stored, kept = _STORED[precision], _kept_wide(modules)
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    _check_dtypes(trained, precision)
    masters = (make or flat_parameters)(trained)
    for name, parameter in parameters.items():
        if name in masters:
            masters[name].data.copy_(parameter.data)
        if parameter.is_floating_point() and id(parameter) not in kept:
            parameter.data = parameter.data.to(stored)
        on_taken()
    return masters


def flat_parameters(like: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return fp32 parameters of these names and shapes, not filled, in one flat piece of memory."""
    if not like:
        return {}
    device = next(iter(like.values())).device
    flat = torch.empty(sum(p.numel() for p in like.values()), device=device)
    pieces = flat.split_with_sizes([p.numel() for p in like.values()])
    named = zip(like.items(), pieces, strict=True)
    return {name: nn.Parameter(piece.view(p.shape)) for (name, p), piece in named}


def _kept_wide(modules: Iterable[nn.Module]) -> set[int]:
    """Return the ids of parameters that stay in fp32."""
    norms = (m for module in modules for m in module.modules() if isinstance(m, _NormBase))
    return {id(p) for norm in norms for p in norm.parameters(recurse=False)}


def _check_dtypes(parameters: Mapping[str, nn.Parameter], precision: str) -> None:
    for name, parameter in parameters.items():
        if parameter.dtype not in _WIDENED:
            raise ConfigError(
                f"{name} is of {parameter.dtype}, but train.precision = {precision!r} keeps fp32 "
                f'masters: build the model in float32, or set train.precision = "fp32"'
            )
