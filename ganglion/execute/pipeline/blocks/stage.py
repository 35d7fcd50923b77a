"""A stage: some blocks of the model, run forward and backward for one microbatch at a time.

The stage remembers, for every microbatch in flight, the input it came with and the output it left:
what autograd needs to go back. With recomputation the graph between them holds the input of each
segment and nothing else; random numbers depend on (step, microbatch, block) only, so the second
forward of a block repeats the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ganglion.errors import ConfigError
from ganglion.execute.offload import ActivationOffload
from ganglion.execute.pipeline.blocks.chain import Call, Chain, Context, LossFn, plain_call
from ganglion.execute.pipeline.blocks.weight_gradients import Deferral, WeightStore


@dataclass(slots=True)
class Entrance:
    """Where the gradient of an input arrives."""

    grad: Tensor | None = None


def enter(hidden: Tensor) -> tuple[Tensor, Entrance]:
    """Return an input as an inner tensor of a graph, and where its gradient will be."""
    entrance, anchor = Entrance(), torch.empty(0, requires_grad=True)
    inner: Tensor = _Enter.apply(anchor, hidden, entrance)  # type: ignore[no-untyped-call]
    return inner, entrance


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, hidden: Tensor, entrance: Entrance) -> Tensor:
        ctx.entrance = entrance
        return hidden.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.entrance.grad = gradient.contiguous()
        return None, None, None


SeedBlock = Callable[[int, int], None]  # (microbatch, block): make random numbers theirs


@dataclass(slots=True)
class _InFlight:
    """What a microbatch left behind; `output` is the scaled loss on the last stage.

    It is let go in backward, with the graph that hangs on it. Where activations are offloaded, both
    ends are places in that graph, without memory. What is not `trained` needs no backward.
    """

    input: Tensor | Entrance
    output: Tensor | GradientEdge | None
    is_trained: bool
    half: WeightStore | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSettings:
    """How a stage computes; `loss_fn` is given on the last stage only, `call` runs a block.

    `segments` are the runs of its blocks that backward computes again; `offload` takes what
    autograd saves.
    """

    loss_fn: LossFn | None
    loss_scale: float
    num_stages: int
    seed_block: SeedBlock
    # What else the loss of a microbatch is multiplied with, before its backward.
    dynamic_scale: Callable[[int], float] = lambda microbatch: 1.0
    autocast: Context = nullcontext
    segments: Sequence[range] = ()
    deferral: Deferral | None = None
    call: Call = plain_call
    offload: ActivationOffload | None = None


class Stage:
    """Runs the blocks of one stage."""

    def __init__(
        self, number: int, blocks: Sequence[nn.Module], first_block: int, settings: StageSettings
    ) -> None:
        """Hold `blocks`, of which the first is block `first_block` of the model."""
        self.number = number
        self.num_stages = settings.num_stages
        self.blocks = list(blocks)
        self._settings = settings
        self._chain = Chain(
            self.blocks,
            first_block=first_block,
            loss_fn=settings.loss_fn,
            autocast=settings.autocast,
            segments=settings.segments,
            deferral=settings.deferral,
            call=settings.call,
            offload=settings.offload,
        )
        self._in_flight: dict[int, _InFlight] = {}
        self._targets: dict[int, Tensor] = {}
        self._losses: dict[int, Tensor] = {}  # of the last stage, not scaled

    @property
    def num_in_flight(self) -> int:
        """How many microbatches are between forward and the end of backward."""
        return len(self._in_flight)

    def expect(self, microbatch: int, target: Tensor) -> None:
        """Take the target of a microbatch that will come: the last stage needs it."""
        self._targets[microbatch] = target

    def forward(self, microbatch: int, hidden: Tensor) -> Tensor | None:
        """Run forward; return what the next stage needs, or None on the last stage."""
        hidden = hidden.detach()
        entrance: Tensor | Entrance = hidden
        if hidden.is_floating_point() and self.number > 0:
            if self._settings.offload is None:
                hidden.requires_grad_()
            else:
                hidden, entrance = enter(hidden)
        half = None if self._settings.deferral is None else WeightStore()
        output = self._output(microbatch, hidden, half)
        is_trained, end = output.requires_grad, self._end_of(output)
        self._in_flight[microbatch] = _InFlight(entrance, end, is_trained, half)
        return None if self._settings.loss_fn is not None else output.detach()

    def backward(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """Run backward; return what the stage before needs, or None on the first stage."""
        live = self._in_flight[microbatch]
        assert live.output is not None, "a microbatch goes backward once"
        if live.is_trained:  # not on a first stage that is frozen
            torch.autograd.backward(live.output, gradient)
        input_gradient = live.input.grad
        live.input.grad = live.output = None
        if live.half is None:
            self._forget(microbatch)
        return input_gradient

    def weight(self, microbatch: int) -> None:
        """Compute the weight gradients that backward put off."""
        half = self._in_flight[microbatch].half
        assert half is not None, "only split backwards have a weight half"
        half.run()
        self._forget(microbatch)

    def evaluate(self, hidden: Tensor, target: Tensor | None) -> Tensor:
        """Return the output of the stage, on the last one the loss, and remember nothing."""
        return self._chain.evaluate(hidden, target)

    def _output(self, microbatch: int, hidden: Tensor, half: WeightStore | None) -> Tensor:
        seed = partial(self._settings.seed_block, microbatch)
        target = None if self._settings.loss_fn is None else self._targets[microbatch]
        output = self._chain.forward(hidden, target, seed, half)
        if not isinstance(output, Tensor):
            raise ConfigError(
                f"stage {self.number} ends with a block that returns {type(output).__name__}, but "
                f"one tensor crosses a boundary between stages: let blocks return one tensor"
            )
        if self._settings.loss_fn is None:
            return output
        self._losses[microbatch] = output.detach()
        scale = self._settings.loss_scale * self._settings.dynamic_scale(microbatch)
        return output * scale

    def close(self) -> None:
        """Give back where activations were."""
        if self._settings.offload is not None:
            self._settings.offload.close()

    def _end_of(self, output: Tensor) -> Tensor | GradientEdge:
        """Return what backward begins at."""
        if self._settings.offload is None or not output.requires_grad:
            return output
        return output if self._settings.loss_fn is not None else get_gradient_edge(output)

    def take_loss(self, microbatches: Sequence[int]) -> float:
        """Return the mean loss of a batch, 0 on any stage but the last, and forget it."""
        losses = [self._losses.pop(number) for number in microbatches if number in self._losses]
        return float(torch.stack(losses).double().mean()) if losses else 0.0

    def _forget(self, microbatch: int) -> None:
        del self._in_flight[microbatch]
        self._targets.pop(microbatch, None)
