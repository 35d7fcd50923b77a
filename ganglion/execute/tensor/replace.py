"""Make the split counterpart of each kind of module, with this rank's pieces."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from ganglion.decide.topology import (
    BATCH,
    GROUP,
    LAYER,
    RMS,
    Cut,
    DropoutCut,
    EmbeddingCut,
    LinearCut,
    NormCut,
    Shard,
    WidthCut,
)
from ganglion.errors import LayoutError
from ganglion.execute.tensor.grid import Grid
from ganglion.execute.tensor.layers import SplitDropout, SplitEmbedding, SplitProduct
from ganglion.execute.tensor.multiply import Layer
from ganglion.execute.tensor.norms import (
    BATCH_NORMS,
    SplitGroupNorm,
    SplitLayerNorm,
    SplitRMSNorm,
)
from ganglion.execute.tensor.pieces import Cutter
from ganglion.execute.tensor.products import Form, form_of, why_not_split
from ganglion.execute.tensor.tuning import tuned
from ganglion.execute.tensor.weights import StoredWeight, Weights


class Replacer:
    """Makes split modules out of whole ones."""

    def __init__(self, grid: Grid, weights: Weights, cutter: Cutter) -> None:
        """Store weights in `weights`, and cut with `cutter`."""
        self._grid = grid
        self._weights = weights
        self._cutter = cutter

    def replaced(self, name: str, module: nn.Module, cut: Cut) -> nn.Module:
        """Return the replacement of a module: another, or the same with its pieces."""
        match cut:
            case LinearCut():
                return self._product(name, module, cut)
            case EmbeddingCut():
                return self._embedding(name, module, cut)
            case NormCut():
                return self._norm(name, module, cut)
            case DropoutCut():
                return self._dropout(name, module, cut)
            case WidthCut():
                return self._narrowed(name, module, cut)

    def _product(self, name: str, module: nn.Module, cut: LinearCut) -> nn.Module:
        form = form_of(module)
        if form is None:
            why = why_not_split(module) or "only linear layers and convolutions can"
            raise _misfit(name, module, cut, why)
        whole = _parameter(module, "weight")
        in_features = whole.shape[form.in_dim]
        layer = Layer(
            product=tuned(form.product, self._grid.tuner),
            weight=self._stored(f"{name}.weight", whole, _weight_shards(form, cut)),
            in_group=self._grid.group(cut.in_axis),
            out_group=self._grid.group(cut.out_axis),
            overlap=self._grid.settings.overlap_all_reduce,
            halves=self._grid.settings.halves,
        )
        return SplitProduct(
            name,
            layer,
            self._vector(name, module, "bias", cut.out_axis, cut.sections),
            feature_dim=form.feature_dim,
            in_features=in_features // (1 if cut.takes_whole else self._grid.size(cut.in_axis)),
            takes_whole=cut.takes_whole,
            gives_whole=cut.gives_whole,
        )

    def _embedding(self, name: str, module: nn.Module, cut: EmbeddingCut) -> nn.Module:
        if not isinstance(module, nn.Embedding):
            raise _misfit(name, module, cut, "only embeddings can")
        options = ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse")
        present = [option for option in options if getattr(module, option)]
        if module.padding_idx is not None or present:
            raise LayoutError(
                f"{name} is an embedding with {', '.join(present or options[:1])}, which a split "
                f"table does not have: build it without, or leave it out of the cuts"
            )
        shards = _shards((0, cut.row_axis), (1, cut.feature_axis))
        whole = _parameter(module, "weight")
        stored = self._stored(f"{name}.weight", whole, shards, "embedding")
        rows = self._grid.share(module.num_embeddings, cut.row_axis, f"the rows of {name}")
        return SplitEmbedding(stored, self._grid.group(cut.row_axis, "embedding"), rows)

    def _norm(self, name: str, module: nn.Module, cut: NormCut) -> nn.Module:
        fits = {
            LAYER: isinstance(module, nn.LayerNorm) and len(module.normalized_shape) == 1,
            BATCH: isinstance(module, BATCH_NORMS),
            GROUP: isinstance(module, nn.GroupNorm),
        }
        if not fits.get(cut.kind, hasattr(module, "weight")):
            raise _misfit(name, module, cut, f"it is no {cut.kind} norm over one dim of features")
        group = self._grid.group(cut.axis, "norm")
        if group is None:
            return module
        norm = cast(Any, module)
        weight, bias = (self._vector(name, module, part, cut.axis) for part in ("weight", "bias"))
        if cut.kind == LAYER:
            return SplitLayerNorm(weight, bias, float(norm.eps), group)
        if cut.kind == RMS:
            # torch's may have no epsilon, that of Llama has another name.
            eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
            return SplitRMSNorm(weight, None if eps is None else float(eps), group)
        if cut.kind == GROUP and norm.num_groups % group.size:
            return SplitGroupNorm(norm.num_groups, weight, bias, norm.eps, group)
        # Every rank has whole channels or groups, so torch's own module on fewer of them is right.
        norm.weight, norm.bias = weight, bias
        if cut.kind == GROUP:
            norm.num_groups //= group.size
            norm.num_channels //= group.size
            return module
        for part in ("running_mean", "running_var"):
            whole: Tensor | None = getattr(module, part)
            piece = self._cutter.buffer(f"{name}.{part}", whole, *_shards((0, cut.axis)))
            setattr(norm, part, piece)
        norm.num_features //= group.size
        return module

    def _dropout(self, name: str, module: nn.Module, cut: DropoutCut) -> nn.Module:
        if not isinstance(module, nn.Dropout):
            raise _misfit(name, module, cut, "only nn.Dropout can")
        group = self._grid.group(cut.axis)
        return module if group is None else SplitDropout(module.p, group, cut.dim)

    def _narrowed(self, name: str, module: nn.Module, cut: WidthCut) -> nn.Module:
        size = self._grid.size(cut.axis)
        if cut.refusal and size > 1:
            raise LayoutError(
                f"{name} cannot be split over {cut.axis} = {size}: {cut.refusal}, or "
                f"parallel.{cut.axis} = 1"
            )
        for key, count in cut.counts:
            self._grid.share(count, cut.axis, f"{name}: {key}")
        for attribute in cut.attributes:
            share = self._grid.share(getattr(module, attribute), cut.axis, f"{name}.{attribute}")
            setattr(module, attribute, len(share))
        return module

    # --- parts of modules ----------------------------------------------------------------------

    def _stored(
        self, name: str, whole: nn.Parameter, shards: tuple[Shard, ...], label: str = ""
    ) -> StoredWeight:
        piece = self._cutter.weight(name, whole, *shards)
        axes = {shard.axis for shard in self._cutter.placement_of(piece).shards}
        return self._weights.store(piece, name=name, is_split="z" in axes, label=label)

    def _vector(
        self, name: str, module: nn.Module, part: str, axis: str | None, sections: int = 1
    ) -> nn.Parameter | None:
        whole = getattr(module, part, None)
        shards = () if axis is None else (Shard(0, axis, sections),)
        return self._cutter.vector(f"{name}.{part}", whole, *shards)


def _weight_shards(form: Form, cut: LinearCut) -> tuple[Shard, ...]:
    dims = (
        (form.out_dim, cut.out_axis, cut.sections),
        (form.in_dim, cut.in_axis, cut.in_sections),
    )
    return tuple(Shard(dim, axis, sections) for dim, axis, sections in dims if axis is not None)


def _shards(*pairs: tuple[int, str | None]) -> tuple[Shard, ...]:
    return tuple(Shard(dim, axis) for dim, axis in pairs if axis is not None)


def _parameter(module: nn.Module, name: str) -> nn.Parameter:
    found = getattr(module, name)
    assert isinstance(found, nn.Parameter)
    return found


def _misfit(name: str, module: nn.Module, cut: Cut, why: str) -> LayoutError:
    return LayoutError(
        f"{name} is a {type(module).__name__}, which cannot be split as {cut}: {why}; give it "
        f"another cut, or none"
    )
