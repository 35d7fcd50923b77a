"""Hugging Face: blocks give the model's own logits and gradients, wherever they are cut."""

from __future__ import annotations

import copy
import re
import socket
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ganglion
from ganglion.errors import CheckpointError, ConfigError, LayoutError
from ganglion.execute.measure.peak import count_flops
from ganglion.execute.models import build_user_blocks, cross_entropy, named_blocks, named_parameters
from ganglion.execute.models.blocks import tied_names
from ganglion.execute.models.hugging_face import (
    build,
    hugging_face_blocks,
    hugging_face_names,
    hugging_face_state_dict,
)
from tests.support.absent import Absent
from tests.support.hugging_face import Logits
from tests.support.serial import assert_same_by_name, copies, train_serially

transformers = pytest.importorskip(
    "transformers", reason="needs the extra `hf`: pip install 'ganglion[hf]'"
)

VOCAB_SIZE, SEQ_LEN = 61, 12
SETTINGS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "n_layer": 2,
        "n_embd": 32,
        "n_head": 4,
        "n_positions": 16,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "llama": {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
    },
}
DROPOUT: dict[str, dict[str, Any]] = {
    "gpt2": {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3},
    "llama": {"attention_dropout": 0.3},
}
CLASSES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}
both_families = pytest.mark.parametrize("family", ["gpt2", "llama"])
both_attentions = pytest.mark.parametrize("attention", ["eager", "sdpa"])


def make_model(family: str, attention: str = "sdpa", **changes: Any) -> Any:
    """A tiny model whose every parameter matters: zero biases and unit norms are drawn anew."""
    torch.manual_seed(0)
    settings = {"bos_token_id": None, "eos_token_id": None, **SETTINGS[family], **changes}
    config = transformers.AutoConfig.for_model(
        family, vocab_size=VOCAB_SIZE, attn_implementation=attention, **settings
    )
    model = getattr(transformers, CLASSES[family])(config)
    assert model.config._attn_implementation == attention
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def sample(num_samples: int = 3, num_tokens: int = SEQ_LEN, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB_SIZE, (num_samples, num_tokens + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def run_blocks(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients by name, a tied parameter under its first name, and none of them zero."""
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient is not None and gradient.any() for gradient in found.values())
    return copies(found)


def reference(model: Any, ids: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients of the model's own forward; the gradients are cleared afterwards."""
    logits = model(ids, use_cache=False).logits
    cross_entropy(logits, targets).backward()
    found = gradients(model)
    model.zero_grad()
    return logits.detach(), found


@both_families
@both_attentions
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_logits_and_gradients_are_the_models_own(
    family: str, attention: str, dtype: torch.dtype
) -> None:
    model = make_model(family, attention).to(dtype)
    ids, targets = sample()
    expected_logits, expected = reference(model, ids, targets)
    logits = run_blocks(list(hugging_face_blocks(model).values()), ids)
    assert torch.equal(logits, expected_logits)
    cross_entropy(logits, targets).backward()
    assert_same_by_name(gradients(model), expected, exactly=True)


@both_families
@both_attentions
def test_a_cut_between_any_two_blocks_changes_nothing(family: str, attention: str) -> None:
    model = make_model(family, attention)
    blocks = list(hugging_face_blocks(model).values())
    ids, targets = sample()
    _, expected = reference(model, ids, targets)
    for cut in range(1, len(blocks)):
        sent = run_blocks(blocks[:cut], ids)
        assert sent.shape == (*ids.shape, 32)
        received = sent.detach().clone().requires_grad_()
        cross_entropy(run_blocks(blocks[cut:], received), targets).backward()
        sent.backward(received.grad)
        assert_same_by_name(gradients(model), expected, exactly=True)
        model.zero_grad()


@both_families
@both_attentions
def test_later_tokens_do_not_reach_earlier_ones(family: str, attention: str) -> None:
    blocks = list(hugging_face_blocks(make_model(family, attention)).values())
    ids, _ = sample()
    changed = ids.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % VOCAB_SIZE
    before, after = run_blocks(blocks, ids), run_blocks(blocks, changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5], after[:, 5])


@both_families
@both_attentions
@pytest.mark.parametrize("num_tokens", [1, 7, 16])
def test_any_length_works(family: str, attention: str, num_tokens: int) -> None:
    model = make_model(family, attention)
    ids, _ = sample(num_tokens=num_tokens)
    blocks = list(hugging_face_blocks(model).values())
    assert torch.equal(run_blocks(blocks, ids), model(ids, use_cache=False).logits)


@both_families
@both_attentions
def test_bf16_autocast_is_the_models_own(family: str, attention: str) -> None:
    model = make_model(family, attention)
    ids, _ = sample()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(ids, use_cache=False).logits
        logits = run_blocks(list(hugging_face_blocks(model).values()), ids)
    assert logits.dtype == torch.bfloat16
    assert torch.equal(logits, expected)


@both_families
@both_attentions
def test_dropout_follows_the_mode(family: str, attention: str) -> None:
    model = make_model(family, attention, **DROPOUT[family])
    blocks = hugging_face_blocks(model)
    ids, _ = sample()

    def outputs() -> tuple[Tensor, Tensor]:
        torch.manual_seed(7)
        found = run_blocks(list(blocks.values()), ids)
        torch.manual_seed(7)
        return found, model(ids, use_cache=False).logits

    trained, expected = outputs()
    assert torch.equal(trained, expected)
    for block in blocks.values():
        block.eval()
    evaluated, expected = outputs()
    assert torch.equal(evaluated, expected)
    assert not torch.equal(evaluated, trained)


def test_rotary_codes_that_remember_lengths_do_so_block_by_block() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
    model = make_model("llama", rope_parameters=rope)
    blocks = list(hugging_face_blocks(model).values())
    # Both past max_position_embeddings; as in a pipeline, a block meets both before the next does.
    inputs = [sample(num_tokens=num_tokens)[0] for num_tokens in (20, 24)]
    hidden = inputs
    for block in blocks:
        hidden = [block(x) for x in hidden]
    for ids, logits in zip(inputs, hidden, strict=True):
        assert torch.equal(logits, model(ids, use_cache=False).logits)


@both_families
def test_the_grain_is_halves_of_layers_in_the_mode_of_the_model(family: str) -> None:
    for mode in (True, False):
        blocks = hugging_face_blocks(make_model(family).train(mode))
        halves = [f"layers.{index}.{half}" for index in (0, 1) for half in ("attention", "mlp")]
        assert list(blocks) == ["embedding", *halves, "head"]
        assert named_blocks(blocks) == blocks
        assert all(part.training is mode for b in blocks.values() for part in b.modules())


@pytest.mark.parametrize(
    ("family", "tied", "name"),
    [
        ("gpt2", True, "embedding.wte.weight"),
        ("gpt2", False, "embedding.wte.weight"),
        ("llama", True, "embedding.embed_tokens.weight"),
        ("llama", False, "embedding.embed_tokens.weight"),
    ],
)
def test_tied_embeddings_stay_one_parameter(family: str, tied: bool, name: str) -> None:
    model = make_model(family, tie_word_embeddings=tied)
    blocks = hugging_face_blocks(model)
    assert tied_names(blocks) == ({"head.lm_head.weight": name} if tied else {})
    assert ("head.lm_head.weight" in named_parameters(blocks)) is not tied
    state = hugging_face_state_dict(blocks)
    assert_same_by_name(state, model.state_dict(), exactly=True)


@both_families
def test_weights_go_back_under_the_models_names(family: str) -> None:
    model, fresh = make_model(family), make_model(family)
    blocks = hugging_face_blocks(model)
    names = hugging_face_names(blocks)
    assert set(names.values()) == set(model.state_dict())
    if family == "gpt2":
        assert names["layers.0.mlp.mlp.c_fc.weight"] == "transformer.h.0.mlp.c_fc.weight"
    trained = {name: torch.randn_like(p) for name, p in named_parameters(blocks).items()}
    fresh.load_state_dict(hugging_face_state_dict(blocks, trained))
    again = hugging_face_state_dict(hugging_face_blocks(fresh))
    assert_same_by_name(again, hugging_face_state_dict(blocks, trained), exactly=True)
    assert not torch.equal(*(m.lm_head.weight for m in (model, fresh)))


@both_families
def test_training_in_a_run_equals_a_plain_loop(family: str) -> None:
    model = make_model(family, **DROPOUT[family]).double().eval()
    blocks = hugging_face_blocks(copy.deepcopy(model))
    batches = [sample(num_samples=4, seed=seed) for seed in range(3)]

    def optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(named, lr=1e-2)

    history = train_serially(Logits(model), cross_entropy, optimizer, batches, max_grad_norm=1.0)
    plan = ganglion.Plan(microbatch_size=2, num_microbatches=2)
    run = ganglion.parallelize(
        blocks, cross_entropy, optimizer, plan, ganglion.RunSettings(max_grad_norm=1.0)
    )
    losses = [result.loss for result in run.steps(iter(batches))]
    assert losses == pytest.approx(history.losses, rel=1e-6)
    weights = hugging_face_state_dict(blocks, run.model_tensors())
    run.close()
    expected = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    assert set(weights) == set(expected)
    for name, tensor in expected.items():
        # Llama's norms compute in fp32 whatever the weights are.
        torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6)
        assert not torch.equal(tensor, make_model(family).double().state_dict()[name])


@both_families
def test_a_run_file_can_name_the_factory(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a model from a configuration needs no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    args = {"model_type": family, "vocab_size": VOCAB_SIZE, **SETTINGS[family]}
    torch.manual_seed(3)
    blocks = build_user_blocks("ganglion.execute.models.hugging_face:build", args)
    ids, targets = sample()
    logits = run_blocks(list(blocks.values()), ids)
    assert logits.shape == (3, SEQ_LEN, VOCAB_SIZE)
    assert cross_entropy(logits, targets).item() == pytest.approx(4.1, abs=0.3)
    torch.manual_seed(3)
    again = build(**args)
    assert_same_by_name(named_parameters(again), named_parameters(blocks), exactly=True)
    assert all(p.dtype == torch.float32 for p in named_parameters(blocks).values())


@both_families
@both_attentions
def test_flops_are_counted_without_data(family: str, attention: str) -> None:
    model = make_model(family, attention)
    flops = count_flops(hugging_face_blocks(model), cross_entropy, *sample(num_samples=1))
    matrices = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "wpe" not in n)
    if family == "llama":  # its token table is only looked up
        matrices -= model.model.embed_tokens.weight.numel()
    assert flops is not None
    assert 6 * matrices * SEQ_LEN <= flops <= 1.3 * 6 * matrices * SEQ_LEN


def test_a_configuration_gives_random_weights_in_training_mode() -> None:
    config = transformers.LlamaConfig(vocab_size=VOCAB_SIZE, dtype="bfloat16", **SETTINGS["llama"])
    blocks = hugging_face_blocks(config)
    assert all(p.dtype == torch.float32 for p in named_parameters(blocks).values())
    assert all(block.training for block in blocks.values())


def test_settings_of_a_run_file_reach_the_model() -> None:
    settings = SETTINGS["llama"] | {"rope_theta": 77.0, "attn_implementation": "eager"}
    attention: Any = build("llama", vocab_size=5, **settings)["layers.0.attention"]
    assert attention.rotary_emb.inv_freq[1].item() == pytest.approx(77 ** (-2 / 8))
    assert attention.self_attn.config._attn_implementation == "eager"
    assert attention.self_attn.config.eos_token_id is None  # 2 would do, but is nobody's


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"n_layers": 2}, "model.args has 'n_layers', which is no setting of GPT2Config"),
        ({"n_layers": 2}, "did you mean 'n_layer'?"),
        ({"dtype": "bfloat16"}, "model.args has 'dtype', which is no setting of GPT2Config that"),
        ({"n_embd": 33, "n_head": 4}, "GPT2LMHeadModel cannot be built from model.args {'n_embd'"),
        ({"n_layer": "two"}, "Field 'n_layer' expected int, got str"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        build("gpt2", **settings)


def test_other_models_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model_type 'bert' is not known here: take one of \['g"):
        build("bert")
    with pytest.raises(ConfigError, match="model_type 'Linear' is not known here"):
        hugging_face_blocks(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"a GPT2Model does not turn ids into logits .* pass a "):
        hugging_face_blocks(make_model("gpt2").transformer)
    with pytest.raises(ConfigError, match=r"parameter 'transformer.h.0.crossattention.c_attn.wei"):
        hugging_face_blocks(make_model("gpt2", add_cross_attention=True))


def test_models_whose_wishes_would_be_ignored_are_refused() -> None:
    model = make_model("llama")
    model.gradient_checkpointing_enable()
    with pytest.raises(ConfigError, match="gradient_checkpointing_disable"):
        hugging_face_blocks(model)
    model = make_model("llama")
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ConfigError, match="attn_implementation = 'flex_attention' is none of"):
        hugging_face_blocks(model)


def test_a_sequence_longer_than_the_positions_is_refused() -> None:
    embedding = hugging_face_blocks(make_model("gpt2"))["embedding"]
    with pytest.raises(LayoutError, match="17 tokens does not fit n_positions = 16 of this GPT-2"):
        embedding(torch.zeros(1, 17, dtype=torch.int64))


def test_weights_of_other_blocks_are_refused() -> None:
    blocks = hugging_face_blocks(make_model("gpt2"))
    with pytest.raises(CheckpointError, match=r"no 'embedding.wte.weight' among the 0 tensors"):
        hugging_face_state_dict(blocks, {})
    with pytest.raises(ConfigError, match="block 'a' is a Linear, not a part of a Hugging Face"):
        hugging_face_names({"a": nn.Linear(2, 2)})


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    text = r"need the package `transformers` .*: pip install 'ganglion\[hf\]'$"
    with pytest.raises(ConfigError, match=text):
        build_user_blocks("ganglion.execute.models.hugging_face:build", {"model_type": "gpt2"})
    with pytest.raises(ConfigError, match=text):
        hugging_face_blocks(nn.Linear(2, 2))


def test_transformers_is_imported_only_when_used() -> None:
    apart = Absent("transformers", "tokenizers")
    with apart:
        import ganglion.execute.models
        import ganglion.execute.models.hugging_face
        import ganglion.execute.train  # noqa: F401
    assert not apart.refused
