"""Two real processes: pieces are written once, layouts may change, and one failure reaches all."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from ganglion.decide.plan import Plan
from ganglion.errors import CheckpointError, PeerLost
from ganglion.execute.checkpoint import SavedState, latest_checkpoint, load, read_specs, save

pytestmark = pytest.mark.timeout(120)

STATE = SavedState(step=4, plan=Plan(data=2))
Work = Callable[["GlooRanks", Path], None]


class GlooRanks:
    """The default process group, as saving wants to see it."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.num_ranks = dist.get_world_size()
        self.group = dist.group.WORLD

    def barrier(self) -> None:
        dist.barrier()


def _enter(rank: int, works: list[Work], folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), 2),  # type: ignore[attr-defined]
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    try:
        for work in works:
            work(GlooRanks(), folder / work.__name__)
    finally:
        dist.destroy_process_group()


def on_two_ranks(works: list[Work], folder: Path) -> None:
    """Run each work in a folder of its name; a failed assertion on either rank is raised here."""
    mp.start_processes(  # type: ignore[attr-defined,no-untyped-call]
        _enter, args=(works, folder), nprocs=2, start_method="forkserver"
    )


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the works that end well in one pair of processes: starting them is what takes time."""
    folder = tmp_path_factory.mktemp("gloo")
    on_two_ranks([save_copies, save_pieces, save_stages, fail_on_rank_1], folder)
    return folder


def whole() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.randn(6, 4, generator=generator),
        "uneven": torch.randn(5, 3, generator=generator).to(torch.bfloat16),
        "short": torch.randn(1, generator=generator),
        "scalar": torch.tensor(7, dtype=torch.int64),
    }


def blank() -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in whole().items()}


def cut(tensors: dict[str, Tensor], placement: Callable[[str], Placement]) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (2,))
    return {
        name: distribute_tensor(tensor, mesh, [placement(name)]) if tensor.ndim else tensor
        for name, tensor in tensors.items()
    }


def assert_whole(tensors: dict[str, Tensor]) -> None:
    for name, tensor in whole().items():
        held = tensors[name]
        assert torch.equal(held.full_tensor() if isinstance(held, DTensor) else held, tensor), name


def pieces(path: Path) -> list[tuple[str, str]]:
    found = []
    for file in sorted((path / "shards").iterdir()):
        with safe_open(file, framework="pt") as shard:
            found += [(file.name, name) for name in shard.keys()]  # noqa: SIM118
    return found


# Copies


def save_copies(ranks: GlooRanks, folder: Path) -> None:
    export = whole() if ranks.rank == 0 else None
    path = save(folder, whole(), STATE, ranks, process_group=ranks.group, keep=1, export=export)
    assert path == latest_checkpoint(folder)
    target = blank()
    assert load(path, target, process_group=ranks.group) == STATE
    assert_whole(target)
    lone = save(
        folder / "lone", {"a": torch.ones(2)}, STATE, ranks, process_group=ranks.group, keep=1
    )
    load(lone, {"a": torch.zeros(2)}, process_group=ranks.group)


def test_what_all_ranks_hold_is_written_once(ran: Path) -> None:
    folder = ran / "save_copies"
    written = pieces(folder / "step-00000004")
    assert sorted(name for _, name in written) == sorted(whole())
    assert {file for file, _ in written} == {"rank-00000.safetensors", "rank-00001.safetensors"}
    assert len(pieces(folder / "lone/step-00000004")) == 1
    target = blank()
    load(folder / "step-00000004", target)
    assert_whole(target)


# Pieces


def save_pieces(ranks: GlooRanks, folder: Path) -> None:
    path = save(
        folder,
        cut(whole(), lambda name: Shard(0)),
        STATE,
        ranks,
        process_group=ranks.group,
        keep=1,
    )
    for placement in (Shard(0), Replicate()):
        target = cut(blank(), lambda name, placement=placement: placement)  # type: ignore[misc]
        load(path, target, process_group=ranks.group)
        assert_whole(target)
    across = cut(blank(), lambda name: Shard(0) if name == "short" else Shard(1))
    load(path, across, process_group=ranks.group)
    assert_whole(across)


def test_pieces_of_two_ranks_load_in_other_layouts_and_on_one(ran: Path) -> None:
    path = ran / "save_pieces/step-00000004"
    assert [name for _, name in pieces(path)].count("matrix") == 2
    assert read_specs(path)["uneven"].shape == (5, 3)
    target = blank()
    load(path, target)
    assert_whole(target)


# Each rank its own names, as pipeline stages will have


def save_stages(ranks: GlooRanks, folder: Path) -> None:
    mine = {f"stage{ranks.rank}.weight": torch.full((3,), float(ranks.rank + 1))}
    path = save(folder, mine, STATE, ranks, process_group=ranks.group, keep=1)
    target = {name: torch.zeros(3) for name in mine}
    load(path, target, process_group=ranks.group)
    assert all(torch.equal(target[name], tensor) for name, tensor in mine.items())
    wrong = target if ranks.rank == 0 else {"stage1.weight": torch.zeros(4)}
    with pytest.raises(CheckpointError, match=r"stage1\.weight \(saved \[3\] float32, here \[4\]"):
        load(path, wrong, process_group=ranks.group)


def test_names_of_all_ranks_together_are_the_model(ran: Path) -> None:
    path = ran / "save_stages/step-00000004"
    both = {f"stage{rank}.weight": torch.zeros(3) for rank in range(2)}
    load(path, both)
    assert both["stage1.weight"].tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(CheckpointError, match=r"it has also stage1\.weight"):
        load(path, {"stage0.weight": torch.zeros(3)})


# Failures


def fail_on_rank_1(ranks: GlooRanks, folder: Path) -> None:
    first = SavedState(step=2, plan=Plan(data=2))
    save(folder, whole(), first, ranks, process_group=ranks.group, keep=2)
    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == 1:

            def full(*args: object) -> None:
                raise OSError(28, "No space left on device")

            patch.setattr("ganglion.execute.checkpoint.storage.write_durably", full)
        with pytest.raises(CheckpointError, match=r"^rank 1: cannot write .*No space left"):
            save(folder, whole(), STATE, ranks, process_group=ranks.group, keep=2)
    assert latest_checkpoint(folder) == folder / "step-00000002"
    save(folder, whole(), STATE, ranks, process_group=ranks.group, keep=2)
    ranks.barrier()
    shard = folder / "step-00000004/shards/rank-00001.safetensors"
    if ranks.rank == 0:
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(bytes(content))
    ranks.barrier()
    with pytest.raises(
        CheckpointError, match=r"rank-00001\.safetensors has CRC-32 .*step-00000002"
    ):
        load(folder / "step-00000004", blank(), process_group=ranks.group)


def test_a_failure_of_one_rank_is_raised_on_all(ran: Path) -> None:
    left = sorted(path.name for path in (ran / "fail_on_rank_1").iterdir())
    assert left == ["step-00000002", "step-00000004"]


def lose_rank_1(ranks: GlooRanks, folder: Path) -> None:
    ranks.barrier()
    if ranks.rank == 1:
        os._exit(0)

    class Trusting(GlooRanks):
        def barrier(self) -> None:
            """Do not notice that rank 1 is gone."""

    with pytest.raises(PeerLost, match=r"another rank was lost during a checkpoint"):
        save(folder, whole(), STATE, Trusting(), process_group=ranks.group, keep=1)
    assert latest_checkpoint(folder) is None


def test_a_rank_that_dies_is_reported_as_lost(tmp_path: Path) -> None:
    on_two_ranks([lose_rank_1], tmp_path)
    assert latest_checkpoint(tmp_path / "lose_rank_1") is None
