"""Muon over pieces of matrices is Muon: by name against one process, and bit by bit alone."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ganglion import Plan
from ganglion.decide.topology import Mesh, Placement, Shard
from ganglion.execute.comm import World, run_threads
from ganglion.execute.tensor.grid import Grid, TensorSettings
from ganglion.execute.tensor.pieces import cut_out
from ganglion.execute.update.split_muon import SplitMatrices, over_pieces
from ganglion.trace import Recorder
from tests.support.covering import cells
from tests.support.pipelines import delayed, plan_for
from tests.support.serial import TOLERANCE, History, assert_same_by_name
from tests.support.tensors import SETTINGS, Held, assert_same_bits, factorizations, whole
from tests.support.training import (
    MUON,
    Case,
    make_batches,
    make_run,
    share_of,
    train_serial,
    train_split_at_once,
)

pytestmark = pytest.mark.timeout(120)
CASE = Case(model="wide_gpt", optimizer="muon", max_grad_norm=0.5, num_steps=2)


def train(plan: Plan, case: Case) -> list[Held]:
    return run_threads(plan.mesh(), lambda world: train_split_at_once(world, plan, case))


def assert_equals(held: Sequence[Held], wanted: History) -> None:
    relative = TOLERANCE[torch.float64][0]
    for rank in held:
        assert rank.history.losses == pytest.approx(wanted.losses, rel=relative)
    assert_same_by_name(whole(held, [rank.history.weights for rank in held]), wanted.weights)


def fit(plan: Plan, case: Case) -> Plan:
    size = case.global_batch_size // (2 * plan.num_shares)
    return dataclasses.replace(plan, microbatch_size=size, num_microbatches=2)


def is_split(plan: Plan) -> bool:
    return plan.x * plan.y * plan.z > 1


LAYOUTS = [p for n in (2, 4) for p in factorizations(n) if is_split(p)]


@functools.cache
def serial(case: Case) -> History:
    return train_serial(case)


@cells(plan=[*LAYOUTS, Plan(x=2, y=2, z=2)], model=["wide_gpt", "wide_tied", "wide_mlp"])
def test_every_layout_equals_the_serial_muon(plan: Plan, model: str) -> None:
    case = dataclasses.replace(CASE, model=model)
    assert_equals(train(fit(plan, case), case), serial(case))


@cells(
    schedule=["one_f_one_b", "interleaved", "message_driven", "two_bw"],
    axes=[{"x": 2}, {"z": 2}, {"y": 2, "z": 2}],
)
def test_pipelines_equal_the_serial_muon(schedule: str, axes: dict[str, int]) -> None:
    case = dataclasses.replace(CASE, global_batch_size=16)
    shares = axes.get("z", 1)
    plan = dataclasses.replace(plan_for(case, schedule, 2, shares, 4), data=1, **axes)
    wanted = delayed(case) if schedule == "two_bw" else serial(case)
    assert_equals(train(plan, case), wanted)


def test_overlap_changes_no_bit() -> None:
    plan = fit(Plan(x=2, z=2), CASE)
    waiting, overlapped = (
        train(plan, dataclasses.replace(CASE, tensor=SETTINGS[name]))
        for name in ("waiting", "overlapped")
    )
    assert_same_bits(waiting, overlapped)


def test_momentum_is_stored_in_pieces_and_directions_are_gathered() -> None:
    plan = fit(Plan(y=2, z=2), CASE)

    def body(world: World) -> None:
        recorder = Recorder(world.rank)
        with make_run(world, plan, CASE, recorder=recorder) as run:
            list(run.steps(share_of(batch, world, plan) for batch in make_batches(CASE)))
            muon, _ = run._parts.optimizers
            pieces = [p for group in muon.param_groups for p in group["params"]]
            assert all(muon.state[p]["momentum_buffer"].shape == p.shape for p in pieces)
            gathers = [e for e in recorder.events() if e.kind == "muon_all_gather"]
            assert len(gathers) == len(pieces) * CASE.num_steps
            assert sum(e.bytes for e in gathers) == CASE.num_steps * sum(
                4 * piece.nbytes for piece in pieces
            )

    run_threads(plan.mesh(), body)


# --- the optimizer alone -------------------------------------------------------------------------

MESH = Mesh(x=2, y=2, z=2)
PLACES = {
    "cut": Placement(shape=(8, 6), shards=(Shard(0, "x"), Shard(0, "z"), Shard(1, "y"))),
    "sections": Placement(shape=(4, 12), shards=(Shard(1, "x", 3), Shard(0, "y"))),
    "whole": Placement(shape=(3, 5)),
}


def random(name: str, seed: int) -> Tensor:
    return torch.randn(PLACES[name].shape, generator=torch.Generator().manual_seed(seed))


def moved(build: object, cut: object = None) -> dict[str, Tensor]:
    """Take three steps with any of the gradients missing now and then; return the matrices."""
    local = cut if callable(cut) else (lambda name, tensor: tensor)
    matrices = {name: nn.Parameter(local(name, random(name, 1)).clone()) for name in PLACES}
    optimizers: Sequence[Optimizer] = build(list(matrices.items()))  # type: ignore[operator]
    for step in range(3):
        for number, (name, matrix) in enumerate(matrices.items()):
            gradient = local(name, random(name, 10 + step)).clone()
            matrix.grad = None if (step, number) == (1, 0) else gradient
        for optimizer in optimizers:
            optimizer.step()
    return {name: matrix.detach() for name, matrix in matrices.items()}


FACTORIES = {
    "named": lambda named: [torch.optim.Muon(named, lr=0.3, weight_decay=0.2)],
    "unnamed": lambda named: [torch.optim.Muon([p for _, p in named], lr=0.3)],
    "plain": lambda named: [
        torch.optim.Muon(named, lr=0.3, nesterov=False, momentum=0.5, ns_steps=3)
    ],
    "groups": lambda named: [
        torch.optim.Muon(
            [{"params": named[:1], "lr": 0.5}, {"params": named[1:], "momentum": 0.1}],
            adjust_lr_fn="match_rms_adamw",
        )
    ],
}


@pytest.mark.parametrize("name", FACTORIES)
def test_pieces_move_bit_by_bit_as_the_whole(name: str) -> None:
    factory = FACTORIES[name]
    wanted = moved(factory)

    def body(world: World) -> None:
        grid = Grid(world, TensorSettings())
        matrices = SplitMatrices(world.group("x", "y", "z", use="updates"), MESH, PLACES)

        def cut(which: str, tensor: Tensor) -> Tensor:
            return cut_out(tensor, PLACES[which], grid)

        found = moved(over_pieces(factory, matrices), cut)  # type: ignore[arg-type]
        for which, piece in found.items():
            assert torch.equal(piece, cut(which, wanted[which])), which

    run_threads(MESH, body)


def test_other_optimizers_stay_as_they_are() -> None:
    def body(world: World) -> None:
        matrices = SplitMatrices(world.group("z"), Mesh(z=2), PLACES)
        given = [(name, nn.Parameter(random(name, 1))) for name in PLACES]
        adamw = torch.optim.AdamW(given)
        assert over_pieces(lambda _: adamw, matrices)(given) == [adamw]
        inner, rest = over_pieces(MUON, matrices)([*given, ("norm", nn.Parameter(torch.ones(2)))])
        assert isinstance(rest, torch.optim.AdamW)
        # A checkpoint knows state by the name of its optimizer, under any layout.
        assert type(inner).__name__ == torch.optim.Muon.__name__

    run_threads(Mesh(z=2), body)
