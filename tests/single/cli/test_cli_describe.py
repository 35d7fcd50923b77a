"""`ganglion describe`: tables, files that predictions read, and what is refused."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from ganglion.decide.shapes import KNOWN_MODELS, description_from_json, named_model
from tests.support.answers import TorchlessCommand
from tests.support.answers import ganglion as answer

MINE = """
from torch import nn

def blocks(width=16, vocab=32, depth=2):
    layers = [nn.Linear(width, width) for _ in range(depth)]
    return [nn.Embedding(vocab, width), *layers, nn.Linear(width, vocab)]

def images():
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, 10))

def broken():
    raise RuntimeError("nothing\\nhere")
"""
OWN = """
[model]
build = "describe_mine:blocks"
[data]
kind = "synthetic"
seq_len = 8
[train]
steps = 2
"""
LLAMA = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 32,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "describe_mine.py").write_text(MINE)
    (tmp_path / "own.toml").write_text(OWN)
    (tmp_path / "run.toml").write_text("[model]\nlayers = 3\n")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def ganglion(*words: str, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a command, which must end with `code`."""
    result = answer(*words, cwd=cwd)
    assert result.returncode == code, result.stdout + result.stderr
    return result


def test_a_name_is_described_without_torch(folder: Path) -> None:
    result = TorchlessCommand()("describe", "gpt2", cwd=folder)
    assert result.returncode == 0, result.stderr
    assert description_from_json(result.stdout, "stdout") == named_model("gpt2")


def test_a_run_file_of_a_built_in_model_is_described(folder: Path) -> None:
    words = ("describe", "run.toml", "--data.seq_len", "64")
    model = description_from_json(ganglion(*words, cwd=folder).stdout, "stdout")
    assert (model.num_blocks, model.tokens) == (8, 64)


def test_a_written_file_goes_with_a_table(folder: Path) -> None:
    result = ganglion("describe", "gpt-12b", "--write", "model.json", cwd=folder)
    assert "98 blocks, 12.0G parameters, 512 tokens a sample" in result.stdout
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["attention", "48", "81.5M"] in [row[:3] for row in rows]
    assert all(len(line) <= 80 for line in result.stdout.splitlines()[1:])
    text = (folder / "model.json").read_text()
    assert description_from_json(text, "model.json") == named_model("gpt-12b")
    assert ganglion("describe", "model.json", "--json", cwd=folder).stdout == text


def test_own_code_is_predicted_once_it_is_described(folder: Path) -> None:
    refused = ganglion("memory", "own.toml", cwd=folder, code=2)
    assert "describe it with `ganglion describe own.toml`" in refused.stderr
    ganglion("describe", "own.toml", "--write", "own.json", cwd=folder)
    key = ("--model.description", "own.json")
    pipe = ("--parallel.pipe", "2", "--json")
    simulated = ganglion("simulate", "own.toml", "--cluster", "summit", *key, *pipe, cwd=folder)
    assert json.loads(simulated.stdout)["num_ranks"] == 2
    held = json.loads(ganglion("memory", "own.toml", *key, *pipe, cwd=folder).stdout)
    num_parameters = 32 * 16 + 2 * (16 * 16 + 16) + 16 * 32 + 32
    assert sum(row["bytes"]["weights"] for row in held["rows"]) == 4 * num_parameters


def test_a_description_of_another_model_is_refused_at_training(folder: Path) -> None:
    ganglion("describe", "own.toml", "--write", "own.json", cwd=folder)
    words = ("train", "own.toml", "--model.description", "own.json", "--output.dir", "run")
    deeper = ganglion(*words, "--model.args.depth", "3", cwd=folder, code=2)
    assert "model.description = 'own.json' has 4 blocks, but model.build = " in deeper.stderr
    assert "returned 5: describe it again" in deeper.stderr
    wider = ganglion(*words, "--model.args.width", "8", cwd=folder, code=2)
    assert "has 1600 parameters, but" in wider.stderr


def test_a_model_in_numbers_is_not_trained(folder: Path) -> None:
    for command in ("train", "verify"):
        refused = ganglion(command, "--model.description", "gpt2", cwd=folder, code=2)
        assert "can be predicted but not trained" in refused.stderr


def test_functions_take_arguments_and_samples(folder: Path) -> None:
    words = ("describe", "describe_mine:blocks", "width=8", "depth=1", "--seq", "4")
    model = description_from_json(ganglion(*words, cwd=folder).stdout, "stdout")
    assert (model.num_blocks, model.tokens, model.num_parameters) == (3, 4, 256 + 72 + 288)
    words = ("describe", "describe_mine:images", "--input", "3x4x4")
    model = description_from_json(ganglion(*words, cwd=folder).stdout, "stdout")
    assert (model.num_blocks, model.num_parameters) == (2, 490)


def test_a_hugging_face_config_is_described(folder: Path) -> None:
    pytest.importorskip("transformers")
    model = description_from_json(
        ganglion("describe", "hf:config.json", "--seq", "16", cwd=folder).stdout, "stdout"
    )
    closed = named_model("llama:layers=2,hidden=64,heads=8,mlp_hidden=160,vocab=96,seq=16")
    assert model.num_parameters == closed.num_parameters
    assert [block.flops for block in model.blocks] == [block.flops for block in closed.blocks]


def test_all_names_are_listed(folder: Path) -> None:
    listed = ganglion("describe", "--list", cwd=folder).stdout
    assert all(f"\n{name} " in f"\n{listed}" for name in KNOWN_MODELS)
    assert "llama:layers=...,hidden=...,heads=...,vocab=32000" in listed
    records = json.loads(ganglion("describe", "--list", "--json", cwd=folder).stdout)
    assert {"name": "gpt2", "parameters": 124439808}.items() <= records[0].items()


@pytest.mark.parametrize("command", ["simulate", "memory"])
def test_names_are_sources_of_predictions(folder: Path, command: str) -> None:
    words = (command, "gpt-12b", "--cluster", "summit", "--train.precision", "bf16_master")
    layout = ("--parallel.pipe", "6", "--train.global_batch_size", "64", "--json")
    code = 1 if command == "memory" else 0  # it does not fit
    assert json.loads(ganglion(*words, *layout, cwd=folder, code=code).stdout)["num_ranks"] == 6


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "describe needs a source: a run file, a model name"),
        (["gpt-12"], "did you mean 'gpt-12b'?"),
        (["none.toml"], "run file none.toml does not exist"),
        (["gpt2", "--seq", "8"], "--seq 8 is for package.module:function and hf:"),
        (["gpt2", "layers=3"], "'layers=3' is an argument of package.module:function"),
        (["gpt2", "--model.layers", "3"], "--model.layers is a key of a run file"),
        (["describe_mine:blocks"], "needs to know its samples: give --seq N"),
        (["describe_mine:images", "--input", "3,4"], "--input 3,4 is no shape"),
        (["describe_mine:blocks", "--seq", "4", "wide"], "'wide' is no argument"),
        (["describe_mine:blocks", "--seq", "4", "wide=3"], "do not fit"),
        (["describe_mine:none", "--seq", "4"], "has nothing named 'none'"),
        (["describe_mine:broken", "--seq", "4"], "cannot be built without memory: nothing here"),
        (["describe_mine:images", "--seq", "4"], "does not run on an input of shape [2, 4]"),
        (["hf:none.json"], "cannot be read as a Hugging Face config"),
        (["hf:own.toml"], "cannot be read as a Hugging Face config"),
        (["gpt2", "--write", "no/such/folder.json"], "--write no/such/folder.json cannot be"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_sources_end_in_one_line_and_code_2(
    folder: Path, words: list[str], text: str
) -> None:
    refused = ganglion("describe", *words, cwd=folder, code=2)
    assert text in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
