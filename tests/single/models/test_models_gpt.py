"""GPT against a reference written out in full, and the properties a decoder must have."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ganglion.decide.shapes import GPTShape
from ganglion.errors import LayoutError
from ganglion.execute.models import GPT, build_model, cross_entropy, named_parameters, tied_names
from ganglion.execute.models.gpt import Attention, Rotary

TOLERANCE = 1e-5
BASE = GPTShape(
    vocab_size=17,
    seq_len=12,
    num_layers=2,
    hidden=24,
    num_heads=4,
    num_kv_heads=4,
    head_size=6,
    mlp_hidden=40,
)
SHAPES = {
    "plain": BASE,
    "bias": dataclasses.replace(BASE, bias=True),
    "grouped": dataclasses.replace(BASE, num_kv_heads=2),
    "one_key_head": dataclasses.replace(BASE, num_kv_heads=1, bias=True),
    "wide_heads": dataclasses.replace(BASE, head_size=10, num_kv_heads=2),
    "one_head": dataclasses.replace(BASE, num_heads=1, num_kv_heads=1, head_size=2),
    "learned": dataclasses.replace(BASE, positions="learned", bias=True),
    "learned_odd_grouped": dataclasses.replace(
        BASE, positions="learned", head_size=5, num_kv_heads=2
    ),
    "tied": dataclasses.replace(BASE, tied_embedding=True),
}


def make_model(shape: GPTShape, seed: int = 0) -> GPT:
    """Return a model whose every parameter, biases and norms too, is far from its default."""
    torch.manual_seed(seed)
    model = GPT(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def make_ids(shape: GPTShape, batch: int = 3, length: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    size = (batch, length or shape.seq_len)
    return torch.randint(shape.vocab_size, size, generator=generator)


class Reference:
    """The same transformer, one head and one position formula at a time."""

    def __init__(self, shape: GPTShape, weights: dict[str, Tensor]) -> None:
        self.shape = shape
        self.weights = weights

    def norm(self, name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * self.weights[f"{name}.weight"] + self.weights.get(f"{name}.bias", 0.0)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0.0)

    def turn(self, head: Tensor) -> Tensor:
        """Rotary: as complex numbers, pair i of position p is multiplied by exp(1j * angle)."""
        size = self.shape.head_size
        complex_pairs = torch.complex(head[..., 0::2], head[..., 1::2])
        factors = [
            [complex(math.cos(a), math.sin(a)) for a in angles]
            for angles in (
                [position * 10000 ** (-2 * i / size) for i in range(size // 2)]
                for position in range(head.shape[1])
            )
        ]
        turned = complex_pairs * torch.tensor(factors)
        return torch.stack((turned.real, turned.imag), dim=-1).flatten(-2)

    def one_head(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.shape.positions == "rotary":
            query, key = self.turn(query), self.turn(key)
        scores = query @ key.transpose(1, 2) / math.sqrt(self.shape.head_size)
        future = torch.ones(scores.shape[1:]).triu(1).bool()
        weights = scores.masked_fill(future, -math.inf).softmax(-1)
        return weights @ value

    def attention(self, name: str, x: Tensor) -> Tensor:
        shape = self.shape
        pieces = torch.split(
            self.linear(f"{name}.qkv", self.norm(f"{name}.norm", x)), shape.head_size, -1
        )
        per_group = shape.num_heads // shape.num_kv_heads
        outputs = []
        for head in range(shape.num_heads):
            group = head // per_group
            first = group * (per_group + 2)
            key, value = pieces[first + per_group], pieces[first + per_group + 1]
            outputs.append(self.one_head(pieces[first + head % per_group], key, value))
        return x + self.linear(f"{name}.out", torch.cat(outputs, -1))

    def mlp(self, name: str, x: Tensor) -> Tensor:
        inner = self.linear(f"{name}.up", self.norm(f"{name}.norm", x))
        gelu = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
        return x + self.linear(f"{name}.down", gelu)

    def __call__(self, ids: Tensor) -> Tensor:
        x = self.weights["embedding.tokens.weight"][ids]
        if self.shape.positions == "learned":
            x = x + self.weights["embedding.positions.weight"][: ids.shape[1]]
        for layer in range(self.shape.num_layers):
            x = self.attention(f"layers.{layer}.attention", x)
            x = self.mlp(f"layers.{layer}.mlp", x)
        return self.linear("head.linear", self.norm("head.norm", x))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("length", [1, 7, 12])
def test_blocks_in_order_equal_the_reference(shape: GPTShape, length: int) -> None:
    model = make_model(shape)
    ids = make_ids(shape, length=length)
    x = ids
    for block in model.blocks().values():
        x = block(x)
    expected = Reference(shape, dict(model.state_dict()))(ids)
    torch.testing.assert_close(x, expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert torch.equal(model(ids), x)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_gradients_equal_the_reference(shape: GPTShape) -> None:
    model = make_model(shape)
    ids = make_ids(shape)
    torch.autograd.backward(cross_entropy(model(ids), ids.roll(1, 1)))
    leaves = {
        name: parameter.detach().clone().requires_grad_()
        for name, parameter in named_parameters(model.blocks()).items()
    }
    tied = {later: leaves[first] for later, first in tied_names(model.blocks()).items()}
    torch.autograd.backward(
        cross_entropy(Reference(shape, {**leaves, **tied})(ids), ids.roll(1, 1))
    )
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, leaves[name].grad, rtol=TOLERANCE, atol=TOLERANCE, msg=name
        )


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_later_token_does_not_change_earlier_logits(shape: GPTShape) -> None:
    model = make_model(shape)
    ids = make_ids(shape)
    changed = ids.clone()
    changed[:, 8] = (changed[:, 8] + 1) % shape.vocab_size
    before, after = model(ids), model(changed)
    torch.testing.assert_close(after[:, :8], before[:, :8], rtol=0, atol=1e-6)
    assert (after[:, 8:] - before[:, 8:]).abs().amax() > 1e-3


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_block_and_parameter_names_are_the_state_dict_names(shape: GPTShape) -> None:
    model = GPT(shape)
    blocks = model.blocks()
    joined = [f"{name}.{key}" for name, block in blocks.items() for key in block.state_dict()]
    assert joined == list(model.state_dict())
    assert list(named_parameters(blocks)) == [name for name, _ in model.named_parameters()]
    assert len(blocks) == shape.num_blocks
    assert list(blocks) == [
        "embedding",
        "layers.0.attention",
        "layers.0.mlp",
        "layers.1.attention",
        "layers.1.mlp",
        "head",
    ]


def test_bias_setting_covers_norms_and_linear_layers_but_never_the_head() -> None:
    def biases(shape: GPTShape) -> set[str]:
        return {name for name in GPT(shape).state_dict() if name.endswith("bias")}

    halves = ("attention.norm", "attention.qkv", "attention.out", "mlp.norm", "mlp.up", "mlp.down")
    expected = {f"layers.{i}.{half}.bias" for i in range(2) for half in halves}
    assert biases(SHAPES["plain"]) == set()
    assert biases(SHAPES["bias"]) == expected | {"head.norm.bias"}


def test_gpt2_small_has_its_published_number_of_parameters() -> None:
    # Radford et al. 2019, as counted on the published checkpoint: 124,439,808.
    shape = GPTShape(
        vocab_size=50257,
        seq_len=1024,
        num_layers=12,
        hidden=768,
        num_heads=12,
        num_kv_heads=12,
        head_size=64,
        mlp_hidden=3072,
        positions="learned",
        tied_embedding=True,
        bias=True,
    )
    with torch.device("meta"):
        model = build_model(shape)
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808


def test_tied_embedding_is_one_parameter_under_its_first_name() -> None:
    model = GPT(SHAPES["tied"])
    blocks = model.blocks()
    assert model.head.linear.weight is model.embedding.tokens.weight
    assert "head.linear.weight" not in named_parameters(blocks)
    assert tied_names(blocks) == {"head.linear.weight": "embedding.tokens.weight"}
    assert len(named_parameters(blocks)) == len(list(GPT(BASE).parameters())) - 1


def test_tied_gradient_is_the_sum_of_both_uses() -> None:
    tied = make_model(SHAPES["tied"])
    untied = GPT(BASE)
    untied.load_state_dict(tied.state_dict())
    ids = make_ids(BASE)
    for model in (tied, untied):
        torch.autograd.backward(cross_entropy(model(ids), ids.roll(1, 1)))
    first, second = untied.embedding.tokens.weight.grad, untied.head.linear.weight.grad
    assert first is not None and second is not None
    assert first.abs().amax() > 1e-4 and second.abs().amax() > 1e-4
    torch.testing.assert_close(tied.embedding.tokens.weight.grad, first + second)


def test_initial_weights_follow_the_seed() -> None:
    def draw(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        return dict(GPT(BASE).state_dict())

    one, same, other = draw(3), draw(3), draw(4)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["head.linear.weight"], other["head.linear.weight"])


def test_initial_weights_have_the_sizes_of_gpt2() -> None:
    torch.manual_seed(0)
    shape = dataclasses.replace(
        BASE, num_layers=8, hidden=128, mlp_hidden=256, vocab_size=512, positions="learned"
    )
    for name, weight in GPT(dataclasses.replace(shape, bias=True)).named_parameters():
        if name.endswith("bias"):
            assert weight.abs().sum() == 0, name
        elif "norm" in name:
            assert (weight == 1).all(), name
        else:
            residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            std = 0.02 / 4 if residual else 0.02  # sqrt(2 * 8 layers) = 4
            assert abs(weight.std().item() / std - 1) < 0.1, name


@pytest.mark.parametrize("name", ["plain", "grouped", "learned"])
def test_autocast_bf16_is_near_fp32_and_trains(name: str) -> None:
    model = make_model(SHAPES[name])
    ids = make_ids(BASE)
    expected = model(ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(ids)
        loss = cross_entropy(logits, ids.roll(1, 1))
    torch.autograd.backward(loss)
    assert logits.dtype == torch.bfloat16 and loss.dtype == torch.float32
    torch.testing.assert_close(logits.float(), expected, rtol=0.05, atol=0.15)
    for parameter in model.parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all()


def test_rotary_is_as_exact_under_autocast_as_without() -> None:
    torch.manual_seed(0)
    heads = torch.randn(1, 512, 1, 2, 64)
    exact = Rotary(64, 512).rotate(heads.bfloat16().float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = Rotary(64, 512).rotate(heads.bfloat16())
    assert rounded.dtype == torch.bfloat16
    # One rounding at the end, none before: far positions would be off by radians otherwise.
    assert torch.equal(rounded, exact.bfloat16())


def test_rotary_scores_depend_on_the_distance_only() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(8), torch.randn(8)
    rotary = Rotary(8, 100)
    queries, keys = (rotary.rotate(v.expand(1, 100, 1, 1, 8))[0, :, 0, 0] for v in (query, key))
    near, far = queries[7] @ keys[4], queries[95] @ keys[92]
    torch.testing.assert_close(near, far, rtol=0, atol=1e-4)
    torch.testing.assert_close(queries[0], query)
    assert (queries[7] @ keys[3] - near).abs() > 1e-3


def test_rotary_made_in_inference_mode_still_trains() -> None:
    model = make_model(BASE)
    ids = make_ids(BASE)
    with torch.inference_mode():
        model(ids)
    torch.autograd.backward(cross_entropy(model(ids), ids))


def test_a_bf16_model_keeps_exact_positions_and_has_no_buffers() -> None:
    model = make_model(BASE).bfloat16()
    assert model(make_ids(BASE)).dtype == torch.bfloat16
    rotary = model.blocks()["layers.0.attention"].rotary
    assert isinstance(rotary, Rotary)
    assert rotary.table(1, torch.device("cpu")).dtype == torch.complex64
    assert list(model.buffers()) == []


def test_a_model_made_on_the_meta_device_can_be_filled_and_run() -> None:
    source = make_model(BASE)
    with torch.device("meta"):
        model = GPT(BASE)
        model(torch.zeros(1, 4, dtype=torch.int64))
    model.to_empty(device="cpu").load_state_dict(source.state_dict())
    assert torch.equal(model(make_ids(BASE)), source(make_ids(BASE)))


@pytest.mark.parametrize("name", ["plain", "learned"])
def test_too_long_a_sequence_is_refused_with_the_numbers(name: str) -> None:
    text = (
        r"a sequence of 13 tokens does not fit data\.seq_len = 12: the model has no positions past "
        r"it; raise data\.seq_len or pass shorter sequences"
    )
    with pytest.raises(LayoutError, match=text):
        GPT(SHAPES[name])(make_ids(BASE, length=13))


def test_an_attention_block_on_a_late_stage_refuses_too_long_a_sequence() -> None:
    block = GPT(BASE).blocks()["layers.1.attention"]
    with pytest.raises(LayoutError, match="a sequence of 20 tokens"):
        block(torch.zeros(1, 20, BASE.hidden))


def test_a_layer_with_half_of_the_groups_gives_half_of_the_attention() -> None:
    """Equal cuts of the qkv outputs and the out inputs are whole heads; partial sums add up."""
    shape = SHAPES["grouped"]
    whole = make_model(shape).blocks()["layers.0.attention"]
    x = torch.randn(2, 5, shape.hidden, generator=torch.Generator().manual_seed(2))
    total = x
    for half in range(2):
        part = GPT(shape).blocks()["layers.0.attention"]
        assert isinstance(part, Attention)
        weights = whole.state_dict()
        part.norm.load_state_dict({"weight": weights["norm.weight"]})
        part.qkv.weight = nn.Parameter(weights["qkv.weight"].chunk(2, 0)[half])
        part.out.weight = nn.Parameter(weights["out.weight"].chunk(2, 1)[half])
        total = total + part(x) - x
    torch.testing.assert_close(total, whole(x), rtol=TOLERANCE, atol=TOLERANCE)


def test_gpt_learns_to_count() -> None:
    torch.manual_seed(0)
    model = GPT(BASE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids = (torch.arange(13) + torch.arange(8)[:, None]) % BASE.vocab_size
    losses = []
    for _ in range(40):
        loss = cross_entropy(model(ids[:, :-1]), ids[:, 1:])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(BASE.vocab_size), rel=0.1)
    assert losses[-1] < losses[0] / 2
    assert F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()) < losses[0] / 2
