"""The host tier: memory of the machine for the state of a GPU, pinned so that copies run beside it.

For a model that computes on the CPU it is the same memory: allowed, for tests and comparisons, but
it frees nothing.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from ganglion.execute.offload.tier import page_buffer

logger = logging.getLogger(__name__)
_HOST = torch.device("cpu")


class HostTier:
    """Pinned memory if the device is a GPU, plain memory if it is not."""

    def __init__(self, device: torch.device) -> None:
        """Hold nothing yet."""
        self._pins = device.type == "cuda"
        self._regions: list[HostRegion] = []
        if device.type == "cpu":
            logger.warning(
                'memory.offload = "host" frees nothing here: the model computes on the CPU, in '
                'the same memory; "disk" would free it'
            )

    @property
    def num_bytes(self) -> int:
        """How many bytes are reserved."""
        return sum(region.num_bytes for region in self._regions)

    def reserve(self, num_bytes: int) -> HostRegion:
        """Return a new region, zeros as in a new file."""
        region = HostRegion(page_buffer(num_bytes, _HOST, pinned=self._pins).zero_())
        self._regions.append(region)
        return region

    def describe(self) -> str:
        """Say what it is."""
        return "pinned host memory" if self._pins else "host memory"

    def close(self) -> None:
        """Let go of the memory."""
        self._regions.clear()


class HostRegion:
    """A flat tensor of bytes."""

    def __init__(self, data: Tensor) -> None:
        """Hold `data`."""
        self._data = data
        self.num_bytes = data.numel()

    def read_into(self, start: int, out: Tensor) -> None:
        """Copy to the device, on the stream of the caller."""
        out.copy_(self._data[start : start + out.numel()], non_blocking=True)

    def write_from(self, start: int, source: Tensor) -> None:
        """Copy from the device, on the stream of the caller."""
        self._data[start : start + source.numel()].copy_(source, non_blocking=True)

    def tensor(self) -> Tensor:
        """Return the memory itself."""
        return self._data

    def release(self) -> None:
        """Do nothing: the memory is the tier."""
