"""The executor of plans without a pipeline: the whole model on this rank, a step at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ganglion.errors import ConfigError
from ganglion.execute.comm import Group, World
from ganglion.execute.device import peak_bytes
from ganglion.execute.gradients import GradientReducer, global_norm
from ganglion.execute.models import named_buffers, named_parameters
from ganglion.execute.pipeline import (
    BuildContext,
    LocalModel,
    Share,
    Splitting,
    choose_kept,
    make_blocks_real,
    share_pieces,
)
from ganglion.execute.train.replica import Replica
from ganglion.execute.update import (
    AveragedWeights,
    BatchEnd,
    GradientDecision,
    RateSetter,
    StepResult,
    Update,
)
from ganglion.trace import COMPUTE, HOST, Recorder


class ReplicaExecutor:
    """Forward and backward of a step's microbatches, then clipping, update and agreement."""

    def __init__(
        self,
        world: World,
        replica: Replica,
        reducer: GradientReducer,
        update: Update,
        recorder: Recorder,
        *,
        end: BatchEnd,
        device: torch.device,
        norm_group: Group | None = None,
        averaged: AveragedWeights | None = None,
        among: Group | None = None,
    ) -> None:
        """Join a replica with its gradients, their update and the `end` of its batches.

        With a `norm_group`, its ranks hold parts of the gradients; `averaged` weights are those of
        one worker. The ranks `among` agree on each step, None for all.
        """
        self._world = world
        self._replica = replica
        self._reducer = reducer
        self._update = update
        self._recorder = recorder
        self._batch_end = end
        self._device = device
        self._norm_group = norm_group
        self._averaged = averaged
        self._among = among
        self._step = 0
        self._stop = False

    def begin_at(self, step: int) -> None:
        """Begin after `step` updates: a resumed run."""
        self._step = step
        self._replica.on_change()

    def train(self, batch: Share) -> Iterator[StepResult]:
        """Train on a batch and yield its result."""
        step = self._step
        self._recorder.step = step
        if self._averaged is not None:
            self._averaged.begin_pass()
        self._update.begin()
        loss = self._replica.forward_backward(batch, step, self._batch_end.scale_of(step))
        self._replica.done_reading()
        if self._update.is_gradual and not self._batch_end.needs_norm:
            decision = self._update_gradually(step)
        else:
            decision = self._update_at_once(step)
        self._replica.on_change()
        self._step += 1
        yield self._agree(step, loss, float(decision.norm))

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

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return the gradients: there are no versions."""
        return {"gradients": list(self._reducer.buffers)}

    def close(self) -> None:
        """Let go of the gradients."""
        if self._averaged is not None:
            self._averaged.close()
        self._reducer.close()
        self._update.close()
        self._replica.close()

    def _update_at_once(self, step: int) -> GradientDecision:
        """Update by the decision on all gradients."""
        self._reducer.wait()
        with self._recorder.span(COMPUTE, "update", step=step):
            decision = self._batch_end.decide(step, self._norm())
            self._batch_end.update(step, self._update, self._reducer.buffers, self._averaged)
        return decision

    def _update_gradually(self, step: int) -> GradientDecision:
        """Update with each gradient as soon as it is summed; their norm is for the report alone."""
        with self._recorder.span(COMPUTE, "update", step=step):
            buffers, wait = self._reducer.buffers, self._reducer.wait_bucket
            self._batch_end.update(step, self._update, buffers, self._averaged, wait)
            self._reducer.wait()
            return self._batch_end.decide(step, self._norm())

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

    def _norm(self) -> Tensor:
        """Return the norm of all gradients of the replica, of which this rank may have a part."""
        if self._norm_group is None:
            return global_norm(self._reducer.buffers)
        total = torch.tensor([self._reducer.square_norm()], dtype=torch.float64)
        self._norm_group.all_reduce(total).wait()
        return total.sqrt()[0]

    def _agree(self, step: int, loss: Tensor, norm: float) -> StepResult:
        """Gather the numbers of a step, so that every rank reports the same."""
        mine = [float(loss), float(self._stop), float(peak_bytes(self._device)), norm]
        with self._recorder.span(HOST, "agree", step=step):
            table = self._world.gather_numbers(mine, self._among)
        # Workers of elastic averaging have gradients of their own.
        grad_norm = norm if self._averaged is None else float(table[:, 3].mean())
        return self._batch_end.result(
            step,
            loss=float(table[:, 0].mean()),
            grad_norm=grad_norm,
            stop_requested=bool(table[:, 1].any()),
            peak_bytes=int(table[:, 2].max()),
        )


def build_replica(
    context: BuildContext, splitting: Splitting, rate: RateSetter, overlap: bool
) -> LocalModel:
    """Build the whole model on this rank; all ranks do so at the same time."""
    make_blocks_real(context, splitting, context.blocks)
    parameters = named_parameters(context.blocks)
    _check_trainable(parameters)
    stored = context.updates.store(context.blocks.values(), parameters)
    share_pieces(context, splitting, parameters, wholly=True)
    choose_kept(context, splitting, context.blocks)
    reducer = GradientReducer(
        parameters,
        splitting.reach,
        context.recorder,
        bucket_bytes=context.bucket_bytes,
        overlap=overlap,
        late=splitting.weights,
    )
    update = context.updates.make(stored, reducer.buckets)
    plan, device, recorder = context.plan, context.device, context.recorder
    tensors = {**parameters, **named_buffers(context.blocks)}
    averaged = context.average(tensors, update.optimizers, 0)
    replica = Replica(
        context.blocks,
        context.loss_fn,
        plan,
        device,
        reducer,
        recorder,
        context.stream,
        splitting,
        context.call,
        context.activations,
    )
    executor = ReplicaExecutor(
        context.world,
        replica,
        reducer,
        update,
        recorder,
        end=BatchEnd(context.policy, rate.set),
        device=device,
        norm_group=splitting.norm_group,
        averaged=averaged,
        among=context.among,
    )
    return LocalModel(
        executor=executor,
        parameters=parameters,
        updates=[update],
        block_names=tuple(context.blocks),
        plan=plan,
    )


def _check_trainable(parameters: Mapping[str, nn.Parameter]) -> None:
    if not any(p.requires_grad for p in parameters.values()):
        raise ConfigError("the blocks have no trainable parameter; check requires_grad")
