"""The measured matmul rate of this machine, and the operations of a model.

Both give the share of the machine's peak that a run reaches.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from ganglion.decide.plan import FP32
from ganglion.execute.comm import World
from ganglion.execute.models import LossFn

logger = logging.getLogger(__name__)


def machine_peak(
    world: World, device: torch.device, precision: str, budget_s: float = 0.1
) -> float:
    """Return the operations per second of all ranks together, multiplying at the same time."""
    is_half = precision != FP32 and device.type == "cuda"
    dtype = torch.bfloat16 if is_half else torch.float32
    size = 1024 if device.type == "cpu" else 8192
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    _multiply(left, right)
    world.barrier()
    best_s, end_s = float("inf"), time.perf_counter() + budget_s
    while time.perf_counter() < end_s:
        start_s = time.perf_counter()
        _multiply(left, right)
        best_s = min(best_s, time.perf_counter() - start_s)
    return float(world.gather_numbers([2.0 * size**3 / best_s]).sum())


def _multiply(left: Tensor, right: Tensor) -> None:
    float((left @ right)[0, 0])  # reading one element waits for the device


def count_flops(
    blocks: Mapping[str, nn.Module], loss_fn: LossFn, inputs: Tensor, targets: Tensor
) -> float | None:
    """Return the operations of forward and backward on these samples, counted without computing.

    The model runs on the meta device. Return None for a model that cannot run there; the share of
    the peak is then not shown.
    """
    counter = FlopCounterMode(display=False)
    try:
        with counter:
            hidden = inputs.to("meta")
            for block in blocks.values():
                hidden = functional_call(block, _meta_tensors(block), (hidden,))
            loss_fn(hidden, targets.to("meta")).backward()  # type: ignore[no-untyped-call]
    except Exception as error:  # a user's model may fail in any way on the meta device
        logger.warning("share of peak not shown: the model does not run without data (%s)", error)
        return None
    return float(counter.get_total_flops())


def _meta_tensors(block: nn.Module) -> dict[str, Tensor]:
    parameters = {
        name: torch.empty_like(p, device="meta").requires_grad_(p.requires_grad)
        for name, p in block.named_parameters()
    }
    buffers = {name: torch.empty_like(b, device="meta") for name, b in block.named_buffers()}
    return {**parameters, **buffers}
