"""A model description: ordered blocks with their flop, parameters, layers and bytes, as data.

    closed form (gpt:, llama:, vgg19 ...)  --describe_shape-->
    nn.Module under fake tensors           --ganglion describe-->   DescribedModel
    model.json                             --read-->

    DescribedModel + microbatch, mesh, precision -> BlockCost, BlockLayers, BlockActivations

Everything that predicts works from the records on the right, so that it treats all models alike.
All sizes are those of one sample, unless they are called fixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ganglion.decide.shapes.amounts import FORMATS, Amount, Condition, format_number, total
from ganglion.decide.shapes.block import (
    MATRIX,
    TABLE,
    BlockActivations,
    BlockCost,
    BlockLayers,
    BlockParameters,
    Layout,
    Parameter,
    SplitLayer,
)
from ganglion.errors import ConfigError

_Record = TypeVar("_Record")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """Flop of forward, and of backward for inputs and for weights."""

    forward: int = 0
    input: int = 0
    weight: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedLayer:
    """A use of a parameter, by its place in the block: rows that go in and come out, of a sample.

    Rows times the dims of a MATRIX are a matmul, those of a TABLE a lookup.
    """

    parameter: int
    input_rows: int
    output_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedActivations:
    """The `BlockActivations` of any microbatch and mesh, in one format.

    Of several amounts of `scratch` the largest counts, for they are there at different times; of
    `held` the smallest. `keeps_input` may depend on an axis.
    """

    input: Amount
    output: Amount
    kept: Amount
    scratch: tuple[Amount, ...] = ()
    held: tuple[Amount, ...] = ()
    rerun: Amount = ()
    gradient: Amount = ()
    keeps_input: bool | Condition = True
    keeps_output: bool = False

    def on(self, layout: Layout) -> BlockActivations:
        """Return the bytes of one microbatch on one rank."""
        keeps = self.keeps_input
        return BlockActivations(
            input_bytes=total(self.input, layout),
            output_bytes=total(self.output, layout),
            kept_bytes=total(self.kept, layout),
            scratch_bytes=max((total(moment, layout) for moment in self.scratch), default=0),
            held_bytes=min((total(moment, layout) for moment in self.held), default=0),
            rerun_bytes=total(self.rerun, layout),
            gradient_bytes=total(self.gradient, layout),
            keeps_input=keeps if isinstance(keeps, bool) else keeps.holds(layout.mesh),
            keeps_output=self.keeps_output,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedBlock:
    """One block. `fixed_flops` are for a microbatch of any size, `activations` as in FORMATS."""

    name: str
    flops: Flops
    output_elements: int
    activations: tuple[DescribedActivations, ...]
    parameters: BlockParameters = ()
    layers: tuple[DescribedLayer, ...] = ()
    fixed_flops: Flops = Flops()

    def __post_init__(self) -> None:
        assert len(self.activations) == len(FORMATS), "one for each format"
        for layer in self.layers:
            if layer.parameter >= len(self.parameters):
                raise ConfigError(
                    f"block {self.name!r} has a layer with parameter {layer.parameter}, but its "
                    f"parameters are 0 to {len(self.parameters) - 1}: correct the layer"
                )
            used = self.parameters[layer.parameter]
            if used.role not in (MATRIX, TABLE) or len(used.shape) < 2:
                raise ConfigError(
                    f"block {self.name!r} has a layer with parameter {layer.parameter}, a "
                    f"{used.role} of shape {list(used.shape)}: a layer needs a matrix or a table"
                )
        products = sum(_product_flops(self, layer) for layer in self.layers)
        if products > self.flops.forward:
            raise ConfigError(
                f"block {self.name!r} has {self.flops.forward} flop forward, but its layers alone "
                f"take {products}: correct its flops or the rows of its layers"
            )

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return sum(math.prod(parameter.shape) for parameter in self.parameters)

    @property
    def tied_parameters(self) -> int:
        """Elements of the parameters that the first block has, too."""
        return sum(math.prod(p.shape) for p in self.parameters if p.is_tied)

    def cost(self, microbatch_size: int) -> BlockCost:
        """Return the cost of a microbatch."""
        one, fixed = self.flops, self.fixed_flops
        return BlockCost(
            forward_flops=one.forward * microbatch_size + fixed.forward,
            input_flops=one.input * microbatch_size + fixed.input,
            weight_flops=one.weight * microbatch_size + fixed.weight,
            num_parameters=self.num_parameters,
            output_elements=self.output_elements * microbatch_size,
            tied_parameters=self.tied_parameters,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A size of the model that an axis must divide, under the name that errors give it."""

    axis: str
    name: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedModel:
    """A model in numbers: its blocks in order, and the bytes of one sample with its target.

    Equal blocks have equal names. `tokens` are those of a sample, 1 where there are none. Axes x
    and y can split the model if `splits` name sizes for them.
    """

    name: str
    sample_bytes: int
    blocks: tuple[DescribedBlock, ...]
    tokens: int = 1
    splits: tuple[Split, ...] = ()

    def __post_init__(self) -> None:
        if not self.blocks:
            raise ConfigError(f"model {self.name!r} has no blocks: describe at least one")
        kinds: dict[str, DescribedBlock] = {}
        for block in self.blocks:
            if kinds.setdefault(block.name, block) != block:
                raise ConfigError(
                    f"model {self.name!r} has two different blocks named {block.name!r}: rename one"
                )

    @property
    def num_blocks(self) -> int:
        """Blocks that a pipeline can cut between."""
        return len(self.blocks)

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, those that two blocks share once."""
        return sum(block.num_parameters - block.tied_parameters for block in self.blocks)


# --- what predictions work from ------------------------------------------------------------------


def described_costs(model: DescribedModel, microbatch_size: int) -> list[BlockCost]:
    """Return the cost of every block; equal blocks share one record."""
    return _once_each(model.blocks, lambda block: block.cost(microbatch_size))


def described_activations(model: DescribedModel, layout: Layout) -> list[BlockActivations]:
    """Return the activations of every block on one rank; equal blocks share one record."""
    number = format_number(layout.precision)
    return _once_each(model.blocks, lambda block: block.activations[number].on(layout))


def described_layers(model: DescribedModel, microbatch_size: int) -> list[BlockLayers]:
    """Return the layers of every block; equal blocks but the first share one record.

    The other flop of a block are computed before the last of its layers, and of backward after it.
    """
    first, *others = model.blocks
    return [
        _layers(first, microbatch_size, is_first=True),
        *_once_each(others, lambda block: _layers(block, microbatch_size, is_first=False)),
    ]


def _layers(block: DescribedBlock, microbatch_size: int, *, is_first: bool) -> BlockLayers:
    cost = block.cost(microbatch_size)
    layers = [_split_layer(block, one, microbatch_size, is_first) for one in block.layers]
    if not layers:
        return ()
    products = sum(layer.product_flops for layer in layers)
    last = replace(
        layers[-1],
        before_flops=cost.forward_flops - products,
        after_flops=0.0 if is_first else cost.input_flops - products,
    )
    return (*layers[:-1], last)


def _split_layer(
    block: DescribedBlock, layer: DescribedLayer, microbatch_size: int, is_first: bool
) -> SplitLayer:
    weight = block.parameters[layer.parameter]
    inputs, outputs = (microbatch_size * rows for rows in (layer.input_rows, layer.output_rows))
    is_table = weight.role == TABLE
    return SplitLayer(
        parameter=weight,
        num_inputs=0 if is_table else inputs * weight.shape[1],
        num_outputs=outputs * weight.shape[1 if is_table else 0],
        product_flops=float(microbatch_size * _product_flops(block, layer)),
        of_data=is_first,
    )


def _product_flops(block: DescribedBlock, layer: DescribedLayer) -> int:
    weight = block.parameters[layer.parameter]
    return 0 if weight.role == TABLE else 2 * layer.output_rows * math.prod(weight.shape)


def _once_each(
    blocks: Sequence[DescribedBlock], make: Callable[[DescribedBlock], _Record]
) -> list[_Record]:
    """Return what is made of every block, made once for blocks that are the same object."""
    made: dict[int, _Record] = {}
    for block in blocks:
        if id(block) not in made:
            made[id(block)] = make(block)
    return [made[id(block)] for block in blocks]


# --- making them ---------------------------------------------------------------------------------


def linear_flops(
    rows: int, weights: int, *, mixing: int = 0, is_first: bool = False, others: int = 0
) -> Flops:
    """Return those of layers with so many weights, each used by `rows` rows of a sample.

    `mixing` are of products of two activations; the input of the first block needs no gradient.
    """
    products = 2 * rows * weights + others
    return Flops(
        forward=products + mixing, input=0 if is_first else products + 2 * mixing, weight=products
    )


def layers_of_all(
    parameters: Iterable[Parameter], rows: tuple[int, int]
) -> tuple[DescribedLayer, ...]:
    """Return a layer of every matrix and table, with the same rows before and behind each."""
    return tuple(
        DescribedLayer(parameter=number, input_rows=rows[0], output_rows=rows[1])
        for number, parameter in enumerate(parameters)
        if parameter.role in (MATRIX, TABLE)
    )
