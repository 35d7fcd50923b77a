"""Build the update that a plan asks for, by precision and by the tier of the optimizer state.

Two steps, because gradients have the dtype of the weights: store the weights in the precision of
the plan, lay out the gradients, then make the update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ganglion.decide.plan import Plan
from ganglion.execute.gradients import GradientBuckets
from ganglion.execute.update.masters import MasterUpdate
from ganglion.execute.update.offloaded import (
    OffloadedMasterUpdate,
    OffloadedUpdate,
    StateOnTier,
    masters_on_tier,
)
from ganglion.execute.update.optimizers import OptimizerFactory
from ganglion.execute.update.precision import take_masters
from ganglion.execute.update.updating import PlainUpdate, Update
from ganglion.execute.update.versions import ErrorFeedback, WeightVersions
from ganglion.trace import Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """Trainable parameters of a replica or a stage as stored, with masters and tier, if any."""

    trainable: Mapping[str, nn.Parameter]
    masters: Mapping[str, nn.Parameter] | None
    state: StateOnTier | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateFactory:
    """Stores weights as a plan asks for, and makes their updates."""

    plan: Plan
    optimizer_factory: OptimizerFactory
    offload_dir: Path
    device: torch.device
    recorder: Recorder
    timeout_s: float

    def store(
        self, modules: Iterable[nn.Module], parameters: Mapping[str, nn.Parameter]
    ) -> StoredWeights:
        """Store the parameters of some modules in the precision of the plan."""
        trainable = {name: p for name, p in parameters.items() if p.requires_grad}
        state = self._state_on_tier(trainable) if self.plan.offload != "none" else None
        masters = None
        if self.plan.has_masters and state is None:
            masters = take_masters(modules, parameters, self.plan.precision)
        elif self.plan.has_masters and state is not None:
            masters = take_masters(
                modules,
                parameters,
                self.plan.precision,
                make=lambda trained: masters_on_tier(state),
                on_taken=state.store.release,
            )
        return StoredWeights(trainable=trainable, masters=masters, state=state)

    def make(
        self,
        stored: StoredWeights,
        buckets: GradientBuckets,
        versions: WeightVersions | None = None,
        feedback: ErrorFeedback | None = None,
    ) -> Update:
        """Return the update that moves the stored weights by the gradients in `buckets`."""
        trainable, masters, factory = stored.trainable, stored.masters, self.optimizer_factory
        if stored.state is None:
            if masters is None:
                return PlainUpdate(trainable, factory, versions, feedback)
            return MasterUpdate(trainable, masters, factory, versions)
        if masters is None:
            return OffloadedUpdate(trainable, factory, buckets, stored.state, versions, feedback)
        return OffloadedMasterUpdate(trainable, masters, factory, buckets, stored.state, versions)

    def _state_on_tier(self, trainable: Mapping[str, nn.Parameter]) -> StateOnTier:
        return StateOnTier(
            trainable,
            self.plan.offload,
            self.offload_dir,
            self.plan.bucket_size,
            self.device,
            self.recorder,
            self.timeout_s,
            dtype=torch.float32 if self.plan.has_masters else None,
        )
