"""One replica on one rank: forward and backward of a step's microbatches, then the gradients.

This is the executor of plans without a pipeline. Its blocks may be pieces of a model that is split
over x, y and z.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from ganglion.decide.costs import segments
from ganglion.decide.plan import Plan
from ganglion.execute.gradients import GradientReducer
from ganglion.execute.models import LossFn, evaluation_mode
from ganglion.execute.offload import ActivationOffload
from ganglion.execute.pipeline import (
    Call,
    Chain,
    RandomStream,
    Share,
    Splitting,
    cut_batch,
    plain_call,
)
from ganglion.execute.update import as_input, wide
from ganglion.trace import COMPUTE, Recorder


class Replica:
    """Runs the whole model on this rank."""

    def __init__(
        self,
        blocks: Mapping[str, nn.Module],
        loss_fn: LossFn,
        plan: Plan,
        device: torch.device,
        reducer: GradientReducer,
        recorder: Recorder,
        stream: RandomStream,
        splitting: Splitting,
        call: Call = plain_call,
        activations: ActivationOffload | None = None,
    ) -> None:
        """Join the blocks of a model with its loss and the reducer of its gradients.

        `call` runs a block. What autograd saves goes to `activations`, if they are there.
        """
        self._chain = Chain(
            list(blocks.values()),
            loss_fn=loss_fn,
            autocast=lambda: autocast(plan.precision, device),
            segments=segments(plan, range(len(blocks)), len(blocks)),
            offload=activations,
            call=call,
        )
        self._activations = activations
        self._plan = plan
        self._device = device
        self._reducer = reducer
        self._recorder = recorder
        self._stream = stream
        self._splitting = splitting

    def forward_backward(self, batch: Share, step: int, loss_scale: float = 1.0) -> Tensor:
        """Start to sum the gradients of the mean loss over all shares; return the loss of this one.

        The gradients are those of `loss_scale` times the loss. A worker of elastic averaging has
        the shares of its own replica.
        """
        self._reducer.zero()
        # The mean over microbatches and replicas is taken here, so that reductions only sum.
        scale = loss_scale / (self._plan.num_microbatches * self._plan.num_summed_shares)
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

    def evaluate(self, batch: Share) -> Tensor:
        """Return the mean loss of this rank's share of a batch; no gradients, no dropout."""
        total = torch.zeros((), device=self._device)
        with evaluation_mode(self._chain.blocks):
            for inputs, targets in cut_batch(batch, self._plan, self._device):
                total = total + self._chain.evaluate(inputs, targets)
        self.done_reading()
        return total / self._plan.num_microbatches

    def outputs(self, inputs: Tensor) -> Tensor:
        """Return what the model makes of some inputs; no gradients, no dropout."""
        with evaluation_mode(self._chain.blocks):
            inputs = as_input(inputs.to(self._device), self._plan)
            output = self._chain.evaluate(inputs, None)
        self.done_reading()
        return wide(self._splitting.whole_output(output))

    def close(self) -> None:
        """Give back where activations were."""
        if self._activations is not None:
            self._activations.close()

    def done_reading(self) -> None:
        """Return when the weights may change: other ranks may see this one's."""
        if self._splitting.weights is not None:
            self._splitting.weights.done_reading()

    def on_change(self) -> None:
        """Drop gathered blocks, because the weights have changed."""
        if self._splitting.weights is not None:
            self._splitting.weights.on_change()


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which a plan's precision computes."""
    if precision == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()
