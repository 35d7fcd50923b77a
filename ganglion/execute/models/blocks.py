"""Blocks: a model as an ordered sequence of named modules, the grain at which a pipeline cuts.

    tokens -> [embedding] -> [layers.0.attention] -> [layers.0.mlp] -> ... -> [head] -> logits

Each block takes one tensor and returns one; the blocks in order are the model. A parameter's name
is its block's name, a dot and its name inside the block, on any rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain

from torch import Tensor, nn

from ganglion.decide.topology import Box
from ganglion.errors import ConfigError
from ganglion.execute.models.initial import Initial, InitialWeights

# An ordered sequence, the same with names, or a module that lists its blocks.
Blocks = Sequence[nn.Module] | Mapping[str, nn.Module] | nn.Module


class BlockModel(nn.Module, ABC):
    """A model that lists its own blocks."""

    @abstractmethod
    def blocks(self) -> dict[str, nn.Module]:
        """Return the blocks in order, each under its qualified name inside this model."""

    def initial_values(self) -> Mapping[str, Initial]:
        """Return the initial value of each parameter by its serial name; a shared one once."""
        raise ConfigError(
            f"a {type(self).__name__} does not tell its initial values: give the class a method "
            f"`initial_values()`, or build it with its weights"
        )

    def initialize(self, seed: int) -> None:
        """Give every parameter its initial value, except on the meta device."""
        initial = InitialWeights(self.initial_values(), seed)
        for name, parameter in named_parameters(self.blocks()).items():
            if not parameter.is_meta:
                shape = tuple(parameter.shape)
                initial.fill(parameter, name, shape, [Box.whole(shape)])

    def forward(self, x: Tensor) -> Tensor:
        """Run the blocks one after another."""
        for block in self.blocks().values():
            x = block(x)
        return x


def named_blocks(blocks: Blocks) -> dict[str, nn.Module]:
    """Return the ordered blocks by name; refuse a model that cannot be cut into blocks.

    A mapping keeps its names; a list, tuple or nn.Sequential is numbered "0", "1", ... (give
    `dict(model.named_children())` to keep the names of a Sequential); any other module must have
    a `blocks()` method.
    """
    if isinstance(blocks, nn.Module) and not isinstance(blocks, nn.Sequential):
        return _blocks_of_module(blocks)
    if isinstance(blocks, Mapping):
        named = dict(blocks)
    elif isinstance(blocks, Sequence | nn.Sequential):
        named = {str(index): block for index, block in enumerate(blocks)}
    else:
        raise ConfigError(
            f"the model was given as {type(blocks).__name__}; pass a list of modules that run one "
            f"after another"
        )
    if not named:
        raise ConfigError("the model has 0 blocks; pass a list with at least one module")
    for name, block in named.items():
        _check_block(name, block)
    _check_unique_names(named)
    return named


def named_parameters(blocks: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Return every parameter once, under its first qualified name, in block order."""
    first: dict[int, str] = {}
    return {
        name: parameter
        for name, parameter in _all_parameters(blocks)
        if first.setdefault(id(parameter), name) == name
    }


def named_buffers(blocks: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return every persistent buffer once, under its first qualified name.

    Buffers registered with persistent=False are left out, as in a state dict: a module makes them
    from its own arguments, so they are neither saved nor copied between replicas.
    """
    first: dict[int, str] = {}
    return {
        name: buffer
        for name, buffer in _persistent_buffers(blocks)
        if first.setdefault(id(buffer), name) == name
    }


def tied_names(blocks: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return the first name of a shared parameter for each of its later names."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in _all_parameters(blocks):
        if first.setdefault(id(parameter), name) != name:
            tied[name] = first[id(parameter)]
    return tied


def _all_parameters(blocks: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    for block_name, block in blocks.items():
        yield from block.named_parameters(prefix=block_name, remove_duplicate=False)


def _persistent_buffers(blocks: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    for block_name, block in blocks.items():
        # Only a private attribute of each module lists its buffers that are not saved.
        for path, module in block.named_modules(prefix=block_name, remove_duplicate=False):
            for name, buffer in module.named_buffers(prefix=path, recurse=False):
                if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                    yield name, buffer


def _blocks_of_module(model: nn.Module) -> dict[str, nn.Module]:
    method = getattr(model, "blocks", None)
    # A child module named `blocks`, common in vision models, is callable too.
    if not callable(method) or isinstance(method, nn.Module):
        raise ConfigError(
            f"a {type(model).__name__} is one whole module, and its order of execution cannot be "
            f"seen from outside: pass a list of modules that run one after another, or give the "
            f"class a `blocks()` method that returns them"
        )
    named = named_blocks(method())
    inside = {id(parameter) for _, parameter in _all_parameters(named)}
    for name, parameter in model.named_parameters():
        if id(parameter) not in inside:
            raise ConfigError(
                f"parameter {name!r} of {type(model).__name__} is in none of its {len(named)} "
                f"blocks {list(named)}, so it would not be trained: move it into the block that "
                f"uses it"
            )
    return named


def _check_block(name: str, block: object) -> None:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"block name {name!r} is not a name; use a string that is not empty")
    if not isinstance(block, nn.Module):
        raise ConfigError(
            f"block {name!r} is of type {type(block).__name__}, not a torch.nn.Module: wrap it in "
            f"a module that takes one tensor and returns one"
        )


def _check_unique_names(blocks: Mapping[str, nn.Module]) -> None:
    # Distinct blocks may share a name: "a" with child "b", and a block named "a.b".
    seen: set[str] = set()
    buffers = (
        block.named_buffers(prefix=block_name, remove_duplicate=False)
        for block_name, block in blocks.items()
    )
    for name, _ in chain(_all_parameters(blocks), *buffers):
        if name in seen:
            raise ConfigError(
                f"two tensors of different blocks are both named {name!r}; rename one of the "
                f"blocks {list(blocks)}"
            )
        seen.add(name)


@contextmanager
def evaluation_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put every module in evaluation mode, and each submodule back in its own mode afterwards."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    for part, _ in modes:
        part.training = False
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
