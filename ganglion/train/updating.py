"""An update: how gradients move the weights of one part of a model, a replica or a stage.

Executors scale, clip and decide; what is moved, where it lives and in which precision is known
here alone:

    norm of all ranks ---> factor ---> update.step(gradients, factor) ---> the next weights
                      \\-> (nothing of use in the gradients) update.skip()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from ganglion.pipeline import ErrorFeedback, WeightVersions
from ganglion.train.optimizers import OptimizerFactory, build_optimizers


class Update(Protocol):
    """Moves the trainable weights of a part; they go by their serial names."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Whose rates are set and whose state is saved."""

    def step(self, buffers: Sequence[Tensor], factor: Tensor | None) -> None:
        """Make the next weights from the gradients times `factor`.

        `buffers` are the flat gradients, of which every `grad` is a view.
        """

    def skip(self) -> None:
        """Let the next weights be the present ones; nothing else changes."""

    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights that a checkpoint saves, of full precision, to be filled by a load."""

    def on_load(self) -> None:
        """Say that `weights` were filled: what follows from them must follow."""

    def gradients(self) -> Mapping[str, Tensor]:
        """Return the gradients of the last step, as the optimizers saw them."""

    def close(self) -> None:
        """Release what it holds outside of memory."""


class PlainUpdate:
    """Optimizers on the parameters themselves, or on the next of several versions of them."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        factory: OptimizerFactory,
        versions: WeightVersions | None = None,
        feedback: ErrorFeedback | None = None,
    ) -> None:
        """Build optimizers for trainable `parameters`, of which a stage may have none.

        With `versions` each step makes the next one, corrected by `feedback`.
        """
        self._parameters = parameters
        self._versions = versions
        self._feedback = feedback
        optimized = parameters if versions is None else versions.optimized
        self.optimizers = build_optimizers(factory, optimized) if optimized else []

    def step(self, buffers: Sequence[Tensor], factor: Tensor | None) -> None:
        """Scale the gradients where they are, and let the optimizers step."""
        if factor is not None:
            for buffer in buffers:
                buffer.mul_(factor)
        if self._versions is not None:
            self._versions.begin_update()
            self._versions.take_gradients()
        for optimizer in self.optimizers:
            optimizer.step()
        if self._feedback is not None:
            self._feedback.correct()
        if self._versions is not None:
            self._versions.end_update()

    def skip(self) -> None:
        """Let the next version, if there are versions, be the present one."""
        if self._versions is not None:
            self._versions.begin_update()
            self._versions.end_update()

    def weights(self) -> Mapping[str, Tensor]:
        """Return the parameters."""
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    def on_load(self) -> None:
        """Do nothing: the parameters were filled themselves."""

    def gradients(self) -> Mapping[str, Tensor]:
        """Return the gradients of the parameters."""
        named = self._parameters.items()
        return {name: p.grad for name, p in named if p.grad is not None}

    def close(self) -> None:
        """Do nothing."""
