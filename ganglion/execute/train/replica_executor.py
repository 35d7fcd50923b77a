"""The executor of plans without a pipeline: the whole model on this rank, a step at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from ganglion.decide.costs import segments
from ganglion.errors import ConfigError
from ganglion.execute.device import peak_bytes
from ganglion.execute.gradients import GradientReducer, global_norm
from ganglion.execute.models import evaluation_mode, named_buffers, named_parameters
from ganglion.execute.pipeline import (
    BuildContext,
    Chain,
    LocalModel,
    Share,
    Splitting,
    choose_kept,
    cut_batch,
    make_blocks_real,
    share_pieces,
)
from ganglion.execute.update import (
    AveragedWeights,
    BatchEnd,
    GradientDecision,
    RateSetter,
    StepResult,
    Update,
    as_input,
    wide,
)
from ganglion.trace import COMPUTE, HOST


class ReplicaExecutor:
    """Trains the whole model on this rank: microbatches, then clipping, update and agreement.

    The blocks may be pieces of a model that is split over x, y and z.
    """

    def __init__(
        self,
        context: BuildContext,
        splitting: Splitting,
        reducer: GradientReducer,
        update: Update,
        end: BatchEnd,
        averaged: AveragedWeights | None,
    ) -> None:
        """Join the blocks with their gradients, the update and the `end` of batches.

        With `averaged` weights this is one worker of elastic averaging.
        """
        plan, blocks = context.plan, context.blocks
        self._chain = Chain(
            list(blocks.values()),
            loss_fn=context.loss_fn,
            autocast=context.autocast,
            segments=segments(plan, range(len(blocks)), len(blocks)),
            offload=context.activations,
            call=context.call,
        )
        self._plan = plan
        self._world = context.world
        self._device = context.device
        self._recorder = context.recorder
        self._stream = context.stream
        self._among = context.among
        self._activations = context.activations
        self._splitting = splitting
        self._reducer = reducer
        self._update = update
        self._batch_end = end
        self._averaged = averaged
        self._step = 0
        self._stop = False

    def begin_at(self, step: int) -> None:
        """Begin after `step` updates: a resumed run."""
        self._step = step
        self._on_change()

    def train(self, batch: Share) -> Iterator[StepResult]:
        """Train on a batch and yield its result."""
        step = self._step
        self._recorder.step = step
        if self._averaged is not None:
            self._averaged.begin_pass()
        self._update.begin()
        loss = self._forward_backward(batch, step)
        self._done_reading()
        if self._update.is_gradual and not self._batch_end.needs_norm:
            decision = self._update_gradually(step)
        else:
            decision = self._update_at_once(step)
        self._on_change()
        self._step += 1
        yield self._agree(step, loss, float(decision.norm))

    def drain(self) -> Iterator[StepResult]:
        """Yield nothing: a step is over when it is over."""
        return iter(())

    def older_weights(self) -> dict[str, Tensor]:
        """Return nothing: only the newest weights are needed."""
        return {}

    def evaluate(self, batch: Share) -> float | None:
        """Return the mean loss of this rank's share of a batch; no gradients, no dropout."""
        total = torch.zeros((), device=self._device)
        with self._at_center():
            with evaluation_mode(self._chain.blocks):
                for inputs, targets in cut_batch(batch, self._plan, self._device):
                    total = total + self._chain.evaluate(inputs, targets)
            self._done_reading()
            return float(total / self._plan.num_microbatches)

    def outputs(self, inputs: Tensor) -> Tensor:
        """Return the outputs of the newest weights; no gradients, no dropout."""
        with self._at_center():
            with evaluation_mode(self._chain.blocks):
                inputs = as_input(inputs.to(self._device), self._plan)
                output = self._chain.evaluate(inputs, None)
            self._done_reading()
            return wide(self._splitting.whole_output(output))

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
        if self._activations is not None:
            self._activations.close()

    def _forward_backward(self, batch: Share, step: int) -> Tensor:
        """Start to sum the gradients of the mean loss over all shares; return the loss of this one.

        A worker of elastic averaging has the shares of its own replica.
        """
        self._reducer.zero()
        # The mean over microbatches and replicas is taken here, so that reductions only sum.
        num_summed = self._plan.num_microbatches * self._plan.num_summed_shares
        scale = self._batch_end.scale_of(step) / num_summed
        total = torch.zeros((), device=self._device)
        for index, (inputs, targets) in enumerate(cut_batch(batch, self._plan, self._device)):
            with self._recorder.span(COMPUTE, "forward", step=step, microbatch=index):
                seed = partial(self._stream.seed_block, step, index)
                loss = self._chain.forward(inputs, targets, seed)
            if index == self._plan.num_microbatches - 1:
                self._reducer.arm()
            with self._recorder.span(COMPUTE, "backward", step=step, microbatch=index):
                (loss * scale).backward()  # type: ignore[no-untyped-call]
            total = total + loss.detach()  # a new tensor: a loss in double must stay double
        self._reducer.start(step)
        return total / self._plan.num_microbatches

    def _done_reading(self) -> None:
        """Return when the weights may change: other ranks may read those of this one."""
        if self._splitting.weights is not None:
            self._splitting.weights.done_reading()

    def _on_change(self) -> None:
        """Drop gathered blocks, because the weights have changed."""
        if self._splitting.weights is not None:
            self._splitting.weights.on_change()

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
            self._on_change()
            yield
        self._on_change()

    def _norm(self) -> Tensor:
        """Return the norm of all gradients of the replica, of which this rank may have a part."""
        if self._splitting.norm_group is None:
            return global_norm(self._reducer.buffers)
        total = torch.tensor([self._reducer.square_norm()], dtype=torch.float64)
        self._splitting.norm_group.all_reduce(total).wait()
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


def build_replica(context: BuildContext, splitting: Splitting, rate: RateSetter) -> LocalModel:
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
        overlap=context.plan.overlap,
        late=splitting.weights,
    )
    update = context.updates.make(stored, reducer.buckets)
    tensors = {**parameters, **named_buffers(context.blocks)}
    averaged = context.average(tensors, update.optimizers, 0)
    end = BatchEnd(context.policy, rate.set)
    return LocalModel(
        executor=ReplicaExecutor(context, splitting, reducer, update, end, averaged),
        parameters=parameters,
        updates=[update],
        block_names=tuple(context.blocks),
        plan=context.plan,
    )


def _check_trainable(parameters: Mapping[str, nn.Parameter]) -> None:
    if not any(p.requires_grad for p in parameters.values()):
        raise ConfigError("the blocks have no trainable parameter; check requires_grad")
