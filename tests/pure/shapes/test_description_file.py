"""Descriptions as JSON: exact both ways, short, and read strictly."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from ganglion.decide.shapes import (
    KNOWN_MODELS,
    ConvShape,
    DescribedModel,
    GPTShape,
    MLPShape,
    ModelShape,
    describe_shape,
    description_from_json,
    description_to_json,
    named_model,
)
from ganglion.errors import ConfigError

GPT = GPTShape(
    vocab_size=96,
    seq_len=16,
    num_layers=3,
    hidden=32,
    num_heads=8,
    num_kv_heads=4,
    head_size=6,
    mlp_hidden=64,
    positions="learned",
    tied_embedding=True,
    bias=True,
)
SHAPES: list[ModelShape] = [
    GPT,
    MLPShape(num_inputs=784, num_outputs=10, num_layers=9, hidden=64),
    MLPShape(num_inputs=784, num_outputs=10, num_layers=1, hidden=64),
    ConvShape(image_size=28, num_channels=3, num_outputs=10),
]


def there_and_back(model: DescribedModel) -> DescribedModel:
    return description_from_json(description_to_json(model), "model.json")


@pytest.mark.parametrize("shape", SHAPES)
def test_closed_forms_are_read_as_they_were_written(shape: ModelShape) -> None:
    model = describe_shape(shape)
    assert there_and_back(model) == model


@pytest.mark.parametrize("name", [*KNOWN_MODELS, "vgg19"])
def test_named_models_are_read_as_they_were_written(name: str) -> None:
    assert there_and_back(named_model(name)) == named_model(name)


def test_equal_blocks_are_written_once_and_shared_when_read() -> None:
    text = description_to_json(named_model("gpt3-175b"))
    assert len(text.splitlines()) < 500
    order = json.loads(text)["order"]
    assert {"blocks": ["attention", "mlp"], "times": 96} in order
    blocks = description_from_json(text, "model.json").blocks
    assert len({id(block) for block in blocks}) == 4


def changed(change: Callable[[dict[str, Any]], object]) -> str:
    record = json.loads(description_to_json(describe_shape(GPT)))
    change(record)
    return json.dumps(record)


def setter(*path: str | int, value: object) -> Callable[[dict[str, Any]], None]:
    def change(record: dict[str, Any]) -> None:
        at: Any = record
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = value

    return change


def without(*path: str) -> Callable[[dict[str, Any]], None]:
    def change(record: dict[str, Any]) -> None:
        at: Any = record
        for step in path[:-1]:
            at = at[step]
        del at[path[-1]]

    return change


KEPT = ("blocks", "mlp", "activations", "fp32", "kept", 0)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (setter("format", value=2), 'is no model description of format 1: it needs "format": 1'),
        (setter("tokns", value=2), "unknown key 'tokns' in the file; did you mean 'tokens'?"),
        (without("sample_bytes"), "the file has no 'sample_bytes': add it"),
        (setter("sample_bytes", value=-1), "sample_bytes = -1 is not a whole number of at least 0"),
        (setter("sample_bytes", value=True), "sample_bytes = true is not a whole number"),
        (setter("tokens", value=1.5), "tokens = 1.5 is not a whole number of at least 1"),
        (setter("name", value=3), "name = 3 is not a text"),
        (setter("order", 0, "blocks", value=["mpl"]), "is not known; did you mean 'mlp'?"),
        (setter("order", 1, "times", value=10**9), "is not a whole number of at most 10000"),
        (setter("order", value=[{"blocks": ["mlp"]}]), "order does not have block 'embedding'"),
        (setter("splits", 0, "axis", value="z"), 'splits[0].axis = "z" is not known'),
        (without("blocks", "mlp", "flops", "input"), "blocks.mlp.flops has no 'input': add it"),
        (without("blocks", "mlp", "activations", "bf16"), "blocks.mlp.activations has no 'bf16'"),
        (
            setter("blocks", "mlp", "parameters", 0, "axes", value=["x", "y"]),
            "blocks.mlp.parameters[0].axes has 2 axes for 1 dims",
        ),
        (
            setter("blocks", "mlp", "parameters", 0, "shape", 0, value=-3),
            "blocks.mlp.parameters[0].shape[0] = -3 is not a whole number of at least 1",
        ),
        (setter("blocks", "mlp", "layers", 0, "parameter", value=9), "its parameters are 0 to 5"),
        (setter("blocks", "mlp", "layers", 0, "parameter", value=0), "a layer needs a matrix or"),
        (setter("blocks", "mlp", "layers", 0, "rows", value=[1]), "has 1 numbers"),
        (setter("blocks", "mlp", "flops", "forward", value=5), "its layers alone take"),
        (setter(*KEPT, value={"byts": 1}), "unknown key 'byts'"),
        (setter(*KEPT, value={"bytes": 1, "over": "w"}), '"w" is not known'),
        (setter(*KEPT, value={"bytes": 1, "when": "x!1"}), "'x!1' is no condition on an axis"),
        (setter(*KEPT[:-1], value=7), "kept = 7 is not a list"),
    ],
)
def test_what_is_wrong_is_named(change: Callable[[dict[str, Any]], object], text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        description_from_json(changed(change), "model.json")
    assert str(refused.value).startswith(("model.json", "block 'mlp'"))
    assert text in str(refused.value)


def test_text_that_is_no_json_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.json is not JSON: .*ganglion describe"):
        description_from_json("{", "model.json")


def test_a_model_needs_blocks_and_names_of_their_own() -> None:
    model = describe_shape(GPT)
    with pytest.raises(ConfigError, match="has no blocks"):
        DescribedModel(name="none", sample_bytes=1, blocks=())
    other = describe_shape(SHAPES[1]).blocks[1]
    twin = type(other)(**{f: getattr(other, f) for f in other.__slots__} | {"name": "mlp"})
    with pytest.raises(ConfigError, match="two different blocks named 'mlp'"):
        DescribedModel(name="twice", sample_bytes=1, blocks=(*model.blocks, twin))
