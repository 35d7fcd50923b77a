"""Tiers by the names that plans and run files call them."""

from __future__ import annotations

from pathlib import Path

import torch

from ganglion.errors import ConfigError
from ganglion.execute.offload.disk import DiskTier
from ganglion.execute.offload.host import HostTier
from ganglion.execute.offload.tier import Tier


def open_tier(name: str, folder: Path, device: torch.device) -> Tier:
    """Return a new tier; its files go into `folder`, its moves to and from `device`."""
    if name == "disk":
        return DiskTier(folder, device)
    if name == "host":
        return HostTier(device)
    raise ConfigError(f'memory.offload = {name!r} is no tier: choose "none", "host" or "disk"')
