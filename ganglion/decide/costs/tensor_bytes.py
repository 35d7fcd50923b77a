"""Traffic of 3-D parallel products: ring-equivalent elements of one rank in one step, by axis.

A layer is O = I W with I (m, k) and W (k, n); y splits k, x splits n, z splits m and the stored W
(AxoNN-4D, 2502.08145, section V-B, equations 1 to 5; the spec's part B.3). Per layer and rank:

    all-gather z        (Gz-1) k n / (Gx Gy Gz)        of the weight, before each use
    reduce-scatter z    (Gz-1)/Gz k n / (Gx Gy)        of its gradient
    all-reduce y        2 (Gy-1)/Gy m n / (Gz Gx)      of the output, forward
    all-reduce x        2 (Gx-1)/Gx m k / (Gz Gy)      of the input's gradient, backward
    all-reduce data     2 (Gd-1)/Gd k n / (Gx Gy Gz)   of the stored gradient

A transposed layer swaps x and y. The equations count one gather; an engine that stores pieces
gathers again in backward, and once more if it recomputes: the number is always given. A first layer
whose inputs are data has no gradient of them: no gather in backward, and no all-reduce over x.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields

from ganglion.decide.shapes import GPTShape
from ganglion.decide.topology import Mesh
from ganglion.errors import LayoutError


@dataclass(frozen=True, slots=True, kw_only=True)
class Matmul:
    """O = I W: `rows` is m, of one replica in a whole step; `inputs` is k and `outputs` is n.

    Of a layer `of_data` the inputs need no gradient.
    """

    rows: int
    inputs: int
    outputs: int
    transposed: bool = False
    of_data: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """How often a step does a thing to each layer; once each is the paper's model.

    `gathers` and `scatters` move a whole weight every time. `forwards` counts passes over all rows
    of the step, however many microbatches they come in.
    """

    gathers: int = 1
    scatters: int = 1
    forwards: int = 1

    @property
    def backward_gathers(self) -> int:
        """The gathers that only gradients of inputs need."""
        return max(0, self.gathers - self.scatters * self.forwards)

    @classmethod
    def of_step(
        cls, num_microbatches: int, *, recomputes: bool = False, keeps_gathered: bool = False
    ) -> Repeats:
        """Return the repeats of an engine that gathers weights for every use, or keeps them.

        A microbatch uses a weight forward and backward, and once more if it is recomputed.
        """
        if num_microbatches < 1:
            raise LayoutError(f"a step of {num_microbatches} microbatches moves nothing: use 1")
        forwards = 2 if recomputes else 1
        if keeps_gathered:
            return cls(forwards=forwards)
        return cls(
            gathers=num_microbatches * (forwards + 1), scatters=num_microbatches, forwards=forwards
        )


PAPER = Repeats()


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Elements that one rank sends in the rings of each axis; bytes once multiplied."""

    all_gather_z: float = 0.0
    reduce_scatter_z: float = 0.0
    all_reduce_x: float = 0.0
    all_reduce_y: float = 0.0
    all_reduce_data: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )

    def __mul__(self, bytes_per_element: float) -> Traffic:
        return Traffic(**{f.name: getattr(self, f.name) * bytes_per_element for f in fields(self)})

    @property
    def along_z(self) -> float:
        """Gathers and reduce-scatters."""
        return self.all_gather_z + self.reduce_scatter_z

    @property
    def total(self) -> float:
        """Over all axes."""
        return float(sum(astuple(self)))


def tensor_traffic(layers: Iterable[Matmul], mesh: Mesh, repeats: Repeats) -> Traffic:
    """Return the elements that a rank moves for some layers in one step."""
    total = Traffic()
    for layer in layers:
        total += _layer_traffic(layer, mesh, repeats)
    return total


def _layer_traffic(layer: Matmul, mesh: Mesh, repeats: Repeats) -> Traffic:
    # The axes by their roles: the one that splits the inputs sums the output, and so on.
    inner, outer = (mesh.x, mesh.y) if layer.transposed else (mesh.y, mesh.x)
    weight, blocks = layer.inputs * layer.outputs, mesh.x * mesh.y
    forward = 2 * repeats.forwards * ring_sent(layer.rows * layer.outputs, inner, mesh.z * outer)
    backward = 2 * ring_sent(layer.rows * layer.inputs, outer, mesh.z * inner)
    gathers = repeats.gathers
    if layer.of_data:
        backward, gathers = 0.0, gathers - repeats.backward_gathers
    of_block = ring_sent(weight, mesh.z, blocks)
    return Traffic(
        all_gather_z=gathers * of_block,
        reduce_scatter_z=repeats.scatters * of_block,
        all_reduce_x=forward if layer.transposed else backward,
        all_reduce_y=backward if layer.transposed else forward,
        all_reduce_data=2 * ring_sent(weight, mesh.data, blocks * mesh.z),
    )


def ring_sent(whole: int, num_ranks: int, num_blocks: int = 1) -> float:
    """Return the elements a rank sends to gather, or to reduce, one of `num_blocks` of a whole.

    An all-reduce is both. Divided last: a whole number of elements comes out as such.
    """
    return (num_ranks - 1) * whole / (num_ranks * num_blocks)


def gpt_matmuls(shape: GPTShape, rows: int) -> list[Matmul]:
    """Return the products of a GPT in the order of the model; the head comes last."""
    hidden = shape.hidden
    layer = [
        Matmul(rows=rows, inputs=hidden, outputs=shape.qkv_size),
        Matmul(rows=rows, inputs=shape.query_size, outputs=hidden, transposed=True),
        Matmul(rows=rows, inputs=hidden, outputs=shape.mlp_hidden),
        Matmul(rows=rows, inputs=shape.mlp_hidden, outputs=hidden, transposed=True),
    ]
    return [*layer * shape.num_layers, Matmul(rows=rows, inputs=hidden, outputs=shape.vocab_size)]
