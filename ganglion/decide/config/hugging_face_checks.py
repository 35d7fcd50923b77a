"""Which tensor axes Hugging Face's GPT-2 and Llama fit, from the settings in a run file alone.

What `model.args` leaves out has the default of `transformers`, which is not imported here: a test
compares the tables below with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ganglion.decide.config.divisible import check_divides
from ganglion.decide.plan import Plan
from ganglion.errors import LayoutError

BUILDER = "ganglion.execute.models.hugging_face:build"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The settings of a family that tensor axes must fit; `defaults` are those of transformers.

    `over_x` are counted out over x, `over_y` over y; `dropout` is that of attention. `mirrors`:
    what has no value has another setting's, times a factor. `aliases` are other names of settings.
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
    """Refuse axes that `model.args` do not fit; what is no setting of sizes is left to others."""
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
