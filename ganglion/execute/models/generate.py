"""Continue a prompt token by token, each drawn from the model's prediction."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ganglion.errors import ConfigError, LayoutError
from ganglion.execute.models.blocks import evaluation_mode


@torch.no_grad()
def generate(
    model: Callable[[Tensor], Tensor],
    prompt: Tensor,
    num_tokens: int,
    *,
    seq_len: int,
    temperature: float = 0.8,
    top_k: int = 0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return the prompt (1, tokens) followed by `num_tokens` new ones.

    `model` maps tokens to logits: a module, or `run.outputs` of a model on several ranks. It gets
    the newest `seq_len` tokens. Temperature 0 takes the likeliest token; `top_k` above 0 draws from
    that many likeliest ones only.
    """
    _check_arguments(prompt, num_tokens, seq_len, temperature, top_k)
    tokens = prompt
    with evaluation_mode([model] if isinstance(model, nn.Module) else []):
        for _ in range(num_tokens):
            logits = model(tokens[:, -seq_len:])[:, -1].float()
            tokens = torch.cat((tokens, _pick(logits, temperature, top_k, generator)), dim=1)
    return tokens


def _pick(
    logits: Tensor, temperature: float, top_k: int, generator: torch.Generator | None
) -> Tensor:
    """Return one token id for each row of logits, as a column."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if 0 < top_k < logits.shape[-1]:
        chosen, ids = logits.topk(top_k, dim=-1)
        return ids.gather(-1, _pick(chosen, temperature, 0, generator))
    # The largest logit becomes 0, so that a tiny temperature does not overflow.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    return torch.multinomial(scaled.softmax(dim=-1), num_samples=1, generator=generator)


def _check_arguments(
    prompt: Tensor, num_tokens: int, seq_len: int, temperature: float, top_k: int
) -> None:
    if prompt.dim() != 2 or prompt.shape[0] != 1 or prompt.shape[1] < 1:
        raise LayoutError(
            f"the prompt has shape {tuple(prompt.shape)}; it must be (1, tokens) with at least one "
            f"token"
        )
    for name, value, least in (
        ("num_tokens", num_tokens, 0),
        ("seq_len", seq_len, 1),
        ("temperature", temperature, 0),
        ("top_k", top_k, 0),
    ):
        if value < least:
            raise ConfigError(f"{name} is {value}; it must be at least {least}")
