"""The executor of plans without a pipeline: the whole model on this rank, a step at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from ganglion.comm import Group, World
from ganglion.gradients import GradientReducer, clip_by_norm, global_norm
from ganglion.trace import COMPUTE, HOST, Recorder
from ganglion.train.averaged import Averaged, averaging_around
from ganglion.train.device import peak_bytes
from ganglion.train.executor import Share, StepResult
from ganglion.train.replica import Replica

SetLr = Callable[[int], float]


class ReplicaExecutor:
    """Forward and backward of a step's microbatches, then clipping, update and agreement."""

    def __init__(
        self,
        world: World,
        replica: Replica,
        reducer: GradientReducer,
        optimizers: Sequence[Optimizer],
        recorder: Recorder,
        *,
        set_lr: SetLr,
        max_grad_norm: float,
        device: torch.device,
        norm_group: Group | None = None,
        averaged: Averaged | None = None,
    ) -> None:
        """Join a replica with its gradients and optimizers; `set_lr(step)` sets the rate.

        With a `norm_group`, the ranks of it hold parts of the gradients; `averaged` weights are
        those of one worker.
        """
        self._world = world
        self._replica = replica
        self._reducer = reducer
        self._optimizers = optimizers
        self._recorder = recorder
        self._set_lr = set_lr
        self._max_grad_norm = max_grad_norm
        self._device = device
        self._norm_group = norm_group
        self._averaged = averaged
        self._step = 0
        self._stop = False

    def begin_at(self, step: int) -> None:
        """Say that `step` updates have been made."""
        self._step = step
        self._replica.on_change()

    def train(self, batch: Share) -> Iterator[StepResult]:
        """Train on a batch and yield its result."""
        step = self._step
        self._recorder.step = step
        if self._averaged is not None:
            self._averaged.begin_pass()
        loss = self._replica.forward_backward(batch, step)
        with self._recorder.span(COMPUTE, "update", step=step):
            grad_norm = self._clip()
            lr = self._set_lr(step)
            with averaging_around(self._averaged, lr):
                for optimizer in self._optimizers:
                    optimizer.step()
        self._replica.on_change()
        self._step += 1
        yield self._agree(loss, grad_norm, lr)

    def drain(self) -> Iterator[StepResult]:
        """Yield nothing: a step is over when it is over."""
        return iter(())

    def older_weights(self) -> dict[str, Tensor]:
        """Return nothing: only the newest weights are needed."""
        return {}

    def evaluate(self, batch: Share) -> float | None:
        """Return the mean loss of this rank's share of a batch."""
        with self._at_center():
            return float(self._replica.evaluate(batch))

    def outputs(self, inputs: Tensor) -> Tensor:
        """Return what the newest weights make of some inputs."""
        with self._at_center():
            return self._replica.outputs(inputs)

    def request_stop(self) -> None:
        """Ask all ranks to stop."""
        self._stop = True

    def gather_numbers(self, numbers: list[float]) -> Tensor:
        """Return every rank's numbers."""
        return self._world.gather_numbers(numbers)

    def close(self) -> None:
        """Let go of the gradients."""
        if self._averaged is not None:
            self._averaged.close()
        self._reducer.close()
        self._replica.close()

    @contextmanager
    def _at_center(self) -> Iterator[None]:
        """Compute with the weights of the centre, if there is one."""
        if self._averaged is None:
            yield
            return
        with self._averaged.center_weights():
            self._replica.on_change()
            yield
        self._replica.on_change()

    def _clip(self) -> Tensor:
        buffers = self._reducer.buffers
        norm = global_norm(buffers) if self._norm_group is None else self._joint_norm()
        if self._max_grad_norm > 0:
            clip_by_norm(buffers, norm, self._max_grad_norm)
        return norm

    def _joint_norm(self) -> Tensor:
        """Return the norm of gradients of which this rank has a part."""
        assert self._norm_group is not None
        total = torch.tensor([self._reducer.square_norm()], dtype=torch.float64)
        self._norm_group.all_reduce(total).wait()
        return total.sqrt()[0]

    def _agree(self, loss: Tensor, grad_norm: Tensor, lr: float) -> StepResult:
        """Exchange the few numbers of a step, so that every rank reports the same."""
        numbers = (loss, self._stop, peak_bytes(self._device), grad_norm)
        mine = [float(number) for number in numbers]
        with self._recorder.span(HOST, "agree", step=self._step - 1):
            table = self._world.gather_numbers(mine)
        return StepResult(
            step=self._step,
            loss=float(table[:, 0].mean()),
            # Workers of elastic averaging have gradients of their own.
            grad_norm=mine[3] if self._averaged is None else float(table[:, 3].mean()),
            lr=lr,
            peak_bytes=int(table[:, 2].max()),
            stop_requested=bool(table[:, 1].any()),
            finished_s=time.perf_counter(),
        )
