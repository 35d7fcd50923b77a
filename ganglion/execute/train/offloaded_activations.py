"""Activations off the device, as a plan asks for them: where they go, and what is worth moving."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ganglion.decide.plan import Plan
from ganglion.execute.offload import MIN_BYTES, ActivationOffload, open_activation_tier


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSettings:
    """Where a file of activations goes, and the least bytes that are moved."""

    folder: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    min_bytes: int = MIN_BYTES


def offload_activations(
    plan: Plan, settings: ActivationSettings, device: torch.device, timeout_s: float
) -> ActivationOffload | None:
    """Return what moves the activations of this rank; None if they stay."""
    if plan.offload_activations == "none":
        return None
    tier = open_activation_tier(plan.offload_activations, settings.folder, device, timeout_s)
    return ActivationOffload(tier, min_bytes=settings.min_bytes)
