"""Runs of described models: predicted as built-in ones are, by file or by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import ganglion
from ganglion.decide.config import (
    Override,
    RunFile,
    check_trainable,
    expected_shape,
    load_run_file,
    own_code_key,
    resolve,
)
from ganglion.decide.plan import Plan
from ganglion.decide.predict import Prediction, fit_budget, read_source
from ganglion.decide.shapes import describe_shape, description_to_json, named_model
from ganglion.errors import ConfigError

MODEL = {"layers": 4, "hidden": 64, "heads": 8, "kv_heads": 4, "tied_embedding": True}
LAYOUTS: list[dict[str, object]] = [
    {},
    {"parallel.pipe": 4, "parallel.schedule": "2bw"},
    {"train.precision": "bf16", "memory.recompute": "full"},
    {"train.precision": "bf16_master", "parallel.x": 2, "parallel.y": 2, "parallel.z": 2},
    {"parallel.x": 4, "parallel.pipe": 2, "train.precision": "bf16"},
    {"parallel.y": 2, "parallel.z": 2, "optimizer.name": "muon"},
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run file of a built-in GPT, and a description of the same model."""
    monkeypatch.chdir(tmp_path)
    lines = [f"{key} = {str(value).lower()}" for key, value in MODEL.items()]
    (tmp_path / "run.toml").write_text("\n".join(["[model]", *lines]))
    shape = expected_shape(load_run_file({"model": MODEL}))
    (tmp_path / "model.json").write_text(description_to_json(describe_shape(shape)))
    return tmp_path


def predicted(source: str, **changes: object) -> Prediction:
    return ganglion.predict(source, cluster="summit", overrides=changes)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.usefixtures("folder")
def test_a_description_is_predicted_as_the_closed_form(layout: dict[str, object]) -> None:
    assert predicted("model.json", **layout) == predicted("run.toml", **layout)


@pytest.mark.usefixtures("folder")
def test_own_code_with_a_description_is_predicted() -> None:
    own = {"model.build": "mine:build", "model.description": "model.json"}
    found, closed = predicted("run.toml", **own, **_default_sizes()), predicted("run.toml")
    assert (found.step, found.memory) == (closed.step, closed.memory)


def _default_sizes() -> dict[str, object]:
    return {f"model.{key}": RunFile().model.model_dump()[key] for key in MODEL}


def described(**sections: dict[str, object]) -> RunFile:
    model = {"build": "mine:build", "description": "gpt2", **sections.pop("model", {})}
    return load_run_file({"model": model, "data": {"seq_len": 1024}, **sections})


def test_a_description_makes_own_code_known() -> None:
    assert own_code_key(described()) is None
    assert own_code_key(described(model={"description": ""})) == "model.build"
    assert own_code_key(described(data={"kind": "dataset", "source": "mine:data"})) is None
    assert expected_shape(described()) == named_model("gpt2")


def test_a_memory_budget_of_described_code_is_fitted() -> None:
    run = described(memory={"device_gib": 4.0}, train={"microbatch_size": 4})
    fit = fit_budget(run, resolve)
    assert fit.chosen
    assert fit.peak_bytes < 4 * 2**30


def test_a_name_is_a_run_with_its_own_length() -> None:
    run = read_source(Path("gpt-12b"), [Override("parallel.pipe", "4")])
    assert isinstance(run, RunFile)
    assert (run.model.description, run.data.seq_len, run.parallel.pipe) == ("gpt-12b", 512, 4)


@pytest.mark.usefixtures("folder")
def test_a_json_file_is_a_plan_or_a_description(folder: Path) -> None:
    (folder / "plan.json").write_text(Plan(pipe=2).to_json())
    assert isinstance(read_source(Path("plan.json")), Plan)
    assert isinstance(read_source(Path("model.json")), RunFile)


@pytest.mark.parametrize(
    ("source", "changes", "text"),
    [
        ("gpt-12", {}, "is neither a file nor the name of a model: did you mean 'gpt-12b'?"),
        ("none.json", {}, "none.json cannot be read"),
        ("gpt-12b", {"model.layers": 4}, "--model.layers changes nothing of gpt-12b"),
        ("gpt-12b", {"data.seq_len": 64}, "is of samples of 512 tokens: set data.seq_len = 512"),
        ("gpt-12b", {"parallel.x": 5}, "heads of gpt-12b = 24 cannot be split over parallel.x"),
        ("vgg19", {"parallel.y": 7}, "cannot be split over parallel.y = 7"),
        ("gpt2", {"parallel.pipe": 64}, "the model has 26 blocks: use at most 26 stages"),
        (
            "run.toml",
            {"model.description": "gpt2"},
            "model.hidden = 64 changes nothing beside model.description = 'gpt2'",
        ),
        ("run.toml", {"model.description": "gtp2"}, "did you mean 'gpt2'?"),
        ("run.toml", {"model.description": "none.json"}, "none.json cannot be read"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_sources_that_cannot_be_predicted_are_refused(
    source: str, changes: dict[str, object], text: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        predicted(source, **changes)
    assert text in str(refused.value)


def test_axes_that_a_description_names_no_size_for_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(description_to_json(replace(named_model("gpt2"), splits=())))
    with pytest.raises(ConfigError, match=r"names no size that x could split: set parallel.x = 1"):
        predicted(str(path), **{"parallel.x": 2})


def test_a_model_in_numbers_is_not_trained() -> None:
    check_trainable(described())
    with pytest.raises(ConfigError, match=r"can be predicted but not trained: set model\.build"):
        check_trainable(described(model={"build": ""}))


def test_samples_without_tokens_go_with_sequences_of_any_length() -> None:
    """A model of numbers is described alone: data.seq_len says nothing about it."""
    run = read_source(Path("vgg19"), [Override("data.seq_len", "64")])
    assert isinstance(run, RunFile)
    assert describe_shape(expected_shape(run)).tokens == 1
    assert resolve(run).global_batch_size == run.train.global_batch_size
