"""Activations off the device change memory and time, never a number: equal to plain to the bit."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ganglion import Plan, RunSettings, parallelize
from ganglion.decide.costs import StateRules, segments
from ganglion.decide.predict import predicted_memory
from ganglion.decide.topology import Mesh
from ganglion.errors import ConfigError, GanglionError, OffloadError
from ganglion.execute.comm import World, run_threads
from ganglion.execute.models import build_model, cross_entropy
from ganglion.execute.offload import activation_tiers
from ganglion.execute.offload.activation_tiers import ScratchFile, open_activation_tier
from ganglion.execute.offload.activations import ActivationOffload
from ganglion.execute.pipeline import Chain, Stage, StageSettings, defer_weight_gradients
from ganglion.execute.train.settings import ActivationSettings
from tests.single.models.test_memory_model import STEPS, allocated_peak, sample
from tests.support.covering import cells
from tests.support.pipelines import CASE, plan_for, train_at_once
from tests.support.serial import History, assert_same_by_name, copies
from tests.support.training import OPTIMIZERS, Case, share_of

CPU = torch.device("cpu")
SHORT = dataclasses.replace(CASE, num_steps=3, global_batch_size=8, dtype=torch.float32)
AGAIN: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute": "full"},
    "sqrt": {"recompute": "sqrt"},
    "every 3": {"recompute": "full", "recompute_every": 3},
    "some": {"recompute": "blocks", "recompute_blocks": ("0", "2-3", "5")},
}
TIERS = ("none", "host", "disk")
SCHEDULES = ("gpipe", "one_f_one_b", "message_driven", "two_bw")


def trained(plan: Plan, case: Case, folder: Path | None = None) -> list[History]:
    """Train on every rank, moving even the smallest tensors."""
    if folder is not None:
        case = dataclasses.replace(case, activations=ActivationSettings(folder=folder, min_bytes=0))
    return run_threads(plan.mesh(), lambda world: train_at_once(world, plan, case))


plain = cache(trained)


def assert_same(found: list[History], expected: list[History]) -> None:
    for one, two in zip(found, expected, strict=True):
        assert one.losses == two.losses
        assert one.norms == two.norms
        assert_same_by_name(one.weights, two.weights, exactly=True)


def assert_changes_nothing(plan: Plan, case: Case, folder: Path, **more: Any) -> None:
    changed = dataclasses.replace(plan, **more)
    assert changed != plan
    assert_same(trained(changed, case, folder), plain(plan, case))


def is_no_twin(schedule: str, again: str, tier: str) -> bool:
    """Say whether anything differs from the plain run that it is compared with."""
    return (again, tier) != ("none", "none")


@cells(schedule=SCHEDULES, again=AGAIN, tier=TIERS, only=is_no_twin)
def test_equal_to_the_bit(schedule: str, again: str, tier: str, tmp_path: Path) -> None:
    case = dataclasses.replace(SHORT, max_grad_norm=0.3)
    plan = plan_for(case, schedule, 2, 1, 4)
    assert_changes_nothing(plan, case, tmp_path, offload_activations=tier, **AGAIN[again])


SPLIT = [
    Plan(x=2, pipe=2, schedule="two_bw"),
    Plan(z=2),
    Plan(z=2, pipe=2, schedule="one_f_one_b"),
    Plan(x=2, y=2, pipe=2, schedule="message_driven"),
]


@cells(plan=SPLIT, again=["none", "sqrt"])
def test_split_layers_are_equal_too(plan: Plan, again: str, tmp_path: Path) -> None:
    case = dataclasses.replace(SHORT, model="wide_gpt", num_steps=2)
    plan = dataclasses.replace(plan, microbatch_size=2, num_microbatches=4 // plan.z)
    assert_changes_nothing(plan, case, tmp_path, offload_activations="disk", **AGAIN[again])


@cells(
    schedule=["zero_bubble", "zero_bubble_v", "interleaved"],
    again=["none", "full", "sqrt", "some"],
    tier=["host", "disk"],
)
def test_several_stages_and_split_backwards(
    schedule: str, again: str, tier: str, tmp_path: Path
) -> None:
    plan = plan_for(SHORT, schedule, 2, 1, 4)
    assert_changes_nothing(plan, SHORT, tmp_path, offload_activations=tier, **AGAIN[again])


@cells(model=["tied", "conv", "mlp"], schedule=["one_f_one_b", "two_bw"], pipe=[1, 2])
def test_other_models_are_equal_too(model: str, schedule: str, pipe: int, tmp_path: Path) -> None:
    case = dataclasses.replace(SHORT, model=model)
    plan = plan_for(case, schedule, pipe, 1, 4)
    more: dict[str, Any] = {"recompute": "blocks", "recompute_blocks": ("1-2",)}
    assert_changes_nothing(plan, case, tmp_path, offload_activations="disk", **more)


@pytest.mark.parametrize("pipe", [1, 2])
def test_autocast_is_equal_too(pipe: int, tmp_path: Path) -> None:
    plan = plan_for(SHORT, "one_f_one_b", pipe, 1, 2, precision="bf16")
    assert_changes_nothing(plan, SHORT, tmp_path, offload_activations="disk")


# --- random numbers and buffers: one rank, as threads draw from one generator --------------------


class Dropped(nn.Module):
    """A block that draws random numbers in two places, and has a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(F.gelu(self.linear(F.dropout(self.norm(x), 0.3))), 0.3)


def blocks() -> list[nn.Module]:
    with torch.random.fork_rng():
        torch.manual_seed(9)
        return [
            nn.Linear(8, 8),
            Dropped(),
            nn.BatchNorm1d(8),
            Dropped(),
            Dropped(),
            nn.Linear(8, 8),
        ]


def train_blocks(plan: Plan, folder: Path) -> History:
    def body(world: World) -> History:
        settings = ActivationSettings(folder=folder, min_bytes=0)
        generator = torch.Generator().manual_seed(5)
        batches = [
            (torch.randn(12, 8, generator=generator), torch.randn(12, 8, generator=generator))
            for _ in range(3)
        ]
        with parallelize(
            blocks(),
            F.mse_loss,
            OPTIMIZERS["adamw"],
            plan,
            RunSettings(activations=settings),
            world=world,
        ) as run:
            results = list(run.steps(share_of(batch, world, plan) for batch in batches))
            history = History(weights=copies(run.model_tensors()))
        history.losses = [result.loss for result in results]
        return history

    return run_threads(plan.mesh(), body)[0]


@cells(schedule=["one_f_one_b", "two_bw"], again=AGAIN, tier=TIERS)
def test_dropout_and_running_means(schedule: str, again: str, tier: str, tmp_path: Path) -> None:
    plan = Plan(schedule=schedule, microbatch_size=3, num_microbatches=4)
    changed = dataclasses.replace(plan, offload_activations=tier, **AGAIN[again])
    assert_same([train_blocks(changed, tmp_path)], [train_blocks(plan, tmp_path)])


# --- what is moved -------------------------------------------------------------------------------


class Log:
    """A tier that remembers what was moved."""

    def __init__(self, folder: Path) -> None:
        self.tier = ScratchFile(folder, CPU, 60.0)
        self.sizes: list[int] = []
        self.reads = 0

    def room(self, num_bytes: int) -> Any:
        self.sizes.append(num_bytes)
        stored, log = self.tier.room(num_bytes), self

        class Watched:
            begin_write = staticmethod(stored.begin_write)
            give_back = staticmethod(stored.give_back)

            @staticmethod
            def begin_read(target: Tensor) -> Any:
                log.reads += 1
                return stored.begin_read(target)

        return Watched()

    def close(self) -> None:
        self.tier.close()


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path)


def run_block(
    forward: Callable[[Tensor], Tensor], x: Tensor, log: Log, modules: list[nn.Module], **more: Any
) -> Tensor:
    saved = ActivationOffload(log, min_bytes=more.get("min_bytes", 0)).saved_tensors(
        modules, [], ahead=True
    )
    with saved.saving():
        saved.begin_part()
        return forward(x)


def test_memory_that_several_nodes_save_is_moved_once(log: Log) -> None:
    x = torch.randn(16, 16, requires_grad=True)

    def forward(x: Tensor) -> Tensor:
        y = x * 1.0
        return (y * y + y.t() @ y[:8].t().contiguous().t().sum(0, keepdim=True).t()).sum()

    run_block(forward, x, log, [])
    assert log.sizes.count(16 * 16 * 4) == 1


def test_parameters_buffers_and_data_stay(log: Log) -> None:
    layer, norm = nn.Linear(16, 16), nn.BatchNorm1d(16).eval()
    x = torch.randn(4, 16, requires_grad=True)
    run_block(lambda x: norm(layer(x)), x, log, [layer, norm])
    sizes = list(log.sizes)
    assert sizes and all(size == x.nbytes for size in sizes)  # x and the input of the norm
    assert len(sizes) == 2


def test_a_version_that_parameters_point_into_stays(log: Log) -> None:
    layer, flat = nn.Linear(16, 16, bias=False), torch.randn(16 * 64)
    layer.weight.data = flat[256:512].view(16, 16)
    x = torch.randn(4, 16, requires_grad=True)
    run_block(layer, x, log, [layer])
    assert log.sizes == [x.nbytes]


def test_a_small_view_of_a_large_memory_moves_alone(log: Log) -> None:
    base = torch.randn(100, 16)
    x = base[10:20].detach().requires_grad_()
    output = run_block(lambda x: (x * x).sum(), x, log, [])
    assert log.sizes == [10 * 16 * 4]
    output.backward()
    assert torch.equal(x.grad, 2 * x.detach())


def test_small_tensors_stay(log: Log) -> None:
    x = torch.randn(4, 16, requires_grad=True)
    run_block(lambda x: x * x, x, log, [], min_bytes=4 * 16 * 4 + 1)
    assert log.sizes == []


def test_memory_that_is_used_again_is_another(log: Log) -> None:
    """A storage that went may be followed by one at the same address."""
    offload = ActivationOffload(log, min_bytes=0)
    saved = offload.saved_tensors([], [], ahead=True)
    x = torch.randn(64, 64, requires_grad=True)
    expected, outputs = [], []
    with saved.saving():
        y = x
        for _ in range(6):
            saved.begin_part()
            y = torch.sin(y)
            outputs.append(y.detach().clone())
        y.sum().backward()
    twin = x.detach().requires_grad_()
    z = twin
    for _ in range(6):
        z = torch.sin(z)
    z.sum().backward()
    expected.append(twin.grad)
    assert torch.equal(x.grad, expected[0])
    assert len(log.sizes) == 6


def test_a_tensor_that_is_changed_too_early_is_refused(log: Log) -> None:
    x = torch.randn(4, 16, requires_grad=True)

    def forward(x: Tensor) -> Tensor:
        y = x * 2
        z = y * y
        y.add_(1)
        return z.sum()

    output = run_block(forward, x, log, [])
    with pytest.raises(ConfigError, match=r"changed in place.*memory.offload_activations"):
        output.backward()


def test_states_of_one_memory_are_told_apart(log: Log) -> None:
    """exp_ saves its result, where a node that has no part in the loss saved its input."""
    x = torch.randn(4, 16, requires_grad=True)

    def forward(x: Tensor) -> Tensor:
        y = x * 2
        y * y
        return y.exp_().sum()

    run_block(forward, x, log, []).backward()
    assert torch.equal(x.grad, 2 * torch.exp(2 * x.detach()))


# --- memory --------------------------------------------------------------------------------------

WIDTH, ROWS = 64, 512


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def wide_stage(folder: Path | None, *, split: bool = False, **more: Any) -> Stage:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        modules: list[nn.Module] = [Wide() for _ in range(6)]
    tier = None if folder is None else open_activation_tier("disk", folder, CPU, 60.0)
    settings = StageSettings(
        loss_fn=None,
        loss_scale=1.0,
        num_stages=3,
        seed_block=lambda microbatch, block: None,
        deferral=defer_weight_gradients(modules) if split else None,
        offload=None if tier is None else ActivationOffload(tier, min_bytes=1024),
        **more,
    )
    return Stage(1, modules, 0, settings)


INPUTS = torch.randn(6, ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
ONES = torch.ones(ROWS, WIDTH)


def run_stage(stage: Stage, num_microbatches: int, found: list[Tensor] | None = None) -> None:
    """Run microbatches forward, then backward; tell the gradients of their inputs."""
    for number in range(num_microbatches):
        stage.forward(number, INPUTS[number].clone())
    for number in range(num_microbatches):
        gradient = stage.backward(number, ONES)
        if found is not None and gradient is not None:
            found.append(gradient)
    if stage._settings.deferral is not None:
        for number in range(num_microbatches):
            stage.weight(number)


@pytest.mark.parametrize("split", [False, True])
def test_microbatches_in_flight_take_no_memory(split: bool, tmp_path: Path) -> None:
    peaks: dict[tuple[bool, int], int] = {}
    gradients: dict[bool, list[Tensor]] = {False: [], True: []}
    for moved in (False, True):
        stage = wide_stage(tmp_path if moved else None, split=split)
        run_stage(stage, 2, gradients[moved])
        for count in (2, 6):
            peaks[moved, count] = allocated_peak(lambda s=stage, n=count: run_stage(s, n))
        stage.close()
    assert len(gradients[False]) == 2
    assert all(map(torch.equal, gradients[False], gradients[True]))
    edge, inside = ROWS * WIDTH * 4, 2 * 4 * ROWS * WIDTH * 4
    grows = [(peaks[moved, 6] - peaks[moved, 2]) / 4 for moved in (False, True)]
    assert grows[0] > 6 * inside  # of each microbatch, all six blocks
    # Split, the gradients that W needs stay: two for each block, of 1 and 4 edges.
    assert grows[1] < 0.1 * edge + (6 * 5 * edge if split else 0)


def test_two_parts_are_in_memory(tmp_path: Path) -> None:
    """Beside the input and output of the stage, and what a block needs while it runs."""
    stage = wide_stage(tmp_path)
    run_stage(stage, 1)
    peak = allocated_peak(lambda: stage.forward(0, torch.randn(ROWS, WIDTH)))
    edge, inside = ROWS * WIDTH * 4, 2 * 4 * ROWS * WIDTH * 4
    assert 2 * (edge + inside) <= peak <= 2 * (edge + inside) + 4 * edge
    stage.close()


def test_a_backward_makes_room_for_itself(tmp_path: Path) -> None:
    """What another microbatch has not let go of yet must be written first."""
    stage = wide_stage(tmp_path)
    for number in range(2):
        stage.forward(number, torch.randn(ROWS, WIDTH))
    offload = stage._settings.offload
    assert offload is not None
    (last,) = offload._pending
    held = last._alive()
    assert held and all(piece._source is not None for piece in held)
    stage.backward(0, torch.ones(ROWS, WIDTH))
    assert all(piece._source is None for piece in held)
    stage.backward(1, torch.ones(ROWS, WIDTH))
    stage.close()


@pytest.mark.parametrize("again", ["none", "full", "sqrt", "some"])
@pytest.mark.parametrize("name", ["layers", "vocabulary", "weights"])
def test_the_peak_is_as_predicted(name: str, again: str, tmp_path: Path) -> None:
    """Of a whole GPT, forward and backward: within 1 %."""
    shape, size = STEPS[name]
    model = build_model(shape)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    modules = list(model.blocks().values())
    plan = Plan(microbatch_size=size, offload_activations="disk", **AGAIN[again])
    spans = segments(plan, range(len(modules)), len(modules))
    tier = open_activation_tier("disk", tmp_path, CPU, 60.0)
    offload = ActivationOffload(tier, min_bytes=1)
    chain = Chain(modules, loss_fn=cross_entropy, segments=spans, offload=offload)
    inputs, targets = (part.repeat(size, *[1] * (part.dim() - 1)) for part in sample(shape))

    def step() -> None:
        chain.forward(inputs[:size], targets[:size], lambda block: None).backward()

    step()
    (held,) = predicted_memory(shape, plan, StateRules())
    wanted = held.activations + held.recomputed + held.scratch
    assert wanted == pytest.approx(allocated_peak(step), rel=0.01)
    assert held.lower_tier > 0
    offload.close()


# --- trouble -------------------------------------------------------------------------------------


def full_disk(file: int, data: Any, start: int) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_reaches_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = wide_stage(tmp_path)
    monkeypatch.setattr(activation_tiers.os, "pwrite", full_disk)
    with pytest.raises(OffloadError, match=r"MiB could not be moved.*memory.offload_dir.*No space"):
        stage.forward(0, torch.randn(ROWS, WIDTH))
    stage.close()


def test_a_failing_disk_is_told_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation_tiers.os, "pwrite", full_disk)
    plan = plan_for(SHORT, "one_f_one_b", 2, 1, 4, offload_activations="disk")
    errors = {}

    def body(world: World) -> None:
        case = dataclasses.replace(
            SHORT, activations=ActivationSettings(folder=tmp_path, min_bytes=0)
        )
        try:
            train_at_once(world, plan, case)
        except GanglionError as error:
            errors[world.rank] = str(error)

    run_threads(Mesh(pipe=2), body)
    assert sorted(errors) == [0, 1]
    assert all("memory.offload_dir" in text for text in errors.values())


def test_a_file_that_was_cut_is_noticed(tmp_path: Path) -> None:
    stage = wide_stage(tmp_path)
    stage.forward(0, torch.randn(ROWS, WIDTH))
    offload = stage._settings.offload
    assert offload is not None and isinstance(offload.tier, ScratchFile)
    # Moves are made in the order of their calls: after this one, all others are there.
    offload.tier.room(1).begin_write(torch.zeros(1, dtype=torch.uint8)).wait()
    os.ftruncate(offload.tier._file, 0)
    with pytest.raises(OffloadError, match="the scratch file ends before"):
        stage.backward(0, torch.ones(ROWS, WIDTH))
    stage.close()


def test_a_disk_that_does_not_answer_has_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = threading.Event()

    def slow(file: int, data: Any, start: int) -> int:
        answer.wait(timeout=30)
        return len(data)

    tier = ScratchFile(tmp_path, CPU, 0.05)
    monkeypatch.setattr(activation_tiers.os, "pwrite", slow)
    move = tier.room(8).begin_write(torch.zeros(8, dtype=torch.uint8))
    with pytest.raises(OffloadError, match=r"within train.timeout_s = 0.05 s"):
        move.wait()
    answer.set()
    tier.close()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OffloadError, match=r"memory.offload_dir = .*file.* cannot hold a file"):
        ScratchFile(tmp_path / "file" / "inside", CPU, 1.0)
    with pytest.raises(ConfigError, match=r"memory.offload_activations = 'tape' is no tier"):
        open_activation_tier("tape", tmp_path, CPU, 1.0)


def test_the_file_grows_no_further_than_what_is_in_flight(tmp_path: Path) -> None:
    stage = wide_stage(tmp_path)
    offload = stage._settings.offload
    assert offload is not None and isinstance(offload.tier, ScratchFile)
    sizes = []
    for _ in range(3):
        run_stage(stage, 2)
        sizes.append(offload.tier.num_bytes)
    assert sizes[0] == sizes[2] > 0
    assert not list(tmp_path.iterdir()), "the file has no name"
    stage.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(offload.tier._file)


def test_a_forward_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    stage = wide_stage(tmp_path)
    with pytest.raises(RuntimeError, match="shapes"):
        stage.forward(0, torch.randn(ROWS, WIDTH + 1))
    run_stage(stage, 1)
    stage.close()
