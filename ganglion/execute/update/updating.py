"""An update: how gradients move the weights of one part of a model, a replica or a stage.

Executors scale, clip and decide. Where the weights live and in which precision is known here alone:

    norm of all ranks ---> factor ---> update.step(gradients, factor) ---> the next weights
                      \\-> (nothing of use in the gradients) update.skip()
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from ganglion.execute.update.optimizers import OptimizerFactory, build_optimizers
from ganglion.execute.update.versions import ErrorFeedback, WeightVersions

Wait = Callable[[int], None]  # returns when the buffer of that number holds its sums


def all_there(number: int) -> None:
    """Wait for nothing: all buffers hold their sums."""


class ResidentState:
    """The state of optimizers in memory: there is nothing to fetch or give back.

    State on a lower tier overrides what differs.
    """

    is_gradual = False  # whether a step begins with the first gradients, while others are summed

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        """Let some optimizers step as they are."""
        self._optimizers = optimizers

    def begin(self) -> None:
        """Begin to fetch what a step needs."""

    def update(self, wait: Wait) -> None:
        """Let the optimizers step; wait for gradients, if it is gradual."""
        for optimizer in self._optimizers:
            optimizer.step()

    def check(self) -> None:
        """Refuse to be read after a step that failed half-way."""

    def on_load(self) -> None:
        """Take state that was loaded."""

    def on_saved(self) -> None:
        """Give back memory that reading took."""

    def room(self, name: str, entry: str) -> Tensor | None:
        """Return where a load must put an entry that is shaped like its parameter; None: memory."""
        return None

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return what is held, by the categories of the memory model; "moments" among them."""
        return {"moments": state_tensors(self._optimizers)}

    def close(self) -> None:
        """Release what is held outside of memory."""


class Update(ABC):
    """Moves the trainable weights of a replica or a stage; they go by their serial names."""

    optimizers: Sequence[Optimizer]  # whose rates are set and whose state is saved

    def __init__(self, state: ResidentState, versions: WeightVersions | None) -> None:
        """Join the state of optimizers with the versions of the weights, if there are several."""
        self._state = state
        self._versions = versions

    @property
    def is_gradual(self) -> bool:
        """Whether a step begins with the first gradients, while others are still summed."""
        return self._state.is_gradual

    def begin(self) -> None:
        """Begin to fetch what a step needs, while gradients are on their way."""
        self._state.begin()

    @abstractmethod
    def step(
        self, buffers: Sequence[Tensor], factor: Tensor | None, wait: Wait = all_there
    ) -> None:
        """Make the next weights from the gradients times `factor`.

        `buffers` are the flat gradients, of which every `grad` is a view; `wait` for each in turn.
        """

    def skip(self) -> None:
        """Keep the weights: the next version, if there are versions, equals the present one."""
        if self._versions is not None:
            self._versions.begin_update()
            self._versions.end_update()

    @abstractmethod
    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights that a checkpoint saves, of full precision, to be filled by a load."""

    @abstractmethod
    def on_load(self) -> None:
        """Derive the rest from `weights` and state that were loaded."""

    def on_saved(self) -> None:
        """Give back memory that reading took."""
        self._state.on_saved()

    def room(self, name: str, entry: str) -> Tensor | None:
        """Return where a load must put an entry that is shaped like its parameter; None: memory."""
        return self._state.room(name, entry)

    @abstractmethod
    def gradients(self) -> Mapping[str, Tensor]:
        """Return the gradients of the last step, as the optimizers saw them."""

    @abstractmethod
    def tensors(self) -> Mapping[str, Sequence[Tensor]]:
        """Return what it holds between steps beside weights and gradients, by category.

        Categories are those of the memory model; what lies on a lower tier comes first.
        """

    def close(self) -> None:
        """Release what is held outside of memory."""
        self._state.close()


class PlainUpdate(Update):
    """Optimizers on the parameters themselves, or on the next of several versions of them."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        factory: OptimizerFactory,
        versions: WeightVersions | None = None,
        feedback: ErrorFeedback | None = None,
        state: ResidentState | None = None,
    ) -> None:
        """Build optimizers for trainable `parameters`, of which a stage may have none.

        With `versions` each step makes the next one, corrected by `feedback`. Without a `state`
        that of the optimizers stays in memory.
        """
        self._parameters = parameters
        self._feedback = feedback
        self._optimized = parameters if versions is None else versions.optimized
        self.optimizers = build_optimizers(factory, self._optimized) if self._optimized else []
        super().__init__(ResidentState(self.optimizers) if state is None else state, versions)

    def step(
        self, buffers: Sequence[Tensor], factor: Tensor | None, wait: Wait = all_there
    ) -> None:
        """Scale the gradients where they are, and let the optimizers step."""
        if factor is not None or not self.is_gradual:
            wait = wait_for_all(buffers, wait)
        if factor is not None:
            for buffer in buffers:
                buffer.mul_(factor)
        if self._versions is not None:
            self._versions.begin_update()
            self._versions.take_gradients()
        self._state.update(wait)
        if self._feedback is not None:
            self._feedback.correct()
        if self._versions is not None:
            self._versions.end_update()

    def weights(self) -> Mapping[str, Tensor]:
        """Return the parameters."""
        self._state.check()
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    def on_load(self) -> None:
        """Take state that was loaded: the parameters were filled themselves."""
        self._state.on_load()

    def gradients(self) -> Mapping[str, Tensor]:
        """Return the gradients of the parameters."""
        named = self._parameters.items()
        return {name: p.grad for name, p in named if p.grad is not None}

    def tensors(self) -> Mapping[str, Sequence[Tensor]]:
        """Return the state of the optimizers, and what error feedback remembers."""
        found = self._state.tensors()
        remembered = {} if self._feedback is None else self._feedback.previous
        return {**found, "moments": [*found["moments"], *remembered.values()]}


def wait_for_all(buffers: Sequence[Tensor], wait: Wait) -> Wait:
    """Return when all buffers hold their sums: there is nothing to wait for then."""
    for number in range(len(buffers)):
        wait(number)
    return all_there


def state_tensors(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """Return what optimizers remember."""
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]
