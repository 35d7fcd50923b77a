"""The shape that a built-in model will have, before its data are opened."""

from __future__ import annotations

from ganglion.decide.config import RunFile, model_shape
from ganglion.decide.shapes import ModelShape


def expected_shape(run: RunFile) -> ModelShape:
    """Return the shape of a run file's built-in model, without reading any data.

    Images count as 28 x 28 in one channel with 10 classes, as the built-in sets have them.
    """
    num_outputs, inputs = _data_shape(run)
    return model_shape(run.model, num_outputs=num_outputs, input_shape=inputs)


def _data_shape(run: RunFile) -> tuple[int, tuple[int, ...]]:
    """Return the classes and the shape of a sample."""
    if run.data.kind == "images":
        return 10, (1, 28, 28)
    vocab_size = 256 if run.data.tokenizer == "bytes" else run.data.bpe_vocab_size
    return run.model.vocab_size or vocab_size, (run.data.seq_len,)
