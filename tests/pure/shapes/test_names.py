"""Models by name: published sizes, sizes of one's own, and names that are none."""

from __future__ import annotations

import pytest

from ganglion.decide.shapes import KNOWN_MODELS, is_model_name, named_model
from ganglion.errors import ConfigError, LayoutError

# Parameters in billions as published, and how many digits of them are: GPT-2's released weights;
# BERT's paper; 2BW's sweep (spec D.1); AxoNN table I; 12 l h^2 + V h of AxoNN-4D's models (spec
# B.5); Llama's papers and released weights.
PUBLISHED = [
    ("gpt2", 0.124, 0.005),
    ("gpt2-medium", 0.355, 0.005),
    ("gpt2-large", 0.774, 0.005),
    ("gpt2-xl", 1.558, 0.005),
    ("gpt3-175b", 175, 0.005),
    ("gpt-355m", 0.355, 0.01),
    ("gpt-1.3b", 1.31, 0.01),
    ("gpt-2.2b", 2.16, 0.01),
    ("gpt-3.8b", 3.78, 0.01),
    ("bert-355m", 0.355, 0.01),
    ("bert-2.2b", 2.16, 0.01),
    ("bert-base", 0.110, 0.01),
    ("bert-large", 0.335, 0.015),
    ("gpt-12b", 12, 0.03),
    ("gpt-24b", 24, 0.03),
    ("gpt-50b", 50, 0.03),
    ("gpt-100b", 100, 0.03),
    ("axonn4d-5b", 5.04, 0.005),
    ("axonn4d-10b", 10.33, 0.005),
    ("axonn4d-20b", 20.10, 0.005),
    ("axonn4d-40b", 39.20, 0.005),
    ("axonn4d-60b", 57.55, 0.005),
    ("axonn4d-80b", 76.73, 0.005),
    ("axonn4d-160b", 152.8, 0.005),
    ("axonn4d-320b", 310.1, 0.005),
    ("axonn4d-640b", 619.3, 0.005),
    ("llama-7b", 6.738, 0.001),
    ("llama-13b", 13.016, 0.001),
    ("llama2-70b", 68.977, 0.001),
    ("llama3-8b", 8.030, 0.001),
    ("llama3-70b", 70.554, 0.001),
]


@pytest.mark.parametrize(("name", "billions", "tolerance"), PUBLISHED)
def test_known_models_have_the_parameters_that_were_published(
    name: str, billions: float, tolerance: float
) -> None:
    assert named_model(name).num_parameters == pytest.approx(billions * 1e9, rel=tolerance)


def test_every_known_model_is_compared() -> None:
    assert [name for name, _, _ in PUBLISHED if name in KNOWN_MODELS] == [p[0] for p in PUBLISHED]
    assert {name for name, _, _ in PUBLISHED} == set(KNOWN_MODELS)


def test_vgg19_has_the_parameters_and_operations_of_its_paper() -> None:
    model = named_model("vgg19")
    assert model.num_parameters == 143_667_240
    assert model.num_blocks == 19
    multiplications = sum(block.flops.forward for block in model.blocks) / 2
    assert multiplications == pytest.approx(19.6e9, rel=0.005)


@pytest.mark.parametrize("name", ["gpt-12b", "gpt-24b", "gpt-50b", "gpt-100b"])
def test_flop_of_a_batch_follow_narayanan(name: str) -> None:
    """96 b s l h^2 (1 + s/(6h) + V/(16 l h)), with recomputation: spec A.8."""
    model, batch = named_model(name), 16384
    hidden, layers = model.splits[-1].size, (model.num_blocks - 2) // 2
    seq, vocab = model.tokens, 51200
    expected = 96 * batch * seq * layers * hidden**2
    expected *= 1 + seq / (6 * hidden) + vocab / (16 * layers * hidden)
    costs = [block.cost(batch) for block in model.blocks]
    rerun = sum(cost.forward_flops for cost in costs[:-1])  # all but the head
    assert sum(cost.total_flops for cost in costs) + rerun == pytest.approx(expected, rel=1e-12)


def test_sizes_may_be_given_or_changed() -> None:
    given = named_model("gpt:layers=48,hidden=4512,heads=24,vocab=51200,seq=512")
    assert given.blocks == named_model("gpt-12b").blocks
    longer = named_model("gpt-12b:seq=1024")
    assert (longer.tokens, longer.name) == (1024, "gpt-12b:seq=1024")
    assert named_model("llama-7b:layers=1").num_blocks == 4
    untied = named_model("gpt2:tied=0")
    assert untied.num_parameters - named_model("gpt2").num_parameters == 50257 * 768


def test_grouped_keys_and_gates_are_counted() -> None:
    model = named_model("llama:layers=1,hidden=64,heads=8,kv_heads=2,mlp_hidden=96,vocab=32,seq=4")
    _, attention, mlp, _ = model.blocks
    assert attention.num_parameters == 64 + 64 * (64 + 2 * 16) + 64 * 64
    assert mlp.num_parameters == 64 + 3 * 64 * 96
    assert mlp.flops.forward == 2 * 4 * 3 * 64 * 96


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gpt-12", "'gpt-12' is not the name of a model: did you mean 'gpt-12b'?"),
        ("gtp:layers=2", "did you mean 'gpt'?"),
        ("resnet", "`ganglion describe --list` has all names"),
        ("gpt:layers=2", "does not say hidden: write it as in 'gpt:layers=...,hidden=...,heads="),
        ("gpt:layrs=2", "has no size 'layrs': did you mean 'layers'?"),
        ("gpt2:layers=-3", "layers=-3 is no whole number of at least 1"),
        ("gpt2:layers", "layers= is no whole number of at least 1"),
        ("gpt2:zzz=1", "has no size 'zzz': sizes are"),
        ("gpt:layers=2,hidden=10,heads=4", "hidden=10 is not a multiple of heads=4"),
        ("conv:image=5", "image=5 leaves nothing of an image"),
    ],
)
def test_wrong_names_are_refused_with_the_nearest(name: str, text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        named_model(name)
    assert text in str(refused.value)


def test_errors_of_sizes_are_those_of_layouts() -> None:
    with pytest.raises(LayoutError, match=r"model 'llama:.*kv_heads = 3"):
        named_model("llama:layers=2,hidden=8,heads=4,kv_heads=3")


@pytest.mark.parametrize("text", ["run.toml", "model.json", "mine:build", "package.mine:build"])
def test_other_sources_are_no_names(text: str) -> None:
    assert not is_model_name(text)
