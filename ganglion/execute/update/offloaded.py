"""Updates whose optimizer state lives on a lower tier and comes in bucket by bucket.

The optimizers are those of the factory, with their groups, rates and names; their state are views
of the tier. The results equal those of the resident update to the last bit. Buckets are updated in
the order in which backward finishes gradients, the last layers first; a bucket waits for its own
gradients alone if nothing (clipping, a loss scale) needs all of them. Masters move in the same
buckets:

    tier      masters, moments                     12 bytes a parameter with AdamW
    slots     masters, moments of three buckets, wide gradients of one
    device    weights and gradients in half        4 bytes a parameter
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ganglion.execute.gradients import GradientBuckets
from ganglion.execute.offload import (
    MASTER,
    BucketMover,
    MasterWeights,
    Member,
    OptimizerBuckets,
    ResidentWeights,
    Slot,
    StateStore,
    Weights,
    open_tier,
)
from ganglion.execute.update.masters import OnMasters
from ganglion.execute.update.optimizers import OptimizerFactory
from ganglion.execute.update.updating import (
    PlainUpdate,
    ResidentState,
    Wait,
    all_there,
    state_tensors,
)
from ganglion.execute.update.versions import ErrorFeedback, WeightVersions
from ganglion.trace import Recorder
from ganglion.units import MIB

logger = logging.getLogger(__name__)


class StateOnTier(ResidentState):
    """The state of some parameters on a tier of their own, and what moves it."""

    is_gradual = True

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        tier: str,
        folder: Path,
        bucket_size: int,
        device: torch.device,
        recorder: Recorder,
        timeout_s: float,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Open the tier for trainable `parameters`, moved in buckets of `bucket_size` elements.

        The disk tier has its file in `folder`. `dtype` is that of the state, if not theirs.
        """
        self.names = list(parameters)[::-1]
        self.members = [
            Member(name, tuple(parameters[name].shape), dtype or parameters[name].dtype)
            for name in self.names
        ]
        self.device = device
        self._bucket_size = bucket_size
        self._recorder = recorder
        self._timeout_s = timeout_s
        self.store = StateStore(open_tier(tier, folder, device), self.members)

    def carry(
        self,
        optimizers: Sequence[Optimizer],
        templates: Mapping[str, nn.Parameter],
        weights: Weights,
        chunk_of: Mapping[str, int],
    ) -> None:
        """Move the state of optimizers from now on.

        `templates` are their parameters, `chunk_of` gives the bucket that sums each gradient.
        """
        self._optimizers = optimizers
        self.moved = OptimizerBuckets(
            optimizers,
            self.members,
            [templates[name] for name in self.names],
            self.store,
            weights,
            self._bucket_size,
            self.device,
        )
        needed = [
            max(chunk_of[self.names[part.member]] for part in bucket.slices)
            for bucket in self.moved.buckets
        ]
        # A bucket is updated after those before it, so it needs what they need.
        self._chunk_of = [max(needed[: number + 1]) for number in range(len(needed))]
        self._mover = BucketMover(self.moved, self.device, self._recorder, self._timeout_s)
        logger.info(
            "optimizer state on %s: %.1f MiB, moved in buckets of %.1f MiB an entry (%d of them)",
            self.store.describe(),
            self.store.num_bytes / MIB,
            self.moved.slot_bytes / MIB,
            len(self.moved.buckets),
        )

    def begin(self) -> None:
        """Begin to read the first buckets, unless that is done."""
        if not self._mover.is_begun:
            self.moved.prepare()
            self._mover.begin(self._chunk_of)

    def update(self, wait: Wait) -> None:
        """Update all buckets; `wait(n)` returns when a bucket of gradients holds its sums."""
        self.begin()
        self._mover.run(wait)
        self.moved.commit()

    def check(self) -> None:
        """Refuse to go on, or to be saved, after an update that failed half-way."""
        self._mover.check()

    def on_load(self) -> None:
        """Take state that was loaded to the tier, if it is not there already."""
        self._mover.cancel()
        self.moved.adopt()
        self.store.release()

    def on_saved(self) -> None:
        """Give back the memory that reading the state took."""
        self.store.release()

    def room(self, name: str, entry: str) -> Tensor | None:
        """Return where a load should put an entry that is shaped like its parameter."""
        return self.moved.view(self.names.index(name), entry) if name in self.names else None

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return the tier, the buckets in flight, and what stays in memory, by category."""
        return {
            "lower_tier": self.store.tensors(),
            "buckets": self.moved.rooms(),
            "moments": state_tensors(self._optimizers),
        }

    def close(self) -> None:
        """End the threads, and give back what the tier holds."""
        self._mover.close()
        self.store.close()


class OffloadedUpdate(PlainUpdate):
    """Optimizers on the parameters themselves, with their state on a tier."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        factory: OptimizerFactory,
        buckets: GradientBuckets,
        state: StateOnTier,
        versions: WeightVersions | None = None,
        feedback: ErrorFeedback | None = None,
    ) -> None:
        """Build optimizers for trainable `parameters`, whose gradients `buckets` reduce.

        With `versions` each step makes the next one, corrected by `feedback`.
        """
        super().__init__(parameters, factory, versions, feedback, state)
        weights = ResidentWeights([self._optimized[name] for name in state.names])
        state.carry(self.optimizers, self._optimized, weights, chunks_of(parameters, buckets))


def chunks_of(parameters: Mapping[str, nn.Parameter], buckets: GradientBuckets) -> dict[str, int]:
    """Return in which bucket the gradient of each parameter is summed, by its name."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    return {
        names[id(buckets.parameters[member])]: number
        for number, bucket in enumerate(buckets.layout)
        for member in bucket.members
    }


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
