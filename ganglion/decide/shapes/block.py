"""The records of a block: its cost, parameters, split layers, and activations.

Of a layer O = I W the products are O = I W forward, dI = dO W^T for the block before and
dW = I^T dO for the weights: equally many flop each. A product of two activations, as in attention,
has two gradients that both go to the block before. The first block's input needs no gradient.

    flop of         forward     backward: input     backward: weight
    linear layer      f             f                   f
    attention         f            2 f                  0

Norms, activations and lookups are not counted: they are lower in order (2104.04473, appendix).

A weight (outputs, inputs) is cut by the axis of O and by that of I; its remaining rows are stored
in pieces along z, if z divides them (AxoNN-4D, spec B.1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ganglion.decide.topology import Mesh, Placement, Shard

MATRIX, TABLE, VECTOR = "matrix", "table", "vector"
FLOAT, HALF, NUMBER, FLAG = 4, 2, 8, 1  # bytes of fp32, bf16, int64 and bool


# --- cost ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """One block and one microbatch.

    `tied_parameters` is how many of the parameters are the first block's own, held here too: a
    stage that has both blocks has them once.
    """

    forward_flops: float
    input_flops: float
    weight_flops: float
    num_parameters: int
    output_elements: int
    tied_parameters: int = 0

    @property
    def total_flops(self) -> float:
        """Flop of forward and backward."""
        return self.forward_flops + self.input_flops + self.weight_flops


# --- parameters ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter: its whole shape, and the axis that splits each dim.

    A MATRIX is multiplied with and a TABLE looked up: both are stored in pieces along z. `is_tied`:
    it is the first block's own, held here too. `in_muon`: Muon updates it, AdamW the others.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    role: str = VECTOR
    is_tied: bool = False
    in_muon: bool = False

    def num_gathered(self, mesh: Mesh) -> int:
        """Return the elements that a rank computes with; refuse sizes that do not divide."""
        return math.prod(self._block_shape(mesh))

    def is_gathered(self, mesh: Mesh) -> bool:
        """Return whether a rank stores less than it computes with."""
        return self.role != VECTOR and mesh.z > 1 and self._block_shape(mesh)[0] % mesh.z == 0

    def num_stored(self, mesh: Mesh) -> int:
        """Return the elements that a rank stores."""
        return self.num_gathered(mesh) // (mesh.z if self.is_gathered(mesh) else 1)

    def _block_shape(self, mesh: Mesh) -> tuple[int, ...]:
        cuts = enumerate(self.axes)
        shards = tuple(Shard(dim, axis) for dim, axis in cuts if axis is not None)
        return Placement(shape=self.shape, shards=shards).local_shape(mesh)


BlockParameters = tuple[Parameter, ...]
Axes = tuple[str | None, str | None]  # of the inputs and of the outputs of a layer


def linear_parameters(inputs: int, outputs: int, axes: Axes, bias: bool) -> BlockParameters:
    """Return the weight of a linear layer, and its bias if it has one."""
    taken, given = axes
    weight = Parameter(shape=(outputs, inputs), axes=(given, taken), role=MATRIX, in_muon=True)
    return (weight, *vector(outputs, given) * bias)


def vector(size: int, axis: str | None) -> BlockParameters:
    """Return a parameter of one dim."""
    return (Parameter(shape=(size,), axes=(axis,)),)


# --- layers that x, y and z split ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLayer:
    """One layer and one microbatch, whole: O = I W, or a lookup in a table.

    A lookup is a product with rows that are mostly zeros: its inputs are split over the axis of the
    table's rows. `product_flops` is the cost of each product of forward and backward;
    `before_flops` and `after_flops` are the other flop of the block, before the layer in forward
    and after it in backward. The inputs of a layer `of_data` need no gradient.
    """

    parameter: Parameter
    num_inputs: int
    num_outputs: int
    product_flops: float
    before_flops: float = 0.0
    after_flops: float = 0.0
    of_data: bool = False

    @property
    def in_axis(self) -> str | None:
        """The axis that splits the inputs: partial outputs are summed over it."""
        return self.parameter.axes[0 if self.parameter.role == TABLE else 1]

    @property
    def out_axis(self) -> str | None:
        """The axis that splits the outputs: partial gradients of the inputs are summed over it."""
        return self.parameter.axes[1 if self.parameter.role == TABLE else 0]


BlockLayers = tuple[SplitLayer, ...]

# --- activations ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockActivations:
    """The bytes that one block keeps of one microbatch for its backward, on one rank.

    `kept_bytes` leave out the block's input and output, for its neighbours may keep the same
    memory. `scratch_bytes` come and go while the block runs backward, above the kept ones:
    gradients of activations and of one weight. A block that was recomputed makes the gradients of
    all its weights at once: `held_bytes` of them are there beside the scratch already, all
    `gradient_bytes` are among the `rerun_bytes` when kept tensors are gone. These are estimates.
    """

    input_bytes: int
    output_bytes: int
    kept_bytes: int
    scratch_bytes: int = 0
    held_bytes: int = 0
    rerun_bytes: int = 0
    gradient_bytes: int = 0
    keeps_input: bool = True
    keeps_output: bool = False

    @property
    def saved_bytes(self) -> int:
        """All that autograd saves for the block's backward."""
        ends = self.keeps_input * self.input_bytes + self.keeps_output * self.output_bytes
        return self.kept_bytes + ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The microbatch, mesh and precision that the blocks of a rank compute with.

    In bf16 (autocast) the stream between blocks, norms and softmax stay fp32, and torch's own
    layers keep a bf16 copy of each weight; split ones make it anew. With weights in half (masters)
    everything but softmax is in half too, and nothing is copied.
    """

    microbatch_size: int
    mesh: Mesh
    precision: str = "fp32"

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of a product."""
        return FLOAT if self.precision == "fp32" else HALF

    @property
    def weight_bytes(self) -> int:
        """Bytes of an element of a weight, of its gradient, and of the stream between blocks."""
        return HALF if self.precision.endswith("_master") else FLOAT

    @property
    def copies_weights(self) -> bool:
        """Whether a weight is kept in bf16 for the backward of every microbatch."""
        return self.precision == "bf16" and self.mesh.x * self.mesh.y * self.mesh.z == 1

    def share(self, size: int, axis: str | None) -> int:
        """Return this rank's part of features that an axis splits."""
        return size if axis is None else size // self.mesh.size(axis)
