"""The model of a run file: its shape, its number of blocks, and the data it can be trained on."""

from __future__ import annotations

import math
from pathlib import Path

from ganglion.decide.config.schema import ModelSection, RunFile
from ganglion.decide.shapes import (
    BuiltShape,
    ConvShape,
    DescribedModel,
    GPTShape,
    MLPShape,
    ModelShape,
    description_from_json,
    is_model_name,
    named_model,
    nearest_model,
)
from ganglion.errors import ConfigError, LayoutError

_TOKEN_DATA = ("text", "synthetic")
_IMAGE = (1, 28, 28)  # of the built-in sets, with 10 classes


def own_code_key(run: RunFile) -> str | None:
    """Return the key that names a model or data set of the user's own; None if all is known.

    The costs and the size of such code are not known before it runs, unless `model.description`
    has them.
    """
    if run.model.description:
        return None
    if run.model.build:
        return "model.build"
    return 'data.kind = "dataset"' if run.data.kind == "dataset" else None


def expected_shape(run: RunFile) -> ModelShape:
    """Return the described shape of a run file's model, or that of its built-in one.

    No data are read: images count as 28 x 28 in one channel with 10 classes, as the built-in sets
    have them.
    """
    if run.model.description:
        return read_model(run.model.description)
    if run.data.kind == "images":
        return model_shape(run.model, num_outputs=10, input_shape=_IMAGE)
    vocab_size = 256 if run.data.tokenizer == "bytes" else run.data.bpe_vocab_size
    num_outputs = run.model.vocab_size or vocab_size
    return model_shape(run.model, num_outputs=num_outputs, input_shape=(run.data.seq_len,))


# --- descriptions --------------------------------------------------------------------------------


def read_model(source: str) -> DescribedModel:
    """Return the model of a description file, or of a name; raise ConfigError if it is neither."""
    if is_model_name(source):
        return named_model(source)
    path = Path(source)
    if path.suffix != ".json" and not path.exists():
        raise ConfigError(
            f"{source!r} is neither a file nor the name of a model: {nearest_model(source)}"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source} cannot be read: {error}") from error
    return description_from_json(text, source)


def check_description(run: RunFile) -> None:
    """Refuse keys that the description of a model decides already."""
    model = run.model
    if not model.description:
        return
    tokens = read_model(model.description).tokens
    kept = ("description", "build", "args", "loss")
    for key, field in type(model).model_fields.items():
        if key not in kept and not model.build and getattr(model, key) != field.default:
            raise ConfigError(
                f"model.{key} = {getattr(model, key)!r} changes nothing beside model.description = "
                f"{model.description!r}, which has the whole model: leave it out, or describe "
                f"another, as in gpt:layers=24,hidden=1024,heads=16"
            )
    if tokens > 1 and run.data.kind in _TOKEN_DATA and run.data.seq_len != tokens:
        raise LayoutError(
            f"data.seq_len = {run.data.seq_len}, but model.description = {model.description!r} is "
            f"of samples of {tokens} tokens: set data.seq_len = {tokens}, or describe the model "
            f"with the other length (seq=N in a name, --seq N of `ganglion describe`)"
        )


def check_trainable(run: RunFile) -> None:
    """Refuse to train a model that is known in numbers alone."""
    if run.model.description and not run.model.build:
        raise ConfigError(
            f"model.description = {run.model.description!r} is a model in numbers, which can be "
            f"predicted but not trained: set model.build, or leave out model.description"
        )


# --- built-in models ---------------------------------------------------------------------------


def model_shape(
    model: ModelSection,
    *,
    num_outputs: int,
    input_shape: tuple[int, ...],
    tokens: bool | None = None,
) -> BuiltShape:
    """Return the shape of a model section, given the classes and input shape of its data.

    `num_outputs` is the number of token ids or classes, 0 if unknown. `tokens` is whether samples
    are token ids; None leaves out the check that the model is made for them.
    """
    check_data(model, num_outputs=num_outputs, input_shape=input_shape, tokens=tokens)
    if model.kind == "gpt":
        return _gpt_shape(model, model.vocab_size or num_outputs, input_shape[0])
    if model.kind == "mlp":
        return MLPShape(
            num_inputs=math.prod(input_shape),
            num_outputs=num_outputs,
            num_layers=model.layers,
            hidden=model.hidden,
        )
    if len(input_shape) != 3:
        raise LayoutError(
            f'model.kind = "conv" needs images of shape (channels, height, width), but data.kind '
            f'gives samples of shape {input_shape}: set data.kind = "images"'
        )
    return ConvShape(
        image_size=input_shape[-1], num_channels=input_shape[0], num_outputs=num_outputs
    )


def check_data(
    model: ModelSection, *, num_outputs: int, input_shape: tuple[int, ...], tokens: bool | None
) -> None:
    """Refuse a built-in model that cannot be trained on the data."""
    if model.kind == "gpt" and tokens is False:
        raise LayoutError(
            f'model.kind = "gpt" needs token ids, but data.kind gives samples of shape '
            f'{input_shape} that are not: set data.kind = "text" or "synthetic", or model.kind = '
            f'"mlp"'
        )
    if model.kind != "gpt" and tokens:
        raise LayoutError(
            f'model.kind = "{model.kind}" needs numbers, but data.kind gives sequences of '
            f'{input_shape[0]} token ids: set model.kind = "gpt" or data.kind = "images"'
        )
    if model.kind == "gpt" and 0 < model.vocab_size < num_outputs:
        raise LayoutError(
            f"model.vocab_size = {model.vocab_size} is less than the {num_outputs} token ids of "
            f"data.kind: set model.vocab_size = 0 (as many as there are) or at least {num_outputs}"
        )
    if num_outputs < 1 and not (model.kind == "gpt" and model.vocab_size):
        raise LayoutError(
            f'model.kind = "{model.kind}" has as many outputs as the data have classes, but the '
            f'data set of data.kind = "dataset" has num_classes = {num_outputs}: give it an '
            f"attribute num_classes of at least 1"
        )


def num_blocks(model: ModelSection) -> int | None:
    """Return how many blocks a model will have, or None for a user's own without a description."""
    if model.description:
        return read_model(model.description).num_blocks
    if model.build:
        return None
    if model.kind == "gpt":
        return _gpt_shape(model, 1, 1).num_blocks
    if model.kind == "mlp":
        return model.layers
    return ConvShape(image_size=_IMAGE[-1], num_channels=1, num_outputs=10).num_blocks


def _gpt_shape(model: ModelSection, vocab_size: int, seq_len: int) -> GPTShape:
    if not model.head_size and model.hidden % model.heads:
        raise LayoutError(
            f"model.hidden = {model.hidden} is not a multiple of model.heads = {model.heads}: "
            f"change one of them, or set model.head_size"
        )
    return GPTShape(
        vocab_size=vocab_size,
        seq_len=seq_len,
        num_layers=model.layers,
        hidden=model.hidden,
        num_heads=model.heads,
        num_kv_heads=model.kv_heads or model.heads,
        head_size=model.head_size or model.hidden // model.heads,
        mlp_hidden=model.mlp_hidden or 4 * model.hidden,
        positions=model.positions,
        tied_embedding=model.tied_embedding,
        bias=model.bias,
    )
