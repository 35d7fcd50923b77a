"""The small parts of training: rates, optimizers, operation counts, host memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ganglion.decide.config.schema import OptimizerSection
from ganglion.decide.shapes import GPTShape
from ganglion.decide.topology import Mesh
from ganglion.execute.comm import run_threads
from ganglion.execute.measure.memory import keep_freed_memory, return_large_blocks
from ganglion.execute.measure.peak import count_flops, machine_peak
from ganglion.execute.models import GPT, cross_entropy, named_blocks, named_parameters
from ganglion.execute.update.optimizers import build_optimizers, optimizer_factory, warmup_cosine

SHAPE = GPTShape(
    vocab_size=32,
    seq_len=16,
    num_layers=2,
    hidden=16,
    num_heads=2,
    num_kv_heads=2,
    head_size=8,
    mlp_hidden=64,
    bias=True,
)


def test_warmup_then_cosine() -> None:
    factor = warmup_cosine(4, 12, 0.1)
    assert [factor(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert factor(4) == 1.0
    assert factor(8) == pytest.approx(0.55)
    assert factor(12) == factor(100) == pytest.approx(0.1)


def test_constant_after_warmup() -> None:
    factor = warmup_cosine(2, 10, 0.1, decay=False)
    assert [factor(step) for step in (0, 1, 9)] == [0.5, 1.0, 1.0]
    assert warmup_cosine(0, 10, 0.1)(0) == 1.0


def optimizers_for(name: str) -> list[torch.optim.Optimizer]:
    section = OptimizerSection(name=name, lr=0.01)  # type: ignore[arg-type]
    return build_optimizers(optimizer_factory(section), named_parameters(named_blocks(GPT(SHAPE))))


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_only_matrices_are_decayed(name: str) -> None:
    (optimizer,) = optimizers_for(name)
    for group in optimizer.param_groups:
        assert all((p.ndim >= 2) == (group["weight_decay"] > 0) for p in group["params"])


def test_muon_takes_the_inner_matrices() -> None:
    muon, adamw = optimizers_for("muon")
    assert type(muon).__name__ == "Muon"
    names = [name for group in muon.param_groups for name in group["param_names"]]
    assert names == [
        f"layers.{layer}.{part}.weight"
        for layer in range(2)
        for part in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
    ]
    rest = [name for group in adamw.param_groups for name in group["param_names"]]
    assert "embedding.tokens.weight" in rest and "head.linear.weight" in rest


def test_operations_of_a_linear_layer_are_counted_exactly() -> None:
    """2 * batch * inputs * outputs forward, twice that backward (inputs and weights)."""
    blocks: dict[str, nn.Module] = {"a": nn.Linear(8, 16), "b": nn.Linear(16, 4)}
    inputs, targets = torch.zeros(3, 8), torch.zeros(3, dtype=torch.int64)
    forward = 2 * 3 * (8 * 16 + 16 * 4)
    first_layer_input_gradient = 2 * 3 * 8 * 16  # not needed: inputs have no gradient
    expected = 3 * forward - first_layer_input_gradient
    assert count_flops(blocks, cross_entropy, inputs, targets) == expected


def test_operations_of_a_gpt_match_the_formula() -> None:
    """6 * matmul parameters a token, and 12 * layers * sequence * hidden for attention.

    The formula of PaLM (arXiv:2204.02311, appendix B); attention is counted without the mask.
    """
    model = GPT(SHAPE)
    blocks = named_blocks(model)
    matrices = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2)
    matrices -= model.embedding.tokens.weight.numel()
    per_token = 6 * matrices + 12 * SHAPE.num_layers * SHAPE.seq_len * SHAPE.hidden
    ids = torch.zeros(1, SHAPE.seq_len, dtype=torch.int64)
    counted = count_flops(blocks, cross_entropy, ids, ids)
    assert counted == pytest.approx(per_token * SHAPE.seq_len, rel=0.12)


def test_a_model_that_needs_data_has_no_count(caplog: pytest.LogCaptureFixture) -> None:
    class Peeks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum().item() >= 0 else x

    counted = count_flops(
        {"a": Peeks(4, 4)}, cross_entropy, torch.zeros(2, 4), torch.zeros(2).long()
    )
    assert counted is None
    assert "share of peak not shown" in caplog.text


def test_the_peak_is_the_sum_over_ranks() -> None:
    peaks = run_threads(
        Mesh(data=2), lambda world: machine_peak(world, torch.device("cpu"), "fp32", 0.05)
    )
    assert peaks[0] == peaks[1] > 1e6


def test_freed_memory_can_be_kept() -> None:
    assert keep_freed_memory()


def test_large_blocks_can_be_given_back() -> None:
    assert return_large_blocks()
    assert keep_freed_memory()
