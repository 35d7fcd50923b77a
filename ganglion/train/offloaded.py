"""An update whose optimizer state lives on a lower tier and comes in bucket by bucket.

The optimizers are the ones that the factory built, with their groups, rates and names; their state
are views of the tier. Weights stay on the device. The arithmetic is that of the resident update, to
the last bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from ganglion.gradients import GradientBuckets
from ganglion.offload import (
    Conveyor,
    Member,
    OptimizerFreight,
    ResidentWeights,
    StateStore,
    open_tier,
)
from ganglion.pipeline import ErrorFeedback, WeightVersions
from ganglion.trace import Recorder
from ganglion.train.optimizers import OptimizerFactory, build_optimizers
from ganglion.units import MIB

logger = logging.getLogger(__name__)
BUCKET_SIZE = 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadSettings:
    """How state is moved: where files of the disk tier go, and the elements of one bucket."""

    folder: Path = field(default_factory=Path)
    bucket_size: int = BUCKET_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class Carriage:
    """What an offloaded update needs beside parameters: a tier, and who looks on."""

    tier: str
    settings: OffloadSettings
    device: torch.device
    recorder: Recorder
    timeout_s: float


class OffloadedUpdate:
    """Optimizers on the parameters themselves, with their state on a tier."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        factory: OptimizerFactory,
        buckets: GradientBuckets,
        carriage: Carriage,
        versions: WeightVersions | None = None,
        feedback: ErrorFeedback | None = None,
    ) -> None:
        """Build optimizers for trainable `parameters`, whose gradients `buckets` reduce.

        With `versions` each step makes the next one, corrected by `feedback`.
        """
        self._parameters = parameters
        self._versions = versions
        self._feedback = feedback
        optimized = parameters if versions is None else versions.optimized
        self.optimizers = build_optimizers(factory, optimized) if optimized else []
        self._names, chunk_of = _in_order_of_reduction(parameters, buckets)
        templates = [optimized[name] for name in self._names]
        members = [
            Member(n, tuple(p.shape), p.dtype) for n, p in zip(self._names, templates, strict=True)
        ]
        tier = open_tier(carriage.tier, carriage.settings.folder, carriage.device)
        self._store = StateStore(tier, members)
        self._freight = OptimizerFreight(
            self.optimizers,
            members,
            templates,
            self._store,
            ResidentWeights(templates),
            carriage.settings.bucket_size,
            carriage.device,
        )
        self._chunk_of = [chunk_of[cut.slices[-1].member] for cut in self._freight.buckets]
        self._conveyor = Conveyor(
            self._freight, carriage.device, carriage.recorder, carriage.timeout_s
        )
        self._log()

    def begin(self) -> None:
        """Begin to read the state of the first buckets: an update will follow."""
        self._freight.prepare()
        self._conveyor.begin(self._chunk_of)

    def step(self, buffers: Sequence[Tensor], factor: Tensor | None) -> None:
        """Scale the gradients where they are, and update bucket by bucket."""
        if factor is not None:
            for buffer in buffers:
                buffer.mul_(factor)
        self._step(_is_there)

    def skip(self) -> None:
        """Let the next version, if there are versions, be the present one."""
        if self._versions is not None:
            self._versions.begin_update()
            self._versions.end_update()

    def weights(self) -> Mapping[str, Tensor]:
        """Return the parameters."""
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    def on_load(self) -> None:
        """Take state that was loaded to the tier, if it is not there already."""
        self._conveyor.cancel()
        self._freight.adopt()
        self._store.release()

    def on_saved(self) -> None:
        """Give back the memory that reading the state for a checkpoint took."""
        self._store.release()

    def room(self, name: str, entry: str) -> Tensor | None:
        """Return where a load should put an entry that is shaped like its parameter."""
        return self._freight.view(self._names.index(name), entry) if name in self._names else None

    def gradients(self) -> Mapping[str, Tensor]:
        """Return the gradients of the parameters."""
        named = self._parameters.items()
        return {name: p.grad for name, p in named if p.grad is not None}

    def close(self) -> None:
        """End the threads, and give back what the tier holds."""
        self._conveyor.close()
        self._store.close()

    def _step(self, wait_for_chunk: Callable[[int], None]) -> None:
        if self._versions is not None:
            self._versions.begin_update()
            self._versions.take_gradients()
        self.begin()
        self._conveyor.run(wait_for_chunk)
        self._freight.commit()
        if self._feedback is not None:
            self._feedback.correct()
        if self._versions is not None:
            self._versions.end_update()

    def _log(self) -> None:
        logger.info(
            "optimizer state on %s: %.1f MiB in %d buckets of at most %.1f MiB an entry",
            self._store.describe(),
            self._store.num_bytes / MIB,
            len(self._freight.buckets),
            self._freight.slot_bytes / MIB,
        )


def _in_order_of_reduction(
    parameters: Mapping[str, nn.Parameter], buckets: GradientBuckets
) -> tuple[list[str], list[int]]:
    """Return the names in the order in which their gradients are summed, and in which bucket."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    found = [
        (names[id(buckets.parameters[member])], number)
        for number, bucket in enumerate(buckets.layout)
        for member in bucket.members
    ]
    return [name for name, _ in found], [number for _, number in found]


def _is_there(chunk: int) -> None:
    """Wait for nothing: all gradients are summed."""
