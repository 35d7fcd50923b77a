"""An update: how gradients move the weights of one part of a model, a replica or a stage.

Executors scale, clip and decide; what is moved, where it lives and in which precision is known
here alone:

    norm of all ranks ---> factor ---> update.step(gradients, factor) ---> the next weights
                      \\-> (nothing of use in the gradients) update.skip()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from ganglion.pipeline import ErrorFeedback, WeightVersions
from ganglion.train.optimizers import OptimizerFactory, build_optimizers

Wait = Callable[[int], None]  # returns when the buffer of that number holds its sums


def all_there(number: int) -> None:
    """Wait for nothing: all buffers hold their sums."""


class Update(Protocol):
    """Moves the trainable weights of a part; they go by their serial names."""

    @property
    def is_gradual(self) -> bool:
        """Whether a step begins with the first gradients, while others are still summed."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Whose rates are set and whose state is saved."""

    def begin(self) -> None:
        """Say that gradients are on their way: what a step needs may be fetched meanwhile."""

    def step(
        self, buffers: Sequence[Tensor], factor: Tensor | None, wait: Wait = all_there
    ) -> None:
        """Make the next weights from the gradients times `factor`.

        `buffers` are the flat gradients, of which every `grad` is a view; `wait` for each in turn.
        """

    def skip(self) -> None:
        """Let the next weights be the present ones; nothing else changes."""

    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights that a checkpoint saves, of full precision, to be filled by a load."""

    def on_load(self) -> None:
        """Say that `weights` were filled: what follows from them must follow."""

    def on_saved(self) -> None:
        """Say that weights and state were saved: memory that reading them took can go."""

    def room(self, name: str, entry: str) -> Tensor | None:
        """Return where a load must put an entry that is shaped like its parameter; None: memory."""

    def gradients(self) -> Mapping[str, Tensor]:
        """Return the gradients of the last step, as the optimizers saw them."""

    def tensors(self) -> Mapping[str, Sequence[Tensor]]:
        """Return what it holds between steps beside weights and gradients, by category.

        Categories are those of the memory model; what lies on a lower tier comes first.
        """

    def close(self) -> None:
        """Release what it holds outside of memory."""


class PlainUpdate:
    """Optimizers on the parameters themselves, or on the next of several versions of them."""

    is_gradual = False

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

    def begin(self) -> None:
        """Do nothing: all is here."""

    def step(
        self, buffers: Sequence[Tensor], factor: Tensor | None, wait: Wait = all_there
    ) -> None:
        """Scale the gradients where they are, and let the optimizers step."""
        for number in range(len(buffers)):
            wait(number)
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

    def on_saved(self) -> None:
        """Do nothing."""

    def room(self, name: str, entry: str) -> Tensor | None:
        """Return None: state lives in memory."""
        return None

    def gradients(self) -> Mapping[str, Tensor]:
        """Return the gradients of the parameters."""
        named = self._parameters.items()
        return {name: p.grad for name, p in named if p.grad is not None}

    def tensors(self) -> Mapping[str, Sequence[Tensor]]:
        """Return the state of the optimizers, and what error feedback remembers."""
        remembered = {} if self._feedback is None else self._feedback.previous
        return {"moments": [*state_tensors(self.optimizers), *remembered.values()]}

    def close(self) -> None:
        """Do nothing."""


def state_tensors(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """Return what optimizers remember."""
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]
