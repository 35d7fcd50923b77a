"""Hugging Face: GPT-2 and Llama models of `transformers`, cut into blocks of one tensor each.

    ids -> [embedding] -> [layers.0.attention] -> [layers.0.mlp] -> ... -> [head] -> logits

The blocks hold the modules of the model itself, so training them trains the model. Causal mask and
rotary code, which the model computes once for all layers, depend on the sequence length only: each
attention block makes its own, so one tensor crosses a cut. A parameter's name ends as in the model:
`layers.0.mlp.mlp.c_fc.weight` is GPT-2's `transformer.h.0.mlp.c_fc.weight`; `hugging_face_names`
lists them all.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ganglion.errors import CheckpointError, ConfigError, LayoutError
from ganglion.execute.models.blocks import named_buffers, named_parameters, tied_names

ATTENTION = ("eager", "sdpa")
# Weights are made in fp32 and `train.precision` casts: a dtype in a config would do nothing.
_WITHOUT_EFFECT = ("dtype", "torch_dtype")


class HuggingFaceConfig(Protocol):
    """A configuration of `transformers`, such as GPT2Config or LlamaConfig."""

    @property
    def model_type(self) -> str:
        """The architecture: "gpt2" or "llama"."""


def build(model_type: str, **settings: str | int | float | bool) -> dict[str, nn.Module]:
    """Build blocks with random weights from the settings of a configuration.

    For run files: `model.build = "ganglion.execute.models.hugging_face:build"` with
    `model.args = { model_type = "gpt2", vocab_size = 256, n_layer = 4, ... }`. The setting
    `attn_implementation` is "sdpa" or "eager".
    """
    family = _family(model_type)
    package = _transformers()
    config_class = getattr(package, family.config_name)
    _check_settings(config_class, family, settings)
    # Ids of special tokens belong to a tokenizer that comes with pretrained weights only.
    no_special_ids: dict[str, object] = {"bos_token_id": None, "eos_token_id": None}
    try:
        model = getattr(package, family.model_name)(config_class(**no_special_ids | settings))
    except Exception as error:  # transformers raises errors of many types
        raise ConfigError(
            f"{family.model_name} cannot be built from model.args {settings}: "
            f"{' '.join(str(error).split())}; change model.args to values that fit"
        ) from error
    return hugging_face_blocks(model)


def hugging_face_blocks(model_or_config: nn.Module | HuggingFaceConfig) -> dict[str, nn.Module]:
    """Cut a GPT-2 or Llama language model into ordered blocks: ids in, logits out.

    The blocks share the modules of a given model and keep its mode: call `model.train()` before
    training one that was loaded. A configuration gives fp32 weights, random and in training mode.
    Tied embeddings stay one parameter in the first block and the last.
    """
    package = _transformers()
    if isinstance(model_or_config, nn.Module):
        model, config = model_or_config, getattr(model_or_config, "config", None)
    else:
        model, config = None, model_or_config
    family = _family(getattr(config, "model_type", type(model_or_config).__name__))
    model_class = getattr(package, family.model_name)
    model = model_class(config) if model is None else model
    _check_model(model, model_class)
    blocks = family.cut(model)
    _check_complete(model, blocks)
    for block in blocks.values():
        block.training = model.training
    return blocks


def read_config(path: Path) -> HuggingFaceConfig:
    """Return the configuration of a config.json, or of the folder that holds one."""
    file = path / "config.json" if path.is_dir() else path
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{file} cannot be read as a Hugging Face config: {error}") from error
    if not isinstance(record, dict) or "model_type" not in record:
        raise ConfigError(f"{file} has no model_type: give the config.json of a Hugging Face model")
    family = _family(str(record["model_type"]))
    config: HuggingFaceConfig = getattr(_transformers(), family.config_name).from_dict(record)
    return config


def hugging_face_names(blocks: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return the name in the Hugging Face model for every name of a parameter in the blocks.

    A tied parameter is listed under each of its names, as in the model's own state dict.
    """
    names: dict[str, str] = {}
    for block_name, block in blocks.items():
        if not isinstance(block, HuggingFaceBlock):
            raise ConfigError(
                f"block {block_name!r} is a {type(block).__name__}, not a part of a Hugging Face "
                f"model: pass what hugging_face_blocks returned"
            )
        for child, origin in block.origins.items():
            for name in getattr(block, child).state_dict():
                names[f"{block_name}.{child}.{name}"] = f"{origin}.{name}"
    return names


def hugging_face_state_dict(
    blocks: Mapping[str, nn.Module], tensors: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return the weights under the model's own names, for its `load_state_dict`.

    `tensors` are weights by their names in the blocks, such as `run.model_tensors()` or those of a
    checkpoint; the default is the weights of the blocks.
    """
    found = {**named_parameters(blocks), **named_buffers(blocks)} if tensors is None else tensors
    tied = tied_names(blocks)
    weights: dict[str, Tensor] = {}
    for name, origin in hugging_face_names(blocks).items():
        first = tied.get(name, name)
        if first not in found:
            raise CheckpointError(
                f"there is no {first!r} among the {len(found)} tensors: give those of a run or a "
                f"checkpoint of these blocks"
            )
        weights[origin] = found[first].detach()
    return weights


class HuggingFaceBlock(nn.Module):
    """Base of the blocks: modules of a model, each under the last part of its name there."""

    def __init__(self, model: nn.Module, *names: str) -> None:
        super().__init__()
        self.origins = {name.rpartition(".")[2]: name for name in names}
        for child, name in self.origins.items():
            self.add_module(child, model.get_submodule(name))


class GPT2Embedding(HuggingFaceBlock):
    """Block: ids (batch, tokens) to token plus position vectors, with dropout."""

    wte: nn.Embedding
    wpe: nn.Embedding
    drop: nn.Module

    def forward(self, ids: Tensor) -> Tensor:
        """Look up and add; refuse a sequence longer than the position table."""
        num_tokens, limit = ids.shape[1], self.wpe.num_embeddings
        if num_tokens > limit:
            raise LayoutError(
                f"a sequence of {num_tokens} tokens does not fit n_positions = {limit} of this "
                f"GPT-2: raise n_positions in model.args or lower data.seq_len"
            )
        vectors: Tensor = self.drop(self.wte(ids) + self.wpe(_positions(ids)))
        return vectors


class GPT2Attention(HuggingFaceBlock):
    """Block: x + attention(norm(x))."""

    ln_1: nn.Module
    attn: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus causal attention."""
        mask = _causal_mask(x, self.attn.config)
        change: Tensor = self.attn(self.ln_1(x), attention_mask=mask)[0]
        return x + change


class GPT2FeedForward(HuggingFaceBlock):
    """Block: x + mlp(norm(x))."""

    ln_2: nn.Module
    mlp: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token on its own."""
        change: Tensor = self.mlp(self.ln_2(x))
        return x + change


class GPT2Head(HuggingFaceBlock):
    """Block: vectors to logits (batch, tokens, vocab_size)."""

    ln_f: nn.Module
    lm_head: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Score every token of the vocabulary at every position."""
        logits: Tensor = self.lm_head(self.ln_f(x))
        return logits


class LlamaEmbedding(HuggingFaceBlock):
    """Block: ids (batch, tokens) to token vectors; positions come with the attention."""

    embed_tokens: nn.Module

    def forward(self, ids: Tensor) -> Tensor:
        """Look up the tokens."""
        vectors: Tensor = self.embed_tokens(ids)
        return vectors


class LlamaAttention(HuggingFaceBlock):
    """Block: x + attention(norm(x)), queries and keys turned by their positions."""

    input_layernorm: nn.Module
    self_attn: nn.Module

    def __init__(self, model: nn.Module, *names: str) -> None:
        super().__init__(model, *names)
        # A copy: some rotary codes remember the longest sequence so far, and the blocks of a
        # pipeline get sequences at different times.
        self.rotary_emb = copy.deepcopy(model.get_submodule("model.rotary_emb"))

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus causal attention."""
        change: Tensor = self.self_attn(
            self.input_layernorm(x),
            position_embeddings=self.rotary_emb(x, _positions(x)),
            attention_mask=_causal_mask(x, self.self_attn.config),
        )[0]
        return x + change


class LlamaFeedForward(HuggingFaceBlock):
    """Block: x + mlp(norm(x))."""

    post_attention_layernorm: nn.Module
    mlp: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token on its own."""
        change: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + change


class LlamaHead(HuggingFaceBlock):
    """Block: vectors to logits (batch, tokens, vocab_size)."""

    norm: nn.Module
    lm_head: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Score every token of the vocabulary at every position."""
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


def _positions(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device)[None]


def _causal_mask(x: Tensor, config: Any) -> Tensor | None:
    """Return the mask to add to the scores; None for sdpa, which is causal by a flag."""
    if config._attn_implementation != "eager":
        return None
    num_tokens = x.shape[1]
    lowest = torch.finfo(x.dtype).min
    scores = torch.full((num_tokens, num_tokens), lowest, dtype=x.dtype, device=x.device)
    return scores.triu(diagonal=1)[None, None]


def _cut_gpt2(model: Any) -> dict[str, nn.Module]:
    blocks: dict[str, nn.Module] = {
        "embedding": GPT2Embedding(model, "transformer.wte", "transformer.wpe", "transformer.drop")
    }
    for index in range(len(model.transformer.h)):
        at = f"transformer.h.{index}"
        blocks[f"layers.{index}.attention"] = GPT2Attention(model, f"{at}.ln_1", f"{at}.attn")
        blocks[f"layers.{index}.mlp"] = GPT2FeedForward(model, f"{at}.ln_2", f"{at}.mlp")
    blocks["head"] = GPT2Head(model, "transformer.ln_f", "lm_head")
    return blocks


def _cut_llama(model: Any) -> dict[str, nn.Module]:
    blocks: dict[str, nn.Module] = {"embedding": LlamaEmbedding(model, "model.embed_tokens")}
    for index in range(len(model.model.layers)):
        at = f"model.layers.{index}"
        blocks[f"layers.{index}.attention"] = LlamaAttention(
            model, f"{at}.input_layernorm", f"{at}.self_attn"
        )
        blocks[f"layers.{index}.mlp"] = LlamaFeedForward(
            model, f"{at}.post_attention_layernorm", f"{at}.mlp"
        )
    blocks["head"] = LlamaHead(model, "model.norm", "lm_head")
    return blocks


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture: its classes in `transformers`, and how a model of it is cut."""

    model_name: str
    config_name: str
    cut: Callable[[Any], dict[str, nn.Module]]
    # Settings that a configuration takes but does not list.
    more_settings: tuple[str, ...] = ()


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gpt2": Family("GPT2LMHeadModel", "GPT2Config", _cut_gpt2),
        "llama": Family("LlamaForCausalLM", "LlamaConfig", _cut_llama, ("rope_theta",)),
    }
)


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"Hugging Face models need the package `transformers` ({error}): "
            f"pip install 'ganglion[hf]'"
        ) from error


def _family(model_type: str) -> Family:
    if model_type not in FAMILIES:
        raise ConfigError(
            f"Hugging Face model_type {model_type!r} is not known here: take one of "
            f"{list(FAMILIES)}, or write a function that returns the blocks of your model"
        )
    return FAMILIES[model_type]


def _check_settings(config_class: Any, family: Family, settings: Mapping[str, object]) -> None:
    """Refuse settings that a configuration would store and training would ignore."""
    listed = {*config_class().to_dict(), *config_class.attribute_map, *family.more_settings}
    known = (listed | {"attn_implementation"}).difference(_WITHOUT_EFFECT)
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            raise ConfigError(
                f"model.args has {name!r}, which is no setting of {family.config_name} that "
                f"training reads: " + (f"did you mean {near[0]!r}?" if near else "take it out")
            )


def _check_model(model: Any, model_class: Any) -> None:
    if not isinstance(model, model_class):
        raise ConfigError(
            f"a {type(model).__name__} does not turn ids into logits of the next token: pass a "
            f"{model_class.__name__}"
        )
    attention = model.config._attn_implementation
    if attention not in ATTENTION:
        raise ConfigError(
            f"attn_implementation = {attention!r} is none of {list(ATTENTION)}: build the model "
            f'with attn_implementation = "sdpa"'
        )
    if model.is_gradient_checkpointing:
        raise ConfigError(
            "gradient checkpointing of a Hugging Face model does not reach its blocks: call "
            "model.gradient_checkpointing_disable()"
        )


def _check_complete(model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
    inside = {id(parameter) for parameter in named_parameters(blocks).values()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in inside:
            raise ConfigError(
                f"parameter {name!r} of {type(model).__name__} belongs to none of its blocks, so "
                f"it would not be trained: pass a plain model, without cross-attention or adapters"
            )
