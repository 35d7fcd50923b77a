"""A run that was saved and resumed is bitwise the run that never stopped, for every optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer

from ganglion.decide.plan import Plan
from ganglion.errors import CheckpointError
from ganglion.execute.checkpoint import (
    SavedState,
    changed_settings,
    load,
    optimizer_record,
    optimizer_scalars,
    optimizer_tensors,
    prepare_optimizers,
    read_state,
    save,
)

Named = list[tuple[str, nn.Parameter]]


class Alone:
    """The ranks of a run with one process."""

    rank = 0
    num_ranks = 1

    def barrier(self) -> None:
        """Nobody to wait for."""


class CountingSGD(SGD):
    """Keeps numbers in its state that are no tensors, and lets them act."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["calls"] = state.get("calls", 0) + 1
                state["pace"] = 0.5 * state["calls"]
                state["memo"] = None
                parameter.grad.mul_(state["pace"])
        super().step()


def muon_and_adamw(named: Named) -> list[Optimizer]:
    matrices = [(name, tensor) for name, tensor in named if tensor.ndim == 2]
    rest = [(name, tensor) for name, tensor in named if tensor.ndim != 2]
    return [Muon(matrices, lr=0.02, weight_decay=0.1), AdamW(rest, lr=0.01)]


def adamw_in_groups(named: Named) -> list[Optimizer]:
    decayed = [(name, tensor) for name, tensor in named if tensor.ndim == 2]
    rest = [(name, tensor) for name, tensor in named if tensor.ndim != 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return [AdamW(groups, lr=0.01, betas=(0.9, 0.95))]


OPTIMIZERS: dict[str, Callable[[Named], list[Optimizer]]] = {
    "adamw": lambda named: [AdamW(named, lr=0.01, weight_decay=0.1, foreach=False)],
    "adamw_foreach": lambda named: [AdamW(named, lr=0.01, weight_decay=0.1, foreach=True)],
    "adamw_fused": lambda named: [AdamW(named, lr=0.01, weight_decay=0.1, fused=True)],
    "adamw_amsgrad": lambda named: [AdamW(named, lr=0.01, amsgrad=True)],
    "adamw_groups": adamw_in_groups,
    "sgd": lambda named: [SGD(named, lr=0.1)],
    "sgd_momentum": lambda named: [SGD(named, lr=0.1, momentum=0.9, nesterov=True)],
    "muon": muon_and_adamw,
    "counting": lambda named: [CountingSGD(named, lr=0.01, momentum=0.9)],
}


class Net(nn.Module):
    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.down = nn.Linear(8, 2)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.to(dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.down(torch.tanh(self.norm(self.up(inputs)))) * self.temperature
        return outputs


def train(net: Net, optimizers: list[Optimizer], steps: Iterable[int]) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(1000 + step)
        inputs = torch.randn(5, 6, generator=generator).to(net.up.weight.dtype)
        for optimizer in optimizers:
            optimizer.zero_grad()
        net(inputs).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def everything(net: Net, optimizers: list[Optimizer]) -> dict[str, Tensor]:
    return {**dict(net.named_parameters()), **optimizer_tensors(optimizers)}


def save_run(folder: Path, net: Net, optimizers: list[Optimizer], step: int = 3) -> Path:
    state = SavedState(step=step, plan=Plan(), optimizer=optimizer_record(optimizers))
    return save(folder, everything(net, optimizers), state, Alone(), keep=1, export=None)


def resume(path: Path, net: Net, optimizers: list[Optimizer]) -> None:
    prepare_optimizers(optimizers, path)
    load(path, everything(net, optimizers))


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert sorted(left) == sorted(right)
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        assert torch.equal(left[name], right[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_resuming_is_bitwise_not_stopping(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    net = Net(0, dtype)
    optimizers = OPTIMIZERS[kind](list(net.named_parameters()))
    train(net, optimizers, range(3))
    path = save_run(tmp_path, net, optimizers)

    fresh = Net(1, dtype)
    resumed = OPTIMIZERS[kind](list(fresh.named_parameters()))
    resume(path, fresh, resumed)
    assert_same(everything(net, optimizers), everything(fresh, resumed))
    assert optimizer_scalars(optimizers) == optimizer_scalars(resumed)

    train(net, optimizers, range(3, 6))
    train(fresh, resumed, range(3, 6))
    assert_same(everything(net, optimizers), everything(fresh, resumed))
    assert optimizer_scalars(optimizers) == optimizer_scalars(resumed)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_checkpoint_of_step_0_resumes_as_a_fresh_run(tmp_path: Path, kind: str) -> None:
    net = Net(0)
    optimizers = OPTIMIZERS[kind](list(net.named_parameters()))
    path = save_run(tmp_path, net, optimizers, step=0)
    fresh = Net(1)
    resumed = OPTIMIZERS[kind](list(fresh.named_parameters()))
    resume(path, fresh, resumed)
    train(net, optimizers, range(3))
    train(fresh, resumed, range(3))
    assert_same(everything(net, optimizers), everything(fresh, resumed))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_preparing_leaves_weights_and_settings_alone(tmp_path: Path, kind: str) -> None:
    net = Net(0)
    optimizers = OPTIMIZERS[kind](list(net.named_parameters()))
    train(net, optimizers, range(2))
    path = save_run(tmp_path, net, optimizers)
    fresh = Net(1)
    prepared = OPTIMIZERS[kind](list(fresh.named_parameters()))
    settings = optimizer_record(prepared)["groups"]
    prepare_optimizers(prepared, path)
    assert_same(dict(fresh.named_parameters()), dict(Net(1).named_parameters()))
    assert optimizer_record(prepared)["groups"] == settings
    for key, tensor in optimizer_tensors(optimizers).items():
        made = optimizer_tensors(prepared)[key]
        assert (made.shape, made.dtype, made.stride()) == (
            tensor.shape,
            tensor.dtype,
            tensor.stride(),
        )
        assert not made.requires_grad and not made.any(), key


def test_state_left_from_before_is_replaced(tmp_path: Path) -> None:
    net = Net(0)
    named = list(net.named_parameters())
    optimizers = OPTIMIZERS["sgd_momentum"](named)
    path = save_run(tmp_path, net, optimizers, step=0)
    train(net, optimizers, range(2))
    assert optimizer_tensors(optimizers)
    prepare_optimizers(optimizers, path)
    assert optimizer_tensors(optimizers) == {}


def test_parameters_without_gradients_have_no_state(tmp_path: Path) -> None:
    net = Net(0)
    net.temperature.requires_grad_(False)
    optimizers: list[Optimizer] = [AdamW(list(net.named_parameters()), lr=0.01)]
    train(net, optimizers, range(2))
    assert not any(key.endswith("temperature") for key in optimizer_tensors(optimizers))
    fresh = Net(1)
    fresh.temperature.requires_grad_(False)
    resumed: list[Optimizer] = [AdamW(list(fresh.named_parameters()), lr=0.01)]
    resume(save_run(tmp_path, net, optimizers), fresh, resumed)
    assert_same(everything(net, optimizers), everything(fresh, resumed))


def test_state_keeps_its_own_dtype(tmp_path: Path) -> None:
    net = Net(0)
    optimizers = OPTIMIZERS["adamw"](list(net.named_parameters()))
    train(net, optimizers, range(1))
    for state in optimizers[0].state.values():
        state["step"] = state["step"].double()
        state["exp_avg"] = state["exp_avg"].bfloat16()
    path = save_run(tmp_path, net, optimizers)
    fresh = Net(1)
    resumed = OPTIMIZERS["adamw"](list(fresh.named_parameters()))
    resume(path, fresh, resumed)
    assert_same(everything(net, optimizers), everything(fresh, resumed))


def test_keys_are_entry_then_parameter() -> None:
    net = Net(0)
    optimizers = muon_and_adamw(list(net.named_parameters()))
    train(net, optimizers, range(1))
    keys = optimizer_tensors(optimizers)
    assert "optimizer.momentum_buffer.up.weight" in keys
    assert "optimizer.exp_avg_sq.norm.bias" in keys
    assert keys["optimizer.step.temperature"].shape == ()


def test_the_layout_of_groups_may_change(tmp_path: Path) -> None:
    net = Net(0)
    optimizers = OPTIMIZERS["adamw"](list(net.named_parameters()))
    train(net, optimizers, range(2))
    path = save_run(tmp_path, net, optimizers)
    fresh = Net(1)
    resumed = adamw_in_groups(list(fresh.named_parameters())[::-1])
    resume(path, fresh, resumed)
    assert_same(everything(net, optimizers), everything(fresh, resumed))


def test_the_run_file_decides_settings_and_changes_are_told(tmp_path: Path) -> None:
    net = Net(0)
    optimizers: list[Optimizer] = [AdamW(list(net.named_parameters()), lr=0.01)]
    train(net, optimizers, range(1))
    path = save_run(tmp_path, net, optimizers)
    fresh = Net(1)
    resumed: list[Optimizer] = [AdamW(list(fresh.named_parameters()), lr=0.5, betas=(0.8, 0.9))]
    resume(path, fresh, resumed)
    assert resumed[0].param_groups[0]["lr"] == 0.5
    assert changed_settings(resumed, read_state(path).optimizer) == [
        "AdamW betas: [0.9, 0.999] -> [0.8, 0.9]",
        "AdamW lr: 0.01 -> 0.5",
    ]
    assert changed_settings(optimizers, read_state(path).optimizer) == []


def test_another_kind_of_optimizer_is_refused(tmp_path: Path) -> None:
    net = Net(0)
    optimizers = OPTIMIZERS["adamw"](list(net.named_parameters()))
    train(net, optimizers, range(1))
    path = save_run(tmp_path, net, optimizers)
    with pytest.raises(CheckpointError, match=r"holds AdamW state for .*, but the run uses SGD"):
        prepare_optimizers([SGD(list(net.named_parameters()))], path)


def test_an_optimizer_without_names_is_refused() -> None:
    net = Net(0)
    with pytest.raises(CheckpointError, match=r"Adam was built without parameter names"):
        optimizer_tensors([Adam(net.parameters())])


def test_a_parameter_in_two_optimizers_is_refused() -> None:
    named = list(Net(0).named_parameters())
    with pytest.raises(CheckpointError, match=r"two optimizer groups hold .* named temperature"):
        optimizer_tensors([SGD(named), SGD(named)])


def test_state_that_is_neither_tensor_nor_number_is_refused() -> None:
    net = Net(0)
    optimizer = SGD(list(net.named_parameters()))
    optimizer.state[net.temperature]["history"] = [1, 2]
    with pytest.raises(CheckpointError, match=r"optimizer\.history\.temperature is a list"):
        optimizer_record([optimizer])
