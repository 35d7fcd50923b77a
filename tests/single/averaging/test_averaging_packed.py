"""Packed weights stay one memory with the model, whatever a user does to the model."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ganglion.errors import ConfigError
from ganglion.execute.averaging.methods.packed import Packed
from tests.support.averages import batch, copies, loss_of, make_model


class Mixed(nn.Module):
    """Frozen, tied, channels_last, buffers of two kinds, and two dtypes if asked."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5).to(dtype)
        self.tied = nn.Linear(4, 5, bias=False).to(dtype)
        self.tied.weight = self.head.weight
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


def test_trainable_tensors_and_float_buffers_once_each() -> None:
    packed = Packed(Mixed())
    assert packed.names == (
        *("conv.weight", "conv.bias", "norm.weight", "norm.bias", "head.weight", "head.bias"),
        *("norm.running_mean", "norm.running_var"),
    )
    assert packed.numels == (108, 4, 4, 4, 20, 5, 4, 4)
    assert packed.num_trained == packed.entries[6].offset


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_packing_changes_no_value_and_no_stride(dtype: torch.dtype) -> None:
    model = Mixed(dtype)
    before, strides = copies(model), {n: p.stride() for n, p in model.named_parameters()}
    packed = Packed(model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.stride() == strides[name]
    assert model.tied.weight is model.head.weight
    views = packed.views(packed.flat)
    assert all(torch.equal(views[n], before[n].to(views[n].dtype)) for n in views if n in before)
    packed.scatter()  # there and back again, without a loss
    assert all(torch.equal(w, before[name]) for name, w in copies(model).items())


def test_one_wide_dtype_is_exchanged_where_it_is() -> None:
    model = make_model(torch.float32)
    packed = Packed(model)
    packed.flat.add_(1.0)
    start = copies(make_model(torch.float32))
    assert all(torch.equal(w, start[name] + 1.0) for name, w in copies(model).items())
    model[0].bias.data.zero_()
    assert packed.views(packed.flat)["0.bias"].tolist() == [0.0] * 7


def test_narrow_weights_are_exchanged_in_float32() -> None:
    model = make_model(torch.bfloat16)
    packed = Packed(model)
    assert packed.flat.dtype == torch.float32
    packed.flat.fill_(2.0)
    assert not torch.equal(model[0].bias, torch.full_like(model[0].bias, 2.0))
    packed.scatter()
    assert model[0].bias.tolist() == [2.0] * 7
    model[0].bias.data.fill_(3.0)
    assert packed.views(packed.gather())["0.bias"].tolist() == [3.0] * 7


def test_parameters_that_are_views_of_one_memory_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = nn.Parameter(model[0].weight.data)
    packed = Packed(model)
    assert packed.names == ("0.weight", "0.bias", "1.bias")
    packed.flat.fill_(4.0)
    assert model[0].weight.data_ptr() == model[1].weight.data_ptr()
    assert model[1].weight.tolist() == [[4.0] * 3] * 3


def test_parameters_that_overlap_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[1].weight = nn.Parameter(model[0].weight.data[:2])
    with pytest.raises(ConfigError, match=r"0\.weight and 1\.weight|1\.weight and 0\.weight"):
        Packed(model)


def test_a_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="no trainable parameter"):
        Packed(nn.Linear(2, 2).requires_grad_(False))


def test_a_model_without_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\['meta'\]"):
        Packed(nn.Linear(2, 2, device="meta"))


# --- what users do --------------------------------------------------------------------------------


def train_once(model: nn.Module, *, set_to_none: bool, autocast: bool = False) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        optimizer.zero_grad(set_to_none=set_to_none)
        x, y = batch(0, step, torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of(model(x).float(), y)
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_views_survive_training(set_to_none: bool, autocast: bool) -> None:
    plain, model = make_model(torch.float32), make_model(torch.float32)
    packed = Packed(model)
    for each in (plain, model):
        train_once(each, set_to_none=set_to_none, autocast=autocast)
    packed.check()
    assert all(torch.equal(w, copies(plain)[n]) for n, w in copies(model).items())
    assert all(torch.equal(v, copies(plain)[n]) for n, v in packed.views(packed.flat).items())


def test_views_survive_load_state_dict() -> None:
    model, other = make_model(torch.float32), make_model(torch.float32, seed=7)
    packed = Packed(model)
    model.load_state_dict(other.state_dict())
    packed.check()
    assert torch.equal(packed.views(packed.flat)["2.weight"], other[2].weight)


def test_a_parameter_that_was_replaced_is_named() -> None:
    model, other = make_model(torch.float32), make_model(torch.float32, seed=7)
    packed = Packed(model)
    model.load_state_dict(copies(other), assign=True)
    with pytest.raises(ConfigError, match="weight of the model was replaced by another tensor"):
        packed.check()


@pytest.mark.parametrize("what", ["data", "double"])
def test_a_tensor_that_left_is_named_and_can_come_back(what: str) -> None:
    model, other = make_model(torch.float32), make_model(torch.float32, seed=7)
    packed = Packed(model)
    if what == "data":
        model[2].bias.data = other[2].bias.detach().clone()
    else:
        model.double()
    with pytest.raises(ConfigError, match=r"(0\.weight|2\.bias) left the packed memory"):
        packed.check()
    if what == "double":
        with pytest.raises(ConfigError, match=r"float32 .* is now torch\.float64"):
            packed.repack()
        return
    packed.repack()
    packed.check()
    assert torch.equal(packed.views(packed.flat)["2.bias"], other[2].bias)


def test_gradients_of_one_vector() -> None:
    model = make_model(torch.float32)
    packed = Packed(model)
    x, y = batch(0, 0, torch.float32)
    loss_of(model(x), y).backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    packed.gather_gradients()
    model[0].bias.grad = None  # what was gathered before must not stay
    flat = packed.gather_gradients()
    assert torch.equal(packed.views(flat)["2.weight"], wanted["2.weight"])
    assert packed.views(flat)["0.bias"].tolist() == [0.0] * 7
    flat.mul_(2)
    packed.scatter_gradients()
    assert model[2].weight.grad is not None
    assert torch.equal(model[2].weight.grad, 2 * wanted["2.weight"])
    assert model[2].weight.grad.data_ptr() == packed.views(flat)["2.weight"].data_ptr()


# --- cutting --------------------------------------------------------------------------------------


def stack(sizes: list[int]) -> Packed:
    module = nn.Module()
    for number, size in enumerate(sizes):
        module.register_parameter(f"p{number}", nn.Parameter(torch.zeros(size)))
    return Packed(module)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=12), st.integers(0, 2000))
def test_every_element_is_in_one_part_whatever_the_bound(sizes: list[int], bound: int) -> None:
    packed = stack(sizes)
    parts = packed.bounds(bound)
    assert parts[0][0] == 0 and parts[-1][1] == packed.numel
    assert all(end == begin for (_, end), (begin, _) in pairwise(parts))
    starts = {entry.offset for entry in packed.entries}
    assert all(begin in starts and begin < end for begin, end in parts)
    for begin, end in parts:
        inside = [e for e in packed.entries if begin <= e.offset < end]
        assert len(inside) == 1 or end - begin <= bound


@given(st.lists(st.integers(1, 400), min_size=1, max_size=12).flatmap(
    lambda sizes: st.tuples(st.just(sizes), st.integers(1, len(sizes)))
))  # fmt: skip
def test_fragments_cover_everything_and_none_is_empty(case: tuple[list[int], int]) -> None:
    sizes, number = case
    packed = stack(sizes)
    parts = packed.fragments(number)
    assert len(parts) == number
    assert parts[0][0] == 0 and parts[-1][1] == packed.numel
    assert all(end == begin for (_, end), (begin, _) in pairwise(parts))
    assert all(any(b <= e.offset < f for e in packed.entries) for b, f in parts)


def test_more_fragments_than_tensors_are_refused() -> None:
    with pytest.raises(ConfigError, match="fragments = 3, but the model has 2 tensors"):
        stack([4, 4]).fragments(3)
