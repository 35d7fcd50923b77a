"""Generation: greedy and sampled tokens, the window the model sees, and the mode it is left in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ganglion.decide.shapes import GPTShape
from ganglion.errors import ConfigError, LayoutError
from ganglion.execute.models import GPT, generate

SHAPE = GPTShape(
    vocab_size=11,
    seq_len=6,
    num_layers=1,
    hidden=16,
    num_heads=2,
    num_kv_heads=1,
    head_size=8,
    mlp_hidden=32,
)
PROMPT = torch.tensor([[3, 1, 4]])


class Fixed(nn.Module):
    """Predicts the same logits everywhere and notes the inputs it was given."""

    def __init__(self, logits: list[float]) -> None:
        super().__init__()
        self.logits = torch.tensor(logits)
        self.dropout = nn.Dropout()
        self.seen: list[Tensor] = []
        self.modes: set[bool] = set()

    def forward(self, ids: Tensor) -> Tensor:
        self.seen.append(ids)
        self.modes |= {self.training, self.dropout.training, torch.is_grad_enabled()}
        return self.logits.expand(*ids.shape, -1)


def make_model() -> GPT:
    torch.manual_seed(0)
    return GPT(SHAPE)


def counts(model: nn.Module, num_tokens: int = 2000, **settings: Any) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    out = generate(model, PROMPT, num_tokens, seq_len=1, generator=generator, **settings)
    return torch.bincount(out[0, 3:], minlength=3).tolist()


def test_greedy_is_deterministic_and_takes_the_likeliest() -> None:
    model = make_model()
    out = generate(model, PROMPT, 10, seq_len=6, temperature=0)
    assert out.shape == (1, 13) and out.dtype == torch.int64
    assert torch.equal(out, generate(model, PROMPT, 10, seq_len=6, temperature=0))
    assert torch.equal(out[:, :3], PROMPT)
    for end in range(3, 13):
        window = out[:, max(0, end - 6) : end]
        assert out[0, end] == model(window)[0, -1].argmax()


def test_the_model_sees_the_newest_tokens_of_its_window() -> None:
    model = Fixed([0.0, 0.0, 1.0])
    out = generate(model, PROMPT, 4, seq_len=4, temperature=0)
    assert [ids.tolist() for ids in model.seen] == [
        [[3, 1, 4]],
        [[3, 1, 4, 2]],
        [[1, 4, 2, 2]],
        [[4, 2, 2, 2]],
    ]
    assert out.tolist() == [[3, 1, 4, 2, 2, 2, 2]]


def test_sampling_follows_its_generator() -> None:
    model = make_model()

    def sample(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return generate(model, PROMPT, 20, seq_len=6, temperature=1.0, generator=generator)

    assert torch.equal(sample(1), sample(1))
    assert not torch.equal(sample(1), sample(2))
    state = torch.get_rng_state()
    sample(1)
    assert torch.equal(torch.get_rng_state(), state)


def test_temperature_shapes_the_odds() -> None:
    model = Fixed([0.0, 1.0, 2.0])
    for temperature in (0.5, 1.0, 4.0):
        expected = (model.logits / temperature).softmax(-1) * 2000
        drawn = torch.tensor(counts(model, temperature=temperature))
        assert (drawn - expected).abs().amax() < 120, temperature


def test_a_tiny_temperature_is_nearly_greedy() -> None:
    assert counts(Fixed([0.0, 1.0, 90.0]), 50, temperature=1e-40) == [0, 0, 50]


def test_top_k_draws_from_the_likeliest_only() -> None:
    model = Fixed([3.0, 1.0, 2.5])
    drawn = counts(model, temperature=1.0, top_k=2)
    assert drawn[1] == 0 and drawn[0] > drawn[2] > 500
    assert counts(model, 50, temperature=1.0, top_k=1) == [50, 0, 0]
    assert counts(model, temperature=1.0, top_k=99) == counts(model, temperature=1.0)


def test_modes_are_restored_one_by_one() -> None:
    model = Fixed([1.0, 0.0])
    model.train()
    model.dropout.eval()
    generate(model, PROMPT, 1, seq_len=4)
    assert model.modes == {False}
    assert model.training and not model.dropout.training
    assert torch.is_grad_enabled()


def test_modes_are_restored_after_an_error() -> None:
    model = make_model()
    with pytest.raises(LayoutError, match="a sequence of 7 tokens"):
        generate(model, PROMPT, 10, seq_len=7)
    assert all(module.training for module in model.modules())


def test_no_tokens_asked_is_the_prompt() -> None:
    assert torch.equal(generate(make_model(), PROMPT, 0, seq_len=6), PROMPT)


@pytest.mark.parametrize("shape", [(2, 3), (1, 0), (3,)])
def test_a_prompt_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    prompt = torch.zeros(shape, dtype=torch.int64)
    with pytest.raises(LayoutError, match=r"the prompt has shape .*it must be \(1, tokens\)"):
        generate(make_model(), prompt, 1, seq_len=6)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"num_tokens": -1}, "num_tokens is -1; it must be at least 0"),
        ({"seq_len": 0}, "seq_len is 0; it must be at least 1"),
        ({"temperature": -0.5}, "temperature is -0.5; it must be at least 0"),
        ({"top_k": -2}, "top_k is -2; it must be at least 0"),
    ],
)
def test_numbers_out_of_range_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        generate(make_model(), PROMPT, **{"num_tokens": 1, "seq_len": 6, **settings})
