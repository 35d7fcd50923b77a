"""Which update a plan calls for: by precision, and by where optimizer state lives.

Two steps, because gradients take the dtype of the weights: first the weights are stored as the
precision wants it, then gradients are laid out, then the update is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ganglion.execute.gradients import GradientBuckets
from ganglion.execute.train.parts import RunRequest
from ganglion.execute.update import (
    ErrorFeedback,
    MasterUpdate,
    OffloadedMasterUpdate,
    OffloadedUpdate,
    PlainUpdate,
    StateOnTier,
    Update,
    WeightVersions,
    masters_on_tier,
    take_masters,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Trainable parameters of a part as they are stored; their masters and tier, if any."""

    trainable: Mapping[str, nn.Parameter]
    masters: Mapping[str, nn.Parameter] | None
    state: StateOnTier | None


def store_weights(
    request: RunRequest, modules: Iterable[nn.Module], parameters: Mapping[str, nn.Parameter]
) -> Stored:
    """Store the parameters of some modules as the plan's precision wants it."""
    trainable = {name: p for name, p in parameters.items() if p.requires_grad}
    state = _state_on_tier(request, trainable) if request.plan.offload != "none" else None
    masters = None
    if request.plan.has_masters and state is None:
        masters = take_masters(modules, parameters, request.plan.precision)
    elif request.plan.has_masters and state is not None:
        masters = take_masters(
            modules,
            parameters,
            request.plan.precision,
            make=lambda trained: masters_on_tier(state),
            on_taken=state.store.release,
        )
    return Stored(trainable=trainable, masters=masters, state=state)


def make_update(
    request: RunRequest,
    stored: Stored,
    buckets: GradientBuckets,
    versions: WeightVersions | None = None,
    feedback: ErrorFeedback | None = None,
) -> Update:
    """Return what moves the stored weights by the gradients in `buckets`."""
    trainable, masters, factory = stored.trainable, stored.masters, request.optimizer_factory
    if stored.state is None:
        if masters is None:
            return PlainUpdate(trainable, factory, versions, feedback)
        return MasterUpdate(trainable, masters, factory, versions)
    if masters is None:
        return OffloadedUpdate(trainable, factory, buckets, stored.state, versions, feedback)
    return OffloadedMasterUpdate(trainable, masters, factory, buckets, stored.state, versions)


def _state_on_tier(request: RunRequest, trainable: Mapping[str, nn.Parameter]) -> StateOnTier:
    return StateOnTier(
        trainable,
        request.plan.offload,
        request.offload,
        request.device,
        request.recorder,
        request.timeout_s,
        dtype=torch.float32 if request.plan.has_masters else None,
    )
