"""A checkpoint comes back bit for bit, holds no pickle, and is never trusted when damaged."""

from __future__ import annotations

import json
import pickle
import resource
import shutil
import stat
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from ganglion.decide.plan import Plan
from ganglion.errors import CheckpointError
from ganglion.execute.checkpoint import (
    SavedState,
    TensorSpec,
    collective,
    latest_checkpoint,
    list_checkpoints,
    load,
    load_exported,
    read_specs,
    read_state,
    save,
    step_of,
)

SHARD = "shards/rank-00000.safetensors"
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.uint16,
    torch.uint8,
    torch.bool,
]


class Alone:
    """The ranks of a run with one process."""

    rank = 0
    num_ranks = 1

    def barrier(self) -> None:
        """Nobody to wait for."""


def state_at(step: int) -> SavedState:
    return SavedState(step=step, plan=Plan(), extra={"position": step * 8})


def weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "layers.0.weight": torch.randn(8, 4, generator=generator),
        "layers.0.bias": torch.randn(8, generator=generator),
        "head.weight": torch.randn(3, 8, generator=generator),
        "scale": torch.randn((), generator=generator),
    }


def save_alone(
    folder: Path,
    tensors: Mapping[str, Tensor],
    step: int = 10,
    keep: int = 2,
    export: Mapping[str, Tensor] | None = None,
) -> Path:
    return save(folder, tensors, state_at(step), Alone(), keep=keep, export=export)


def blank(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def same_bits(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    flat = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right)]
    return torch.equal(*flat)


def assert_comes_back(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    target = blank(tensors)
    load(save_alone(folder, tensors), target)
    for name in tensors:
        assert same_bits(target[name], tensors[name]), name


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


# Round trips


def test_state_and_tensors_come_back(tmp_path: Path) -> None:
    path = save_alone(tmp_path, weights())
    target = weights(seed=1)
    assert load(path, target) == state_at(10) == read_state(path)
    assert path == tmp_path / "step-00000010" == latest_checkpoint(tmp_path)
    for name, tensor in weights().items():
        assert same_bits(target[name], tensor), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (5, 3), (0,), (3, 0, 2)], ids=str)
def test_every_dtype_and_shape_comes_back(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    assert_comes_back(tmp_path, {"a": (torch.rand(shape) * 4).to(dtype)})


def test_mixed_dtypes_in_one_file_come_back(tmp_path: Path) -> None:
    tensors = {str(dtype): (torch.rand(3) * 4).to(dtype) for dtype in DTYPES}
    assert_comes_back(tmp_path, tensors)
    content = (tmp_path / "step-00000010" / SHARD).read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    assert size % 8 == 0
    for name, tensor in tensors.items():
        assert header[name]["data_offsets"][0] % tensor.itemsize == 0, f"{name} is not aligned"


def test_nan_payloads_and_signed_zeros_come_back(tmp_path: Path) -> None:
    bits = torch.tensor([0x7FC00001, 0x7F800000, -(2**31), 1], dtype=torch.int32)
    assert_comes_back(tmp_path, {"a": bits.view(torch.float32)})


def test_tied_strided_and_overlapping_tensors_come_back(tmp_path: Path) -> None:
    flat = torch.randn(24)
    tied = torch.randn(4, 4)
    tensors = {
        "tied.a": tied,
        "tied.b": tied,
        "transposed": torch.randn(4, 5).t(),
        "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "view": flat[3:9],
        "overlap": flat[5:20],
        "every_other": flat[::2],
        "expanded": torch.randn(1, 3).expand(4, 3),
    }
    path = save_alone(tmp_path, tensors, export=tensors)
    target = {name: torch.zeros(tensor.shape) for name, tensor in tensors.items()}
    load(path, target)
    exported = load_exported(path)
    for name, tensor in tensors.items():
        assert same_bits(target[name], tensor), name
        assert same_bits(exported[name], tensor), name


def test_parameters_are_filled_in_place(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    path = save_alone(tmp_path, dict(model.named_parameters()))
    fresh = torch.nn.Linear(3, 2)
    pointers = [parameter.data_ptr() for parameter in fresh.parameters()]
    load(path, dict(fresh.named_parameters()))
    assert [parameter.data_ptr() for parameter in fresh.parameters()] == pointers
    assert same_bits(fresh.weight, model.weight) and fresh.weight.requires_grad


def test_no_tensors_at_all(tmp_path: Path) -> None:
    assert load(save_alone(tmp_path, {}), {}) == state_at(10)


def test_specs_tell_shapes_and_dtypes(tmp_path: Path) -> None:
    path = save_alone(tmp_path, {"a": torch.ones(2, 3, dtype=torch.bfloat16), "b": torch.tensor(1)})
    assert read_specs(path) == {
        "a": TensorSpec((2, 3), torch.bfloat16),
        "b": TensorSpec((), torch.int64),
    }


def test_saving_without_export_is_said_when_it_is_asked_for(tmp_path: Path) -> None:
    path = save_alone(tmp_path, weights())
    with pytest.raises(CheckpointError, match=r"holds no model\.safetensors"):
        load_exported(path)


def test_torch_reads_our_shards_too(tmp_path: Path) -> None:
    path = save_alone(tmp_path, weights())
    target = blank(weights())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_load(
            target,
            storage_reader=HuggingFaceStorageReader(str(path / "shards")),
            planner=DefaultLoadPlanner(flatten_state_dict=False),
            no_dist=True,
        )
    assert all(same_bits(target[name], tensor) for name, tensor in weights().items())


# No pickle


def test_files_are_json_and_safetensors_only(tmp_path: Path) -> None:
    path = save_alone(tmp_path, weights(), export=weights())
    assert sorted(files(path)) == [
        "manifest.json",
        "model.safetensors",
        "shards/rank-00000.safetensors",
        "state.json",
    ]
    for name, content in files(path).items():
        if name.endswith(".json"):
            json.loads(content)
            continue
        with safe_open(path / name, framework="pt") as file:
            assert sorted(file.keys()) == sorted(weights())
        header = int.from_bytes(content[:8], "little")
        json.loads(content[8 : 8 + header])
        assert len(content) == 8 + header + 4 * sum(t.numel() for t in weights().values())


def test_neither_saving_nor_loading_pickles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("pickle was used")

    for owner, names in {
        pickle: ["load", "loads", "dump", "dumps", "Pickler", "Unpickler"],
        torch: ["load", "save"],
    }.items():
        for name in names:
            monkeypatch.setattr(owner, name, refuse)
    path = save_alone(tmp_path, weights(), export=weights())
    load(path, blank(weights()))
    load_exported(path)


def test_values_that_are_no_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"step is a int, not a tensor: put it into the extra"
    ):
        save_alone(tmp_path, {"step": 3})  # type: ignore[dict-item]
    assert list(tmp_path.iterdir()) == []


def test_a_dtype_without_a_code_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tensor phase has dtype torch\.complex128"):
        save_alone(tmp_path, {"phase": torch.ones(2, dtype=torch.complex128)})
    assert list(tmp_path.iterdir()) == []


# Damage


def flip_last_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


def edit(file: Path) -> None:
    file.write_text(file.read_text().replace('"position": 160', '"position": 168'))


DAMAGE: list[tuple[str, Callable[[Path], None], str]] = [
    (SHARD, flip_last_byte, r"has CRC-32 [0-9a-f]{8} instead of [0-9a-f]{8}"),
    (SHARD, cut, r"has \d+ bytes instead of \d+"),
    (SHARD, Path.unlink, r"is missing"),
    ("state.json", edit, r"has CRC-32 [0-9a-f]{8} instead of [0-9a-f]{8}"),
    ("state.json", Path.unlink, r"is missing"),
    ("model.safetensors", flip_last_byte, r"has CRC-32"),
    ("manifest.json", Path.unlink, r"is missing"),
    ("manifest.json", cut, r"cannot be read"),
]


@pytest.mark.parametrize(("name", "harm", "text"), DAMAGE)
def test_damage_is_found_before_a_tensor_changes(
    tmp_path: Path, name: str, harm: Callable[[Path], None], text: str
) -> None:
    save_alone(tmp_path, weights(), step=10)
    path = save_alone(tmp_path, weights(), step=20, export=weights())
    harm(path / name)
    target = weights(seed=1)
    with pytest.raises(CheckpointError, match=rf"step-00000020 is damaged: {name} {text}") as error:
        load(path, target)
    assert str(error.value).endswith("delete that folder to resume from step-00000010")
    for key, tensor in weights(seed=1).items():
        assert same_bits(target[key], tensor), key


def test_damage_to_the_only_checkpoint_says_so(tmp_path: Path) -> None:
    path = save_alone(tmp_path, weights())
    cut(path / SHARD)
    with pytest.raises(CheckpointError, match=r"to start again: there is no earlier checkpoint"):
        load(path, weights())


def test_a_shard_nobody_listed_is_refused(tmp_path: Path) -> None:
    path = save_alone(tmp_path, weights())
    shutil.copy(path / SHARD, path / "shards/rank-00001.safetensors")
    with pytest.raises(CheckpointError, match=r"rank-00001\.safetensors is not listed in manifest"):
        load(path, weights())


def test_read_state_and_load_exported_check_their_files(tmp_path: Path) -> None:
    path = save_alone(tmp_path, weights(), step=20, export=weights())
    edit(path / "state.json")
    flip_last_byte(path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"damaged: state\.json has CRC-32"):
        read_state(path)
    with pytest.raises(CheckpointError, match=r"damaged: model\.safetensors has CRC-32"):
        load_exported(path)


def test_a_header_that_lies_is_an_error_of_ours(tmp_path: Path) -> None:
    path = save_alone(tmp_path, weights())
    content = (path / SHARD).read_bytes()
    (path / SHARD).write_bytes(b"\xff" * 8 + content[8:])
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors cannot be read"):
        read_specs(path)


def test_a_path_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no checkpoint folder .*step-00000007"):
        load(tmp_path / "step-00000007", weights())


def test_a_manifest_of_another_format_is_refused(tmp_path: Path) -> None:
    path = save_alone(tmp_path, weights())
    (path / "manifest.json").write_text('{"format": 9, "files": {}}')
    with pytest.raises(CheckpointError, match=r"has format 9, but this version reads format 1"):
        load(path, weights())


# Another model


def test_a_model_with_other_names_is_refused(tmp_path: Path) -> None:
    path = save_alone(tmp_path, weights())
    other = {f"new.{index}": torch.zeros(1) for index in range(5)} | weights(seed=1)
    del other["scale"]
    with pytest.raises(CheckpointError) as error:
        load(path, other)
    text = str(error.value)
    assert f"the model differs from the one in {path}" in text
    assert "it has no new.0, new.1, new.2 and 2 more; it has also scale;" in text
    assert same_bits(other["head.weight"], weights(seed=1)["head.weight"])


def test_a_model_with_other_shapes_or_dtypes_is_refused(tmp_path: Path) -> None:
    path = save_alone(tmp_path, weights())
    other = weights() | {
        "layers.0.bias": torch.zeros(9),
        "scale": torch.zeros((), dtype=torch.half),
    }
    with pytest.raises(CheckpointError, match=r"the model differs") as error:
        load(path, other)
    assert "layers.0.bias (saved [8] float32, here [9] float32)" in str(error.value)
    assert "scale (saved [] float32, here [] float16)" in str(error.value)


# Saving again, pruning and failing


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save_alone(tmp_path, weights(), step=step, keep=2)
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [3, 4]
    assert len(list(tmp_path.iterdir())) == 2


def test_the_one_just_saved_is_kept_even_if_older_ones_have_higher_steps(tmp_path: Path) -> None:
    save_alone(tmp_path, weights(), step=50, keep=1)
    path = save_alone(tmp_path, weights(), step=6, keep=1)
    assert path in list_checkpoints(tmp_path)


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save_alone(tmp_path, weights(seed=0))
    path = save_alone(tmp_path, weights(seed=1))
    target = blank(weights())
    load(path, target)
    assert same_bits(target["head.weight"], weights(seed=1)["head.weight"])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


def test_a_stale_incomplete_folder_is_no_obstacle(tmp_path: Path) -> None:
    stale = tmp_path / "step-00000010.incomplete" / "shards"
    stale.mkdir(parents=True)
    (stale / "rank-00007.safetensors").write_bytes(b"old")
    load(save_alone(tmp_path, weights()), blank(weights()))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


def test_files_can_be_read_by_whoever_the_umask_allows(tmp_path: Path) -> None:
    (tmp_path / "probe").touch()
    expected = stat.S_IMODE((tmp_path / "probe").stat().st_mode)
    path = save_alone(tmp_path, weights(), export=weights())
    for name in files(path):
        assert stat.S_IMODE((path / name).stat().st_mode) == expected, name


def replace(monkeypatch: pytest.MonkeyPatch, place: str, stand_in: Callable[..., None]) -> None:
    module, name = place.split(".")
    monkeypatch.setattr(import_module(f"ganglion.execute.checkpoint.{module}"), name, stand_in)


def full_disk(*args: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    "place",
    [
        "storage.write_durably",
        "writing.write_durably",
        "writing.write_tensors",
        "layout.write_durably",
        "writing.sync_folder",
        "writing.publish",
    ],
)
def test_a_full_disk_at_any_point_leaves_the_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    save_alone(tmp_path, weights(), step=1)
    before = files(tmp_path)
    replace(monkeypatch, place, full_disk)
    with pytest.raises(CheckpointError, match=r"cannot write .*step-00000002\.incomplete") as error:
        save_alone(tmp_path, weights(), step=2, export=weights())
    assert "No space left on device (" in str(error.value)
    assert "free there); free some space, lower checkpoint.keep, or set output.dir" in str(
        error.value
    )
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000001"
    assert files(tmp_path) == before


def test_a_file_the_system_refuses_to_grow_is_reported(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors: File too large"):
            save_alone(tmp_path, {"large": torch.zeros(1 << 16)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where a folder should be")
    with pytest.raises(CheckpointError, match=r"cannot make .*run/step-00000010\.incomplete"):
        save_alone(tmp_path / "run", weights())


def test_an_interrupt_stays_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    replace(monkeypatch, "writing.publish", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_alone(tmp_path, weights())
    assert latest_checkpoint(tmp_path) is None


def test_ranks_meet_before_a_file_is_touched(tmp_path: Path) -> None:
    class Late(Alone):
        def barrier(self) -> None:
            raise TimeoutError("rank 1 did not come")

    with pytest.raises(TimeoutError):
        save(tmp_path, weights(), state_at(1), Late(), keep=1)
    assert list(tmp_path.iterdir()) == []


def test_of_several_failures_the_one_of_the_lowest_rank_is_named() -> None:
    failures = {2: (OSError("no space"), None), 1: (OSError("no access"), None)}
    with (
        pytest.raises(CheckpointError, match=r"^rank 1: OSError: no access$"),
        collective._our_errors(cast(dist.ProcessGroup, object())),
    ):
        raise CheckpointException("save", cast(Any, failures))
