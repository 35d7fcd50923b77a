"""Cuts: how each layer of a model is split over x and y, by the name of its module.

For O = I W the features of I are split over y and those of O over x; the next layer swaps the two,
so that activations never move between layers (AxoNN-4D, spec B.1):

    features over y --[NORMAL: up]--> over x --[TRANSPOSED: down]--> over y

Rows, which are samples, are split over z and data. On a side whose axis is None the activations are
whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ganglion.errors import LayoutError

LAYER, RMS, BATCH, GROUP = "layer", "rms", "batch", "group"
NORM_KINDS: tuple[str, ...] = (LAYER, RMS, BATCH, GROUP)


def _check_axes(cut: object, *axes: str | None) -> None:
    named = [axis for axis in axes if axis is not None]
    for axis in named:
        if axis not in ("x", "y"):
            raise LayoutError(
                f"{cut}: {axis!r} splits no features: use 'x', 'y' or None; samples are split "
                f"over z and data without a cut"
            )
    if len(set(named)) < len(named):
        raise LayoutError(f"{cut}: one axis cannot split both sides: use 'x' for one, 'y' or None")


@dataclass(frozen=True, slots=True)
class LinearCut:
    """The cut of a linear layer or a convolution: the axes of its input and output features.

    `sections` counts equal parts of the output that are cut separately: 3 for fused queries, keys
    and values; `in_sections` those of the input: 2 after concatenating two outputs. A layer that
    `takes_whole` cuts whole activations itself; one that `gives_whole` gathers its output.
    """

    in_axis: str | None
    out_axis: str | None
    sections: int = 1
    takes_whole: bool = False
    gives_whole: bool = False
    in_sections: int = 1

    def __post_init__(self) -> None:
        _check_axes(self, self.in_axis, self.out_axis)
        if (self.takes_whole and self.in_sections > 1) or (self.gives_whole and self.sections > 1):
            raise LayoutError(
                f"{self}: whole activations are cut and gathered as one section: give sections "
                f"only on a side that stays split"
            )


@dataclass(frozen=True, slots=True)
class EmbeddingCut:
    """The cut of an embedding table: the axes that split its rows and its features."""

    row_axis: str | None
    feature_axis: str | None

    def __post_init__(self) -> None:
        _check_axes(self, self.row_axis, self.feature_axis)


@dataclass(frozen=True, slots=True)
class NormCut:
    """The cut of a norm over features, or channels, that an axis splits."""

    axis: str | None
    kind: str = LAYER

    def __post_init__(self) -> None:
        _check_axes(self, self.axis)
        if self.kind not in NORM_KINDS:
            raise LayoutError(f"{self}: kind is one of {list(NORM_KINDS)}")


@dataclass(frozen=True, slots=True)
class DropoutCut:
    """The cut of a dropout on features that an axis splits at `dim`, 1 for images and heads."""

    axis: str | None
    dim: int = -1

    def __post_init__(self) -> None:
        _check_axes(self, self.axis)


@dataclass(frozen=True, slots=True)
class WidthCut:
    """The cut of a module that stores widths: the attributes to divide by the size of an axis.

    `counts` are numbers, with their names, that the axis must divide. A `refusal` is the reason why
    the module cannot be split.
    """

    axis: str
    attributes: tuple[str, ...] = ()
    counts: tuple[tuple[str, int], ...] = ()
    refusal: str = ""

    def __post_init__(self) -> None:
        _check_axes(self, self.axis)


Cut = LinearCut | EmbeddingCut | NormCut | DropoutCut | WidthCut

NORMAL = LinearCut("y", "x")
TRANSPOSED = LinearCut("x", "y")
# For a layer whose neighbours are not known.
WHOLE = LinearCut("y", "x", takes_whole=True, gives_whole=True)


@dataclass(frozen=True, slots=True)
class ModelCuts:
    """The cuts of a model by the names of its modules, and the axis of its output features.

    `output_dim` is the dim of those features: 1 for images.
    """

    modules: Mapping[str, Cut]
    output_axis: str | None = None
    output_dim: int = -1

    def __post_init__(self) -> None:
        _check_axes(self, self.output_axis)
