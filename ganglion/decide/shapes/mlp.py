"""An MLP, and the chains of layers that it shares with a conv net.

Inputs and outputs of a chain are whole; features between its layers are split over x and y in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ganglion.decide.shapes.amounts import FORMATS, Amount, Condition, Format, each, fixed
from ganglion.decide.shapes.block import (
    FLOAT,
    HALF,
    NUMBER,
    Axes,
    linear_parameters,
)
from ganglion.decide.shapes.described import (
    DescribedActivations,
    DescribedBlock,
    DescribedModel,
    Split,
    layers_of_all,
    linear_flops,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPShape:
    """Linear layers with GELU between them, on flattened inputs; one block a layer."""

    num_inputs: int
    num_outputs: int
    num_layers: int
    hidden: int
    bias: bool = True

    @property
    def num_blocks(self) -> int:
        """Blocks that a pipeline can cut between."""
        return self.num_layers

    @property
    def widths(self) -> list[int]:
        """Widths before, between and behind the layers."""
        return [self.num_inputs, *[self.hidden] * (self.num_layers - 1), self.num_outputs]


def describe_mlp(shape: MLPShape) -> DescribedModel:
    """Return one block for each linear layer; those inside are alike, but for their axes."""
    last = shape.num_layers - 1
    made: dict[tuple[bool, bool, Axes], DescribedBlock] = {}
    for number, axes in enumerate(chain_axes(shape.num_layers)):
        place = (number == 0, number == last, axes)
        made.setdefault(place, _layer(shape, number, axes))
    axes_used = enumerate(chain_axes(shape.num_layers))
    return DescribedModel(
        name="mlp",
        sample_bytes=shape.num_inputs * FLOAT + NUMBER,
        blocks=tuple(made[number == 0, number == last, axes] for number, axes in axes_used),
        splits=chain_splits("hidden", [shape.hidden] * last),
    )


def chain_splits(name: str, widths: Sequence[int]) -> tuple[Split, ...]:
    """Return the sizes that axes must divide, from the widths between the layers of a chain."""
    splits = (
        Split(axis=("x", "y")[number % 2], name=name, size=size)
        for number, size in enumerate(widths)
    )
    return tuple(dict.fromkeys(splits))


def _layer(shape: MLPShape, number: int, axes: Axes) -> DescribedBlock:
    inputs, outputs = shape.widths[number : number + 2]
    chain = Chain(last=shape.num_layers - 1)
    if shape.num_layers == 1:
        alone = tuple(_whole_layer(form, inputs, outputs) for form in FORMATS)
        block = chain.dense("layer", 0, inputs, outputs, axes, bias=shape.bias)
        return replace(block, activations=alone)
    inner = f"inner.{axes[0]}{axes[1]}"
    name = "first" if number == 0 else "last" if number == chain.last else inner
    return chain.dense(name, number, inputs, outputs, axes, bias=shape.bias)


def _whole_layer(form: Format, inputs: int, outputs: int) -> DescribedActivations:
    """Return a model of one layer: it cuts whole inputs and gathers whole outputs."""
    copy_when = "" if form.is_autocast else "y>1"
    return DescribedActivations(
        input=each(inputs * form.weight_bytes),
        output=each(outputs * form.element_bytes),
        kept=(
            *each(outputs * FLOAT + NUMBER),
            *fixed(FLOAT),
            *each(inputs * form.element_bytes, "y", when=copy_when),
        ),
        scratch=(each(2 * outputs * FLOAT),),
        keeps_input=False if form.is_autocast else Condition("y", "=", 1),
    )


# --- chains --------------------------------------------------------------------------------------


def chain_axes(num_layers: int) -> list[Axes]:
    """Return the axes of inputs and outputs of layers that take turns between x and y.

    A single layer takes and gives whole features; it is cut for itself.
    """
    if num_layers == 1:
        return [("y", "x")]
    between: Sequence[str | None] = [("x", "y")[number % 2] for number in range(num_layers - 1)]
    return list(pairwise([None, *between, None]))


@dataclass(frozen=True, slots=True)
class Chain:
    """Layers one after another; block `last` has the loss behind it."""

    last: int

    def dense(
        self,
        name: str,
        number: int,
        inputs: int,
        outputs: int,
        axes: Axes,
        *,
        bias: bool = True,
        keeps_result: bool = False,
    ) -> DescribedBlock:
        """Return a linear layer with GELU, or with a ReLU, which keeps its result instead."""
        parameters = linear_parameters(inputs, outputs, axes, bias)
        return DescribedBlock(
            name=name,
            flops=linear_flops(1, inputs * outputs, is_first=number == 0),
            output_elements=outputs,
            parameters=parameters,
            layers=layers_of_all(parameters, (1, 1)),
            activations=tuple(
                self._dense_activations(form, number, (inputs, outputs), axes, keeps_result)
                for form in FORMATS
            ),
        )

    def _dense_activations(
        self, form: Format, number: int, sizes: tuple[int, int], axes: Axes, keeps_result: bool
    ) -> DescribedActivations:
        inputs, outputs = sizes
        taken, given = (axis or "" for axis in axes)
        after = each(outputs * form.element_bytes, given)
        before = each(inputs * form.element_bytes * (number > 0), taken)
        kept: Amount = ()
        if form.is_autocast and number > 0:  # the gradient of the data is not needed
            kept = fixed(inputs * outputs * HALF, when="x=1 y=1 z=1")
        if number == self.last:
            kept = (*kept, *each(outputs * FLOAT + NUMBER), *fixed(FLOAT))
        elif not keeps_result:
            kept = (*kept, *after)
        gradient = fixed(inputs * outputs * form.weight_bytes, f"{taken} {given}")
        return replace(
            self.edges(form, number, each(inputs, taken), each(outputs, given), kept),
            scratch=((*after, *after), (*before, *gradient)),
            rerun=(*before, *after, *gradient),
            gradient=gradient,
            keeps_output=keeps_result and number < self.last,
        )

    def edges(
        self, form: Format, number: int, taken: Amount, given: Amount, kept: Amount
    ) -> DescribedActivations:
        """Return a block with inputs and outputs of so many elements."""
        is_cast = number == 0 and form.is_autocast  # data come in fp32
        arriving = form.weight_bytes if number == 0 else form.element_bytes
        copy = _times(taken, form.element_bytes) if is_cast else ()
        return DescribedActivations(
            input=_times(taken, arriving),
            output=_times(given, form.element_bytes),
            kept=(*kept, *copy),
            keeps_input=not is_cast,
        )


def _times(amount: Amount, factor: int) -> Amount:
    return tuple(replace(term, num_bytes=term.num_bytes * factor) for term in amount)
