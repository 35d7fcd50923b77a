"""Blocks: what counts as an ordered model, and the names its tensors go by."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

from ganglion.errors import ConfigError
from ganglion.execute.models import (
    BlockModel,
    Blocks,
    evaluation_mode,
    named_blocks,
    named_buffers,
    named_parameters,
    tied_names,
)


class TwoBlocks(BlockModel):
    """A model of two linear blocks, with an optional parameter outside of them."""

    def __init__(self, stray: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.inner = nn.ModuleDict({"second": nn.Linear(4, 2)})
        if stray:
            self.scale = nn.Parameter(torch.ones(1))

    def blocks(self) -> dict[str, nn.Module]:
        return {"first": self.first, "inner.second": self.inner["second"]}


class ListsItself(nn.Module):
    """A user's module with a `blocks()` that returns a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def blocks(self) -> list[nn.Module]:
        return [self.a, self.b]


class Counted(nn.Module):
    """A block with one saved buffer and one that is not saved, of a dtype that could not be."""

    kept: Tensor
    scratch: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(1))
        self.register_buffer("scratch", torch.zeros(2, dtype=torch.complex64), persistent=False)


def test_forward_runs_the_blocks_in_order() -> None:
    torch.manual_seed(0)
    model = TwoBlocks()
    x = torch.randn(5, 3)
    assert torch.equal(model(x), model.inner["second"](model.first(x)))


def test_a_block_model_must_list_its_blocks() -> None:
    class Unlisted(BlockModel):
        pass

    with pytest.raises(TypeError, match="blocks"):
        Unlisted()  # type: ignore[abstract]


def test_sequences_are_numbered() -> None:
    modules = [nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2)]
    for given in (modules, tuple(modules), nn.Sequential(*modules)):
        named = named_blocks(given)
        assert list(named) == ["0", "1", "2"]
        assert list(named.values()) == modules


def test_a_sequential_with_names_is_numbered_and_its_children_keep_them() -> None:
    model = nn.Sequential(OrderedDict(first=nn.Linear(2, 2), last=nn.Linear(2, 2)))
    assert list(named_blocks(model)) == ["0", "1"]
    named = named_blocks(dict(model.named_children()))
    assert list(named_parameters(named)) == list(model.state_dict())


def test_a_module_may_be_used_twice() -> None:
    shared = nn.Linear(2, 2)
    named = named_blocks(nn.Sequential(shared, nn.ReLU(), shared))
    assert list(named) == ["0", "1", "2"]
    assert list(named_parameters(named)) == ["0.weight", "0.bias"]
    assert tied_names(named) == {"2.weight": "0.weight", "2.bias": "0.bias"}


def test_a_mapping_stays_as_it_is() -> None:
    given = {"in": nn.Linear(2, 2), "out": nn.Linear(2, 2)}
    named = named_blocks(given)
    assert list(named.items()) == list(given.items())


def test_a_module_with_blocks_lists_itself() -> None:
    model = TwoBlocks()
    named = named_blocks(model)
    assert list(named_parameters(named)) == list(model.state_dict())
    other = ListsItself()
    assert named_blocks(other) == {"0": other.a, "1": other.b}


@pytest.mark.parametrize("empty", [[], (), {}, nn.Sequential()], ids=repr)
def test_no_blocks_are_refused(empty: Blocks) -> None:
    with pytest.raises(ConfigError, match="has 0 blocks; pass a list with at least one module"):
        named_blocks(empty)


def test_a_whole_module_is_refused_with_the_remedy() -> None:
    class Whole(nn.Module):
        pass

    with pytest.raises(ConfigError, match=r"a Whole is one whole module.*pass a list of modules"):
        named_blocks(Whole())


def test_a_child_named_blocks_is_not_a_list_of_blocks() -> None:
    class Vision(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(2, 2)])

    with pytest.raises(ConfigError, match="a Vision is one whole module"):
        named_blocks(Vision())


def test_a_stray_parameter_is_refused_by_name() -> None:
    text = r"parameter 'scale' of TwoBlocks is in none of its 2 blocks \['first', 'inner.second'\]"
    with pytest.raises(ConfigError, match=text):
        named_blocks(TwoBlocks(stray=True))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([nn.ReLU(), len], "block '1' is of type builtin_function_or_method, not a torch.nn.Mod"),
        ({"": nn.ReLU()}, "block name '' is not a name; use a string that is not empty"),
        ({3: nn.ReLU()}, "block name 3 is not a name"),
        ("text", "block '0' is of type str, not a torch.nn.Module: wrap it in a module"),
        (None, "the model was given as NoneType; pass a list of modules"),
        (iter([nn.ReLU()]), "the model was given as list_iterator; pass a list of modules"),
    ],
    ids=["function", "no_name", "number", "text", "none", "iterator"],
)
def test_what_is_no_block_is_refused(given: Blocks, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        named_blocks(given)


def test_names_that_meet_across_blocks_are_refused() -> None:
    outer = nn.Sequential(OrderedDict(b=nn.Linear(2, 2)))
    with pytest.raises(ConfigError, match=r"both named 'a.b.weight'; rename one of the blocks"):
        named_blocks({"a": outer, "a.b": nn.Linear(2, 2)})
    with pytest.raises(ConfigError, match=r"both named 'a.b.kept'"):
        named_blocks({"a": nn.Sequential(OrderedDict(b=Counted())), "a.b": Counted()})


def test_tied_parameters_appear_once_under_their_first_name() -> None:
    first, second, third = (nn.Linear(2, 2, bias=False) for _ in range(3))
    third.weight = first.weight
    blocks = {"first": first, "second": second, "third": third}
    parameters = named_parameters(blocks)
    assert list(parameters) == ["first.weight", "second.weight"]
    assert parameters["first.weight"] is third.weight
    assert tied_names(blocks) == {"third.weight": "first.weight"}


def test_parameters_tied_inside_one_block_are_named_too() -> None:
    block = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    block[1].weight = block[0].weight
    assert list(named_parameters({"pair": block})) == ["pair.0.weight"]
    assert tied_names({"pair": block}) == {"pair.1.weight": "pair.0.weight"}


def test_equal_values_are_not_tied() -> None:
    blocks = {name: nn.LayerNorm(2) for name in "ab"}
    assert list(named_parameters(blocks)) == ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert tied_names(blocks) == {}


def test_persistent_buffers_are_all_there_once() -> None:
    counted = Counted()
    buffers = named_buffers({"a": counted, "norm": nn.BatchNorm1d(2), "again": counted})
    assert list(buffers) == [
        "a.kept",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]
    assert buffers["a.kept"] is counted.kept


def test_buffers_are_those_of_a_state_dict() -> None:
    model = nn.Sequential(nn.Sequential(Counted(), nn.BatchNorm1d(2)), Counted())
    blocks = dict(model.named_children())
    names = [*named_parameters(blocks), *named_buffers(blocks)]
    assert sorted(names) == sorted(model.state_dict())


def test_evaluation_mode_restores_every_submodule() -> None:
    frozen, live = nn.Sequential(nn.Dropout()), nn.Sequential(nn.Dropout())
    frozen[0].eval()
    inside = [*frozen.modules(), *live.modules()]
    with evaluation_mode([frozen, live, frozen]):
        assert not any(module.training for module in inside)
    assert [module.training for module in inside] == [True, False, True, True]
