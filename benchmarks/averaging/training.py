"""The arithmetic of averaging, done in one process in the order that the virtual clock gives.

Accuracy is a matter of the order of events, and time a matter of the clock, so both are exact on
any machine: workers are vectors, and a gradient is computed when its event has its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ganglion.decide.shapes import ConvShape
from ganglion.decide.simulator.averaging.methods import METHODS
from ganglion.decide.simulator.averaging.result import (
    EXCHANGE,
    GATHER,
    PUSH,
    READ,
    REDUCE,
    STEP,
    WRITE,
    AveragingEvent,
)
from ganglion.execute.averaging.methods.method import elastic_force
from ganglion.execute.averaging.methods.packed import Packed
from ganglion.execute.averaging.served.rules import Additive, Elastic
from ganglion.execute.data.idx import find_idx_folder, find_idx_pair, read_idx
from ganglion.execute.models.small_nets import ConvNet

MOMENTUM = 0.9
Images = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Setting:
    """What a training is made of, but for the method."""

    lr: float
    beta: float
    batch_size: int
    num_workers: int
    seed: int


def load_images(source: str, part: str, num_samples: int | None = None) -> Images:
    """Return images of zero mean and unit variance, and their classes; the first `num_samples`."""
    pair = find_idx_pair(Path(find_idx_folder(source)), part)
    if pair is None:
        raise FileNotFoundError(f"{source} has no files {part}-*: get the data set again")
    images, labels = (read_idx(path)[:num_samples] for path in pair)
    pixels = torch.from_numpy(images.astype(np.float32)).unsqueeze(1)
    pixels.sub_(pixels.mean()).div_(pixels.std())
    return pixels, torch.from_numpy(labels.astype(np.int64))


def make_model(seed: int) -> ConvNet:
    """Return LeNet; equal seeds give equal weights."""
    torch.manual_seed(seed)
    return ConvNet(ConvShape(image_size=28, num_channels=1, num_outputs=10))


class Gradients:
    """Gradients of LeNet at any vector of weights."""

    def __init__(self, train: Images, setting: Setting) -> None:
        """Draw the same batches for a seed, a worker and a step, whatever the method."""
        # A quarter faster on a processor; the weights are the same.
        self._model = make_model(setting.seed).to(memory_format=torch.channels_last)
        self._packed = Packed(self._model)
        self._images, self._labels = train
        self._setting = setting
        self._generators = [
            torch.Generator().manual_seed(1000 * setting.seed + worker)
            for worker in range(setting.num_workers)
        ]
        self.initial = self._packed.flat.clone()

    def at(self, weights: Tensor, worker: int) -> Tensor:
        """Return the gradient on the next batch of a worker; the next call overwrites it."""
        size = (self._setting.batch_size,)
        chosen = torch.randint(len(self._labels), size, generator=self._generators[worker])
        self._packed.flat.copy_(weights)
        self._model.zero_grad(set_to_none=True)
        F.cross_entropy(self._model(self._images[chosen]), self._labels[chosen]).backward()
        return self._packed.gather_gradients()

    @torch.no_grad()
    def accuracy(self, weights: Tensor, held_out: Images) -> float:
        """Return the share of `held_out` that is classified right."""
        self._packed.flat.copy_(weights)
        images, labels = held_out
        right = (self._model(images).argmax(1) == labels).float().mean()
        return float(right)


class Training:
    """All workers and the centre of one method; `apply` does the events in their order."""

    def __init__(self, method: str, gradients: Gradients, setting: Setting) -> None:
        """Begin with all at the same weights."""
        how = METHODS[method]
        self._gradients, self._setting = gradients, setting
        self._alpha = setting.beta / setting.num_workers
        self.center = gradients.initial.clone()
        self._workers = [self.center.clone() for _ in range(setting.num_workers)]
        self._seen = [self.center.clone() for _ in self._workers]  # the centre they got last
        self._has_new = [False] * setting.num_workers
        self._mu = MOMENTUM if how.has_momentum else 0.0
        self._velocities = [torch.zeros_like(self.center) for _ in self._workers]
        self._additive, self._elastic = Additive(0.0 if how.is_elastic else self._mu), Elastic()
        self._is_elastic = how.is_elastic
        self._do: dict[str, Callable[[AveragingEvent], int]] = {
            READ: self._read,
            WRITE: self._write,
            EXCHANGE: self._exchange,
            PUSH: self._push,
            GATHER: self._gather,
            REDUCE: self._reduce,
            STEP: self._step,
        }

    def apply(self, event: AveragingEvent) -> int:
        """Do what happens; return how many batches that took."""
        return self._do[event.kind](event)

    def _read(self, event: AveragingEvent) -> int:
        self._seen[event.worker].copy_(self.center)
        self._has_new[event.worker] = True
        return 0

    def _write(self, event: AveragingEvent) -> int:
        if not event.is_refused:
            worker, seen = self._workers[event.worker], self._seen[event.worker]
            self.center.add_(elastic_force(worker, seen, self._alpha))
        return 0

    def _exchange(self, event: AveragingEvent) -> int:
        worker, seen = self._workers[event.worker], self._seen[event.worker]
        self._elastic.apply(self.center, worker, self._alpha, seen)
        self._has_new[event.worker] = True
        return 0

    def _push(self, event: AveragingEvent) -> int:
        worker = self._workers[event.worker]
        update = self._gradients.at(worker, event.worker).mul(-self._setting.lr)
        if event.is_refused:
            worker.copy_(self.center)
        else:
            self._additive.apply(self.center, update, 0.0, worker)
        return 1

    def _gather(self, event: AveragingEvent) -> int:
        total = torch.stack(self._workers).sum(0)
        for number, seen in enumerate(self._seen):
            seen.copy_(self.center)
            self._has_new[number] = True
        kept = 1.0 - self._setting.num_workers * self._alpha
        self.center.mul_(kept).add_(total, alpha=self._alpha)
        return 0

    def _reduce(self, event: AveragingEvent) -> int:
        """Add all gradients up, as the paper does: not their mean."""
        total = torch.zeros_like(self.center)
        for number in range(self._setting.num_workers):
            total.add_(self._gradients.at(self.center, number))
        self.center.sub_(total, alpha=self._setting.lr)
        return self._setting.num_workers

    def _step(self, event: AveragingEvent) -> int:
        if not self._is_elastic:  # the update came with the gradients of all
            return 0
        number = event.worker
        worker, velocity = self._workers[number], self._velocities[number]
        velocity.mul_(self._mu).sub_(self._gradients.at(worker, number), alpha=self._setting.lr)
        force = elastic_force(worker, self._seen[number], self._alpha)
        worker.add_(velocity)
        if self._has_new[number]:
            worker.sub_(force)
            self._has_new[number] = False
        return 1


def accuracies(
    method: str,
    events: Iterable[AveragingEvent],
    setting: Setting,
    train: Images,
    held_out: Images,
    watch_every: int,
) -> Iterator[tuple[int, float]]:
    """Yield (batches so far, accuracy of the centre) every `watch_every` batches.

    End early where the centre is no longer finite.
    """
    gradients = Gradients(train, setting)
    training = Training(method, gradients, setting)
    num_batches, due = 0, watch_every
    for event in events:
        num_batches += training.apply(event)
        if num_batches >= due:
            yield num_batches, gradients.accuracy(training.center, held_out)
            due += watch_every
            if not bool(training.center.isfinite().all()):
                return
