"""`ganglion generate`: text written by the model of a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ganglion.cli.folder import read_folder
from ganglion.decide.config import CHECKPOINTS, RunFile
from ganglion.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from torch import nn


def is_text_model(file: RunFile) -> bool:
    """Return whether a run's model reads and writes text."""
    return file.data.kind == "text" and file.model.kind == "gpt" and not file.model.build


def sample_text(
    folder: Path,
    prompt: str,
    num_tokens: int,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 0,
) -> str:
    """Return `prompt` continued by the newest weights of a run."""
    file, _ = read_folder(folder)
    if not is_text_model(file):
        raise ConfigError(
            f"{folder} holds no text model (model.kind = {file.model.kind!r}, data.kind = "
            f'{file.data.kind!r}): generate needs "gpt" trained on "text"'
        )
    import torch  # late: refusals must not wait for it

    from ganglion.execute.data import load_tokenizer
    from ganglion.execute.models import generate
    from ganglion.execute.train import build_blocks

    tokenizer = load_tokenizer(folder)
    blocks = build_blocks(file, tokenizer.vocab_size, (file.data.seq_len,))
    _load_weights(folder, blocks)
    ids = torch.tensor(tokenizer.encode(prompt.encode()), dtype=torch.int64)[None]
    if not ids.numel():
        raise ConfigError('--prompt is empty: give at least one character, such as "def "')
    written = generate(
        torch.nn.Sequential(*blocks.values()),
        ids,
        num_tokens,
        seq_len=file.data.seq_len,
        temperature=temperature,
        top_k=top_k,
        generator=torch.Generator().manual_seed(seed),
    )
    return tokenizer.decode(written[0].numpy())


def _load_weights(folder: Path, blocks: dict[str, nn.Module]) -> None:
    import torch

    from ganglion.execute.checkpoint import latest_checkpoint, load_exported
    from ganglion.execute.models import named_buffers, named_parameters

    newest = latest_checkpoint(folder / CHECKPOINTS)
    if newest is None:
        raise CheckpointError(
            f"{folder} has no checkpoint yet: wait for the first one (checkpoint.every), or train "
            f"to the end"
        )
    saved = load_exported(newest)
    with torch.no_grad():
        for name, tensor in {**named_parameters(blocks), **named_buffers(blocks)}.items():
            tensor.copy_(saved[name])
