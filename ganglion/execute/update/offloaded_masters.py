"""Master weights on a lower tier, beside the optimizer state: they move in the same buckets.

tier      masters, moments                     12 bytes a parameter with AdamW
slots     masters, moments of three buckets, wide gradients of one
device    weights and gradients in half        4 bytes a parameter
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ganglion.execute.gradients import GradientBuckets
from ganglion.execute.offload import MASTER, MasterWeights, Slot
from ganglion.execute.update.masters import OnMasters
from ganglion.execute.update.offloaded import StateOnTier, chunks_of
from ganglion.execute.update.optimizers import OptimizerFactory
from ganglion.execute.update.updating import Wait, all_there
from ganglion.execute.update.versions import WeightVersions


def masters_on_tier(state: StateOnTier) -> dict[str, nn.Parameter]:
    """Return masters of all parameters by name, not filled: they are the tier, not memory."""
    return {
        name: nn.Parameter(state.store.view(MASTER, number))
        for number, name in enumerate(state.names)
    }


class OffloadedMasterUpdate(OnMasters):
    """Masters that live on a tier, beside the state of their optimizers."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        masters: Mapping[str, nn.Parameter],
        factory: OptimizerFactory,
        buckets: GradientBuckets,
        state: StateOnTier,
        versions: WeightVersions | None = None,
    ) -> None:
        """Build optimizers for masters that `masters_on_tier` made of the same `state`."""
        super().__init__(parameters, masters, factory, versions, state)
        self._names = state.names
        self._next: Mapping[str, Tensor] = {}
        self._weights = MasterWeights(self._half, self._gradient)
        state.carry(self.optimizers, masters, self._weights, chunks_of(parameters, buckets))
        self._weights.shared = Slot(state.moved.slot_bytes, state.device)

    def step(
        self, buffers: Sequence[Tensor], factor: Tensor | None, wait: Wait = all_there
    ) -> None:
        """Widen gradients, update masters and round them to the next weights, by buckets."""
        self._weights.factor = factor
        self._next = self._parameters if self._versions is None else self._versions.open_next()
        self._state.update(wait)
        if self._versions is not None:
            self._versions.end_update()

    def gradients(self) -> Mapping[str, Tensor]:
        """Return the gradients of the last step widened anew: none were kept."""
        wide = {
            name: parameter.grad.to(torch.float32, copy=True)
            for name, parameter in self._parameters.items()
            if parameter.grad is not None
        }
        factor = self._weights.factor
        return wide if factor is None else {name: g.mul_(factor) for name, g in wide.items()}

    def tensors(self) -> Mapping[str, Sequence[Tensor]]:
        """Return masters and state on the tier, and what is in flight of them."""
        found, wide = self._state.tensors(), self._weights.shared
        assert wide is not None, "made with the update"
        return {**found, "buckets": [*found["buckets"], *wide.rooms()]}

    def _half(self, member: int) -> Tensor:
        return self._next[self._names[member]].detach()

    def _gradient(self, member: int) -> Tensor:
        gradient = self._parameters[self._names[member]].grad
        assert gradient is not None, "gradients live in flat memory"
        return gradient
