"""Build and losses: models from shapes or from the user's own functions, with every refusal."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from ganglion.decide.shapes import ConvShape, GPTShape, MLPShape
from ganglion.errors import ConfigError, LayoutError
from ganglion.execute.models import (
    GPT,
    MLP,
    ConvNet,
    build_model,
    build_user_blocks,
    cross_entropy,
    loss_function,
    mse,
)
from ganglion.reference import load_function

USER_MODULE = """
from torch import nn
import users_helper_of_test

answer = 42

def build(width, depth=2):
    import users_late_helper_of_test
    return [nn.Linear(width, width) for _ in range(depth)]

def named(width):
    return {"in": nn.Linear(width, 4), "out": nn.Linear(4, 1)}

def whole():
    class Whole(nn.Module):
        pass
    return Whole()

def absolute(output, target):
    return (output - target).abs().mean()
"""


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder with the user's modules, forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "users_module_of_test.py").write_text(USER_MODULE)
    (tmp_path / "users_helper_of_test.py").write_text("")
    (tmp_path / "users_late_helper_of_test.py").write_text("")
    (tmp_path / "needy_module_of_test.py").write_text("import not_installed_anywhere\n")
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.endswith("_of_test"):
            del sys.modules[name]


def test_each_shape_builds_its_model() -> None:
    gpt = GPTShape(
        vocab_size=5,
        seq_len=4,
        num_layers=1,
        hidden=4,
        num_heads=1,
        num_kv_heads=1,
        head_size=4,
        mlp_hidden=8,
    )
    assert isinstance(build_model(gpt), GPT)
    mlp = MLPShape(num_inputs=2, num_outputs=2, num_layers=1, hidden=2)
    assert isinstance(build_model(mlp), MLP)
    conv = ConvShape(image_size=28, num_channels=1, num_outputs=10)
    assert isinstance(build_model(conv), ConvNet)


def test_a_function_of_an_installed_module_is_loaded() -> None:
    assert load_function("os.path:join", "model.build")("a", "b") == str(Path("a") / "b")


def test_the_current_folder_is_importable_and_the_path_is_left_alone(user_folder: Path) -> None:
    path = list(sys.path)
    blocks = build_user_blocks("users_module_of_test:build", {"width": 3})
    assert list(blocks) == ["0", "1"]
    assert blocks["1"](torch.zeros(2, 3)).shape == (2, 3)
    assert sys.path == path
    assert sys.modules["users_module_of_test"].__file__ == str(
        user_folder / "users_module_of_test.py"
    )


def test_a_module_written_a_moment_ago_is_found(user_folder: Path) -> None:
    load_function("users_module_of_test:build", "model.build")
    before = user_folder.stat()
    (user_folder / "new_module_of_test.py").write_text("def build(): pass\n")
    # As on a file system whose clock has not ticked since the folder was last listed.
    os.utime(user_folder, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert callable(load_function("new_module_of_test:build", "model.build"))


def test_the_path_is_left_alone_after_an_error(user_folder: Path) -> None:
    path = list(sys.path)
    with pytest.raises(ConfigError):
        load_function("needy_module_of_test:build", "model.build")
    assert sys.path == path


def test_a_users_mapping_keeps_its_names(user_folder: Path) -> None:
    blocks = build_user_blocks("users_module_of_test:named", {"width": 3})
    assert list(blocks) == ["in", "out"]
    assert isinstance(blocks["in"], nn.Linear) and blocks["in"].in_features == 3


@pytest.mark.parametrize(
    "bad", ["", "module", "a.b.c", "module:", ":build", "a..b:c", "a:b:c", "a b:c"]
)
def test_a_reference_of_another_form_is_refused(bad: str) -> None:
    text = re.escape(f'model.build = {bad!r} is not of the form "package.module:function"')
    with pytest.raises(ConfigError, match=text):
        load_function(bad, "model.build")


@pytest.mark.parametrize(
    ("reference", "text"),
    [
        (
            "no_such_module:build",
            "there is no module 'no_such_module'; it was looked for in {cwd} ",
        ),
        ("os.no_such:build", "there is no module 'os.no_such'; it was looked for in {cwd} and "),
        (
            "needy_module_of_test:build",
            "module 'needy_module_of_test' needs 'not_installed_anywhere', which is not installed",
        ),
        (
            "users_module_of_test:bild",
            "module 'users_module_of_test' ({cwd}/users_module_of_test.py) has nothing named",
        ),
        ("users_module_of_test:answer", "'answer' is of type int and cannot be called; name a f"),
    ],
)
def test_what_cannot_be_loaded_is_refused(user_folder: Path, reference: str, text: str) -> None:
    message = f"data.source = {reference!r}: {text.format(cwd=user_folder)}"
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_function(reference, "data.source")


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({}, "model.args {} do not fit model.build = 'users_module_of_test:build'(width, depth=2)"),
        ({"width": 1, "hight": 2}, "got an unexpected keyword argument 'hight'; change model.args"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    user_folder: Path, args: dict[str, object], text: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        build_user_blocks("users_module_of_test:build", args)


def test_a_result_that_is_no_model_is_refused_with_the_key(user_folder: Path) -> None:
    text = "model.build = 'users_module_of_test:whole' returned no usable model: a Whole is one"
    with pytest.raises(ConfigError, match=text):
        build_user_blocks("users_module_of_test:whole", {})


def test_cross_entropy_is_the_mean_over_all_positions() -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(2, 3, 5), torch.randint(5, (2, 3))
    picked = [
        -logits[b, s].log_softmax(-1)[target[b, s]].item() for b in range(2) for s in range(3)
    ]
    assert cross_entropy(logits, target).item() == pytest.approx(sum(picked) / 6, rel=1e-6)
    assert cross_entropy(logits[0], target[0]).item() == pytest.approx(
        sum(picked[:3]) / 3, rel=1e-6
    )


@pytest.mark.parametrize("autocast", [False, True])
def test_losses_are_computed_in_fp32(autocast: bool) -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(4, 9).bfloat16(), torch.randint(9, (4,))
    goal = torch.randn(4, 9).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        entropy, square = cross_entropy(logits, target), mse(logits, goal)
    assert entropy.dtype == square.dtype == torch.float32
    assert torch.equal(entropy, cross_entropy(logits.float(), target))
    assert torch.equal(square, (logits.float() - goal.float()).square().mean())


def test_losses_refuse_shapes_that_do_not_match() -> None:
    text = r"cross_entropy got an output of shape \(2, 3, 5\) and a target of shape \(2, 5\): the "
    with pytest.raises(LayoutError, match=text + r"target must be \(2, 3\)"):
        cross_entropy(torch.zeros(2, 3, 5), torch.zeros(2, 5, dtype=torch.int64))
    text = r"mse got an output of shape \(4, 1\) and a target of shape \(4,\): make them equal"
    with pytest.raises(LayoutError, match=text):
        mse(torch.zeros(4, 1), torch.zeros(4))


def test_a_loss_is_found_by_name(user_folder: Path) -> None:
    assert loss_function("cross_entropy") is cross_entropy
    assert loss_function("mse") is mse
    absolute = loss_function("users_module_of_test:absolute")
    assert absolute(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 0.0])).item() == 2.0


def test_an_unknown_loss_is_refused_with_the_choices() -> None:
    text = r"model.loss = 'entropy' is neither one of \['cross_entropy', 'mse'\] nor of the form"
    with pytest.raises(ConfigError, match=text):
        loss_function("entropy")
    with pytest.raises(ConfigError, match=r"model.loss = 'no_such_module:f': there is no module"):
        loss_function("no_such_module:f")
