"""Forms: which modules multiply with a weight, and how that weight and its activations lie."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ganglion.execute.tensor.products import ConvProduct, FlippedProduct, LinearProduct, Product

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
Conv = (
    nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
)


@dataclass(frozen=True, slots=True)
class Form:
    """A product, the dims of outputs and inputs in its weight, and that of features in images."""

    product: Product
    out_dim: int = 0
    in_dim: int = 1
    feature_dim: int = -1


def form_of(module: nn.Module) -> Form | None:
    """Return what a module multiplies; None if it does not, or cannot be split."""
    if isinstance(module, nn.Linear):
        return Form(LinearProduct())
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # of Hugging Face's GPT-2
        return Form(FlippedProduct(), out_dim=1, in_dim=0)
    if not isinstance(module, (*_CONVS, *_TRANSPOSED)) or obstacle(module) is not None:
        return None
    transposed = isinstance(module, _TRANSPOSED)
    product = ConvProduct(
        tuple(module.stride),
        _padding(module),
        tuple(module.dilation),
        transposed,
        tuple(module.output_padding),
    )
    return Form(product, *((1, 0) if transposed else (0, 1)), feature_dim=1)


def obstacle(module: nn.Module) -> str | None:
    """Say why a convolution cannot be split; None if it can, or is none."""
    if not isinstance(module, (*_CONVS, *_TRANSPOSED)):
        return None
    if module.groups > 1:
        return f"its {module.groups} groups of channels do not mix, which no split product knows"
    if module.padding_mode != "zeros":
        return f"padding_mode={module.padding_mode!r} pads with more than zeros"
    if module.padding == "same" and any(total % 2 for total in _same_padding(module)):
        return 'padding="same" with an even kernel pads its two sides differently'
    return None


def _padding(module: Conv) -> tuple[int, ...]:
    if module.padding == "same":
        return tuple(total // 2 for total in _same_padding(module))
    if module.padding == "valid":
        return (0,) * len(module.kernel_size)
    return tuple(int(size) for size in module.padding)


def _same_padding(module: Conv) -> tuple[int, ...]:
    """Return by how much each dim is padded, both sides together."""
    sizes = zip(module.dilation, module.kernel_size, strict=True)
    return tuple(dilation * (size - 1) for dilation, size in sizes)
