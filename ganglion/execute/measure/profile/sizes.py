"""What a profile measures: shapes, sizes and how long each may take."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ganglion.decide.shapes import BuiltShape, GPTShape, MLPShape
from ganglion.units import KIB, MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCase:
    """A small model that is trained for a few steps to time its forward, backward and update."""

    shape: BuiltShape
    microbatch_size: int

    @property
    def label(self) -> str:
        """What is measured, for tables."""
        shape, size = self.shape, self.microbatch_size
        if isinstance(shape, GPTShape):
            return (
                f"gpt {shape.num_layers} x {shape.hidden}, vocab {shape.vocab_size}, "
                f"{size} x {shape.seq_len} tokens"
            )
        assert isinstance(shape, MLPShape), "profiles train these two"
        return f"mlp {shape.num_layers} x {shape.hidden}, {size} samples"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSizes:
    """All sizes of a profile."""

    products: tuple[tuple[int, int, int], ...]  # m, k, n
    half_products: tuple[tuple[int, int, int], ...]  # in bf16
    models: tuple[ModelCase, ...]
    num_microbatches: int
    num_steps: int
    message_bytes: tuple[int, ...]
    ring_bytes: tuple[int, ...]
    tier_bytes: int
    budget_s: float  # of one timing


def _gpt(layers: int, hidden: int, vocab: int, seq_len: int, size: int) -> ModelCase:
    heads = max(1, hidden // 64)
    shape = GPTShape(
        vocab_size=vocab,
        seq_len=seq_len,
        num_layers=layers,
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_size=hidden // heads,
        mlp_hidden=4 * hidden,
    )
    return ModelCase(shape=shape, microbatch_size=size)


def _mlp(layers: int, hidden: int, inputs: int, size: int) -> ModelCase:
    shape = MLPShape(num_inputs=inputs, num_outputs=16, num_layers=layers, hidden=hidden)
    return ModelCase(shape=shape, microbatch_size=size)


def profile_sizes(*, quick: bool, has_device: bool) -> ProfileSizes:
    """Return the sizes of a profile; those of a device would take minutes on a processor."""
    sizes = QUICK if quick else FULL
    return _of_device(sizes) if has_device else sizes


_FACTOR = 8  # a device reaches its rate with products that much longer on each side


def _of_device(sizes: ProfileSizes) -> ProfileSizes:
    return replace(
        sizes,
        products=tuple((m * _FACTOR, k * _FACTOR, n * _FACTOR) for m, k, n in sizes.products),
        half_products=tuple(
            (m * _FACTOR, k * _FACTOR, n * _FACTOR) for m, k, n in sizes.half_products
        ),
        models=tuple(_wider(case) for case in sizes.models),
        message_bytes=tuple(_FACTOR * size for size in sizes.message_bytes),
        ring_bytes=tuple(_FACTOR * size for size in sizes.ring_bytes),
        tier_bytes=_FACTOR * sizes.tier_bytes,
    )


def _wider(case: ModelCase) -> ModelCase:
    shape = case.shape
    if isinstance(shape, MLPShape):
        wider = replace(shape, hidden=shape.hidden * _FACTOR, num_inputs=shape.num_inputs * _FACTOR)
        return ModelCase(shape=wider, microbatch_size=case.microbatch_size * _FACTOR)
    assert isinstance(shape, GPTShape), "profiles train these two"
    return _gpt(
        shape.num_layers,
        shape.hidden * _FACTOR,
        shape.vocab_size * _FACTOR,
        shape.seq_len * _FACTOR,
        case.microbatch_size,
    )


QUICK = ProfileSizes(
    products=((64, 64, 64), (128, 256, 512), (256, 256, 256), (512, 512, 512), (1024, 256, 1024)),
    half_products=((256, 256, 256),),
    models=(
        _gpt(1, 64, 256, 32, 1),
        _gpt(2, 128, 256, 64, 4),
        _gpt(1, 256, 1024, 64, 2),
        _gpt(2, 192, 256, 128, 2),
        _gpt(1, 384, 256, 128, 2),
        _mlp(3, 64, 64, 8),
        _mlp(3, 512, 128, 64),
    ),
    num_microbatches=4,
    num_steps=5,
    message_bytes=(KIB, 64 * KIB, MIB, 4 * MIB),
    ring_bytes=(4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB),
    tier_bytes=8 * MIB,
    budget_s=0.03,
)
FULL = ProfileSizes(
    products=(
        *((32, 64, 64), (64, 64, 64), (128, 128, 128), (256, 256, 256), (512, 512, 512)),
        *((1024, 1024, 1024), (64, 512, 512), (128, 256, 1024), (512, 128, 512), (2048, 512, 512)),
    ),
    half_products=((128, 128, 128), (256, 256, 256), (512, 512, 512)),
    models=(
        *(_gpt(1, 64, 256, 32, 1), _gpt(1, 64, 256, 64, 8), _gpt(2, 128, 256, 64, 4)),
        *(_gpt(1, 128, 2048, 64, 2), _gpt(1, 256, 1024, 64, 2), _gpt(2, 192, 256, 128, 2)),
        *(_gpt(4, 128, 256, 128, 1), _gpt(2, 256, 256, 128, 4), _gpt(1, 384, 4096, 128, 2)),
        *(_gpt(1, 512, 1024, 128, 2), _gpt(3, 320, 512, 64, 4)),
        *(_mlp(3, 64, 64, 8), _mlp(3, 512, 128, 64), _mlp(6, 256, 256, 32)),
        *(_mlp(2, 1024, 512, 128), _mlp(4, 768, 64, 16)),
    ),
    num_microbatches=4,
    num_steps=8,
    message_bytes=(KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB),
    ring_bytes=(4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB),
    tier_bytes=32 * MIB,
    budget_s=0.1,
)
