"""Models by name: `gpt-12b`, or a family with sizes, `gpt:layers=48,hidden=4512,heads=24,seq=512`.

NAME                    a known size, with its source in the table below
NAME:seq=1024           the same with other sizes
FAMILY:key=value,...    sizes of your own
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

from ganglion.decide.shapes.conv import ConvShape, describe_conv
from ganglion.decide.shapes.described import DescribedModel
from ganglion.decide.shapes.gpt import GPTShape, describe_gpt
from ganglion.decide.shapes.llama_bert import describe_bert, describe_llama
from ganglion.decide.shapes.mlp import MLPShape, describe_mlp
from ganglion.decide.shapes.vgg import describe_vgg19
from ganglion.errors import ConfigError, LayoutError

_REQUIRED = 0  # a size without a default
_LLAMA_MULTIPLE = 256  # to which the width of Llama's MLP is rounded up
_GATE_SHARE = (8, 3)  # of the width of the model: three matrices with the weights of two

Sizes = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Family:
    """A closed form: its sizes with their defaults, 0 where one must be given or follows."""

    describe: Callable[[Sizes], DescribedModel]
    sizes: Sizes
    required: tuple[str, ...] = ()


def _transformer_shape(sizes: Sizes, mlp_hidden: int, positions: str) -> GPTShape:
    hidden, heads = sizes["hidden"], sizes["heads"]
    if not sizes["head_size"] and hidden % heads:
        raise LayoutError(
            f"hidden={hidden} is not a multiple of heads={heads}: change one of them, or give "
            f"head_size"
        )
    return GPTShape(
        vocab_size=sizes["vocab"],
        seq_len=sizes["seq"],
        num_layers=sizes["layers"],
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=sizes["kv_heads"] or heads,
        head_size=sizes["head_size"] or hidden // heads,
        mlp_hidden=sizes["mlp_hidden"] or mlp_hidden,
        positions=positions,
        tied_embedding=bool(sizes["tied"]),
        bias=positions == "learned",
    )


def _gpt(sizes: Sizes) -> DescribedModel:
    return describe_gpt(_transformer_shape(sizes, 4 * sizes["hidden"], "learned"))


def _bert(sizes: Sizes) -> DescribedModel:
    return describe_bert(_transformer_shape(sizes, 4 * sizes["hidden"], "learned"))


def _llama(sizes: Sizes) -> DescribedModel:
    wanted = sizes["hidden"] * _GATE_SHARE[0] // _GATE_SHARE[1]
    rounded = -(-wanted // _LLAMA_MULTIPLE) * _LLAMA_MULTIPLE
    return describe_llama(_transformer_shape(sizes, rounded, "rotary"))


def _mlp(sizes: Sizes) -> DescribedModel:
    return describe_mlp(
        MLPShape(
            num_inputs=sizes["inputs"],
            num_outputs=sizes["outputs"],
            num_layers=sizes["layers"],
            hidden=sizes["hidden"],
        )
    )


def _conv(sizes: Sizes) -> DescribedModel:
    if sizes["image"] < 12 or sizes["image"] % 2:
        raise LayoutError(
            f"image={sizes['image']} leaves nothing of an image behind two convolutions of 5 x 5 "
            f"with pooling: give an even size of at least 12"
        )
    return describe_conv(
        ConvShape(
            image_size=sizes["image"], num_channels=sizes["channels"], num_outputs=sizes["outputs"]
        )
    )


def _transformer_family(
    describe: Callable[[Sizes], DescribedModel], vocab: int, seq: int, tied: int
) -> Family:
    sizes = {"layers": _REQUIRED, "hidden": _REQUIRED, "heads": _REQUIRED}
    sizes |= {"vocab": vocab, "seq": seq, "kv_heads": 0, "head_size": 0, "mlp_hidden": 0}
    return Family(describe, MappingProxyType(sizes | {"tied": tied}), ("layers", "hidden", "heads"))


# GPT and BERT have learned positions, biases and 4 * hidden in the MLP; 51200 token ids are those
# of the GPTs in AxoNN's papers.
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gpt": _transformer_family(_gpt, vocab=51200, seq=1024, tied=1),
        "bert": _transformer_family(_bert, vocab=30522, seq=512, tied=1),
        "llama": _transformer_family(_llama, vocab=32000, seq=2048, tied=0),
        "mlp": Family(
            _mlp, MappingProxyType({"inputs": 784, "outputs": 10, "layers": 4, "hidden": 256})
        ),
        "conv": Family(_conv, MappingProxyType({"image": 28, "channels": 1, "outputs": 10})),
        "vgg19": Family(
            lambda sizes: describe_vgg19(sizes["outputs"]), MappingProxyType({"outputs": 1000})
        ),
    }
)


def _gpt_sizes(layers: int, hidden: int, heads: int, seq: int, vocab: int = 51200) -> str:
    return f"gpt:layers={layers},hidden={hidden},heads={heads},seq={seq},vocab={vocab}"


KNOWN_MODELS: Mapping[str, str] = MappingProxyType(
    {
        # GPT-2 (Radford et al. 2019, table 2, with the heads of the released weights).
        "gpt2": _gpt_sizes(12, 768, 12, 1024, 50257),
        "gpt2-medium": _gpt_sizes(24, 1024, 16, 1024, 50257),
        "gpt2-large": _gpt_sizes(36, 1280, 20, 1024, 50257),
        "gpt2-xl": _gpt_sizes(48, 1600, 25, 1024, 50257),
        # GPT-3 (2005.14165, table 2.1).
        "gpt3-175b": _gpt_sizes(96, 12288, 96, 2048, 50257),
        # PipeDream-2BW's sweep (driver_sweep.py of its release). The vocabulary is not published;
        # GPT-2's 50257 were padded to 50304 by Megatron-LM; 51200 makes 2 % more in the smallest.
        "gpt-355m": _gpt_sizes(24, 1024, 16, 512),
        "gpt-1.3b": _gpt_sizes(24, 2048, 16, 512),
        "gpt-2.2b": _gpt_sizes(32, 2304, 32, 512),
        "gpt-3.8b": _gpt_sizes(32, 3072, 32, 512),
        "bert-355m": "bert:layers=24,hidden=1024,heads=16,seq=512,vocab=51200",
        "bert-2.2b": "bert:layers=32,hidden=2304,heads=32,seq=512,vocab=51200",
        # BERT (1810.04805, section 3).
        "bert-base": "bert:layers=12,hidden=768,heads=12,seq=512",
        "bert-large": "bert:layers=24,hidden=1024,heads=16,seq=512",
        # AxoNN (2110.13005, table I; sequences of 512).
        "gpt-12b": _gpt_sizes(48, 4512, 24, 512),
        "gpt-24b": _gpt_sizes(48, 6336, 36, 512),
        "gpt-50b": _gpt_sizes(96, 6528, 48, 512),
        "gpt-100b": _gpt_sizes(96, 9360, 60, 512),
        # AxoNN-4D (2502.08145, table II; sequences of 2048).
        "axonn4d-5b": _gpt_sizes(24, 4096, 32, 2048),
        "axonn4d-10b": _gpt_sizes(32, 5120, 40, 2048),
        "axonn4d-20b": _gpt_sizes(32, 7168, 56, 2048),
        "axonn4d-40b": _gpt_sizes(38, 9216, 72, 2048),
        "axonn4d-60b": _gpt_sizes(56, 9216, 72, 2048),
        "axonn4d-80b": _gpt_sizes(42, 12288, 96, 2048),
        "axonn4d-160b": _gpt_sizes(84, 12288, 96, 2048),
        "axonn4d-320b": _gpt_sizes(96, 16384, 128, 2048),
        "axonn4d-640b": _gpt_sizes(192, 16384, 128, 2048),
        # Llama (2302.13971, table 2) and Llama 2 (2307.09288, table 1), Llama 3 (2407.21783).
        "llama-7b": "llama:layers=32,hidden=4096,heads=32,seq=2048",
        "llama-13b": "llama:layers=40,hidden=5120,heads=40,seq=2048",
        "llama2-70b": "llama:layers=80,hidden=8192,heads=64,kv_heads=8,mlp_hidden=28672,seq=4096",
        "llama3-8b": "llama:layers=32,hidden=4096,heads=32,kv_heads=8,mlp_hidden=14336,"
        "vocab=128256,seq=8192",
        "llama3-70b": "llama:layers=80,hidden=8192,heads=64,kv_heads=8,mlp_hidden=28672,"
        "vocab=128256,seq=8192",
    }
)


def is_model_name(text: str) -> bool:
    """Return whether a text begins like the name of a model, whatever sizes follow."""
    name = text.partition(":")[0]
    return name in KNOWN_MODELS or name in FAMILIES


@lru_cache(maxsize=64)
def named_model(text: str) -> DescribedModel:
    """Return the model of a name; raise ConfigError with the nearest name if there is none."""
    name, _, given = text.partition(":")
    if not is_model_name(text):
        raise ConfigError(f"{text!r} is not the name of a model: {nearest_model(text)}")
    family, _, known = KNOWN_MODELS.get(name, name).partition(":")
    sizes = _sizes(text, family, ",".join(part for part in (known, given) if part))
    try:
        model = FAMILIES[family].describe(sizes)
    except LayoutError as error:
        raise LayoutError(f"model {text!r}: {error}") from error
    return replace(model, name=text)


def nearest_model(text: str) -> str:
    """Return a remedy for a name that is none: the nearest one."""
    name = text.partition(":")[0]
    near = difflib.get_close_matches(name, [*KNOWN_MODELS, *FAMILIES], n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"`ganglion describe --list` has all names; the families are {list(FAMILIES)}"


def _sizes(text: str, name: str, given: str) -> dict[str, int]:
    family = FAMILIES[name]
    sizes = {**family.sizes, **(_numbers(text, family, given) if given else {})}
    missing = [key for key in family.required if not sizes[key]]
    if missing:
        raise ConfigError(
            f"model {text!r} does not say {missing[0]}: write it as in "
            f"'{name}:{','.join(f'{key}=...' for key in family.required)}'"
        )
    return sizes


def _numbers(text: str, family: Family, given: str) -> dict[str, int]:
    """Read key=value,...; later values replace those before."""
    sizes: dict[str, int] = {}
    for part in given.split(","):
        key, equals, value = part.partition("=")
        if key not in family.sizes:
            near = difflib.get_close_matches(key, family.sizes, n=1)
            known = f"did you mean {near[0]!r}?" if near else f"sizes are {list(family.sizes)}"
            raise ConfigError(f"model {text!r} has no size {key!r}: {known}")
        least = 0 if key == "tied" else 1
        if not equals or not value.isdecimal() or int(value) < least:
            raise ConfigError(
                f"model {text!r}: {key}={value} is no whole number of at least {least}: correct it"
            )
        sizes[key] = int(value)
    return sizes
