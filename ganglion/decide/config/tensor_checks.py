"""Which tensor axes a model can be split over, from the numbers of its run file alone.

A weight (outputs, inputs) is cut along its outputs by one of x and y, along its inputs by the
other, and its remaining rows by z, if z divides them. Settings that `model.args` of a Hugging Face
model leaves out have the defaults of `transformers`, which is not imported here: a test compares
the tables below with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ganglion.decide.config.model import read_model
from ganglion.decide.config.schema import ModelSection, RunFile
from ganglion.decide.plan import Plan
from ganglion.decide.shapes import CONV_CHANNELS, CONV_WIDTHS
from ganglion.errors import LayoutError


def check_divides(key: str, size: int, axis: str, parts: int) -> None:
    """Refuse a size, by the key it is known by, that cannot be split over an axis."""
    if size % parts:
        raise LayoutError(
            f"{key} = {size} cannot be split over parallel.{axis} = {parts}: choose a multiple of "
            f"{parts}, or another parallel.{axis}"
        )


def check_tensor_axes(run: RunFile, plan: Plan) -> None:
    """Refuse tensor axes that the model's sizes do not fit."""
    if plan.x * plan.y * plan.z == 1:
        return
    if run.model.description:
        _check_described(run.model.description, plan)
    if run.model.build == BUILDER:
        check_hugging_face(run.model.args, plan)
    if not run.model.build and not run.model.description:
        check = {"gpt": _check_gpt, "mlp": _check_mlp, "conv": _check_conv}[run.model.kind]
        check(run.model, plan)


def check_vocabulary(vocab_size: int, plan: Plan) -> None:
    """Refuse a vocabulary, known once the data are read, that x does not divide."""
    check_divides("the vocabulary of the data (model.vocab_size = 0)", vocab_size, "x", plan.x)


def _check_gpt(model: ModelSection, plan: Plan) -> None:
    kv_heads = model.kv_heads or model.heads
    check_divides("model.heads", model.heads, "x", plan.x)
    check_divides("model.kv_heads", kv_heads, "x", plan.x)
    check_divides("model.mlp_hidden", model.mlp_hidden or 4 * model.hidden, "x", plan.x)
    check_divides("model.vocab_size", model.vocab_size, "x", plan.x)
    check_divides("model.hidden", model.hidden, "y", plan.y)


def _check_mlp(model: ModelSection, plan: Plan) -> None:
    """Layers take turns: the first gives its outputs over x, the next over y; ends are whole."""
    if model.layers > 1:
        check_divides("model.hidden", model.hidden, "x", plan.x)
    if model.layers > 2:
        check_divides("model.hidden", model.hidden, "y", plan.y)


def _check_conv(model: ModelSection, plan: Plan) -> None:
    """Its layers take turns too; the last one's outputs are whole."""
    turns = itertools.cycle([("x", plan.x), ("y", plan.y)])
    for size, (axis, parts) in zip((*CONV_CHANNELS, *CONV_WIDTHS), turns, strict=False):
        check_divides(f'the outputs of a layer of model.kind = "{model.kind}",', size, axis, parts)


def _check_described(description: str, plan: Plan) -> None:
    """Refuse axes that split nothing, or that do not divide what they split."""
    model = read_model(description)
    for axis in ("x", "y"):
        parts = plan.mesh().size(axis)
        if parts > 1 and not any(split.axis == axis for split in model.splits):
            raise LayoutError(
                f"parallel.{axis} = {parts}, but model.description = {description!r} names no size "
                f"that {axis} could split: set parallel.{axis} = 1"
            )
    for split in model.splits:
        parts = plan.mesh().size(split.axis)
        check_divides(f"{split.name} of {description}", split.size, split.axis, parts)


# --- Hugging Face --------------------------------------------------------------------------------


BUILDER = "ganglion.execute.models.hugging_face:build"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The settings of a family that tensor axes must fit; `defaults` are those of transformers.

    `over_x` are split over x, `over_y` over y; `dropout` is that of attention. `mirrors`: a setting
    without a value has another's, times a factor. `aliases` are other names of settings.
    """

    over_x: tuple[str, ...]
    over_y: tuple[str, ...]
    dropout: str
    defaults: Mapping[str, Any]
    mirrors: Mapping[str, tuple[str, int]]
    aliases: Mapping[str, str]


FAMILIES: Mapping[str, Sizes] = MappingProxyType(
    {
        "gpt2": Sizes(
            over_x=("n_head", "n_inner", "vocab_size"),
            over_y=("n_embd",),
            dropout="attn_pdrop",
            defaults={
                "n_head": 12,
                "n_embd": 768,
                "n_inner": None,
                "vocab_size": 50257,
                "attn_pdrop": 0.1,
            },
            mirrors={"n_inner": ("n_embd", 4)},
            aliases={"num_attention_heads": "n_head", "hidden_size": "n_embd"},
        ),
        "llama": Sizes(
            over_x=(
                "num_attention_heads",
                "num_key_value_heads",
                "intermediate_size",
                "vocab_size",
            ),
            over_y=("hidden_size",),
            dropout="attention_dropout",
            defaults={
                "num_attention_heads": 32,
                "num_key_value_heads": None,
                "hidden_size": 4096,
                "intermediate_size": 11008,
                "vocab_size": 32000,
                "attention_dropout": 0.0,
                "pad_token_id": None,
            },
            mirrors={"num_key_value_heads": ("num_attention_heads", 1)},
            aliases={},
        ),
    }
)


def check_hugging_face(args: Mapping[str, Any], plan: Plan) -> None:
    """Refuse axes that the sizes in `model.args` do not fit; other settings are not checked."""
    sizes = FAMILIES.get(str(args.get("model_type")))
    if sizes is None:
        return
    settings = _settings(sizes, args)
    for key, axis in (*((k, "x") for k in sizes.over_x), *((k, "y") for k in sizes.over_y)):
        if isinstance(settings[key], int):
            check_divides(f"model.args.{key}", settings[key], axis, plan.mesh().size(axis))
    if plan.x > 1 and settings[sizes.dropout]:
        raise LayoutError(
            f"model.args.{sizes.dropout} = {settings[sizes.dropout]} draws one mask for the heads "
            f"of all ranks, so parallel.x = {plan.x} would change the result: set "
            f"model.args.{sizes.dropout} = 0, or parallel.x = 1"
        )
    if settings.get("pad_token_id") is not None:
        raise LayoutError(
            f"model.args.pad_token_id = {settings['pad_token_id']} gives the embedding a row "
            f"without gradient, which a table split over parallel.x = {plan.x}, y = {plan.y}, z = "
            f"{plan.z} does not have: leave it out"
        )


def _settings(sizes: Sizes, args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings as a configuration of transformers would have them."""
    given = {sizes.aliases.get(key, key): value for key, value in args.items()}
    settings = {**sizes.defaults, **given}
    for key, (other, factor) in sizes.mirrors.items():
        if settings[key] is None and isinstance(settings[other], int):
            settings[key] = factor * settings[other]
    return settings
