"""A run knows what it holds: its own count of tensors agrees with the memory model, to the byte."""

from __future__ import annotations

import json
import mmap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ganglion import Plan
from ganglion.decide.config import RunFile
from ganglion.decide.config.files import MEMORY_FILE
from ganglion.decide.costs import Memory, StateRules
from ganglion.decide.predict import predicted_memory
from ganglion.decide.predict.measured_memory import counted_categories, write_memory
from ganglion.decide.schedules.buckets.updates import GRAIN
from ganglion.decide.topology import Mesh
from ganglion.execute.comm import World, run_threads
from ganglion.execute.measure.memory import MemoryWatch, SavedBytes, held_bytes
from ganglion.execute.models import cross_entropy
from ganglion.execute.train import RunSettings, parallelize
from tests.single.models.test_memory_model import STATES, Layouts, plan_of, told
from tests.support.training import FACTORIES, SHAPES, make_batches, make_model, make_run, share_of

# "center" is padded, and counted in test_center_memory.py.
COUNTED = ("weights", "versions", "gradients", "master", "moments", "buckets")
HALF: dict[str, Any] = {"precision": "bf16_master"}
MASTERS = [
    Layouts("gpt", plan_of(**HALF)),
    Layouts("gpt", plan_of(**HALF, data=2), "sgd"),
    Layouts("gpt", plan_of(**HALF, compute_fp32=True)),
    Layouts("gpt", plan_of(**HALF, pipe=2, schedule="two_bw")),
    Layouts("tied", plan_of(precision="fp16_master", pipe=2, schedule="gpipe")),
    Layouts("wide_gpt", plan_of(**HALF, x=2, pipe=2)),
    Layouts("wide_gpt3", plan_of(**HALF, z=2)),
]
OFFLOADED = [
    Layouts("gpt", plan_of(offload="disk")),
    Layouts("gpt", plan_of(offload="disk"), "sgd"),
    Layouts("gpt", plan_of(offload="disk"), "muon"),
    Layouts("gpt", plan_of(**HALF, offload="disk")),
    Layouts("gpt", plan_of(**HALF, offload="disk"), "muon"),
    Layouts("gpt", plan_of(**HALF, offload="disk", pipe=2, schedule="two_bw")),
    Layouts("tied", plan_of(offload="disk", pipe=2, schedule="interleaved")),
    Layouts("wide_gpt3", plan_of(**HALF, offload="disk", z=2)),
]
BUCKET_SIZE = 3 * GRAIN


def named_layout(layout: Layouts) -> str:
    plan = layout.plan
    return f"{told(layout)}-{plan.precision}-{plan.offload}-{plan.compute_fp32}"


def counted(world: World, layout: Layouts, folder: Path) -> tuple[Plan, dict[str, int]]:
    case = layout.case
    with parallelize(
        make_model(case, 1),
        cross_entropy,
        FACTORIES[case.optimizer],
        replace(layout.plan, bucket_mib=case.bucket_mib, bucket_size=BUCKET_SIZE),
        RunSettings(
            error_feedback=case.error_feedback,
            offload_dir=folder / str(world.rank),
        ),
        world=world,
    ) as run:
        list(run.steps(share_of(b, world, layout.plan) for b in make_batches(case)))
        run.drain()
        return run.plan, held_bytes(run.tensors())


@pytest.mark.parametrize("layout", [*STATES[::4], *MASTERS, *OFFLOADED], ids=named_layout)
def test_a_run_counts_what_the_model_predicts(layout: Layouts, tmp_path: Path) -> None:
    mesh = layout.plan.mesh()
    found = run_threads(mesh, lambda world: counted(world, layout, tmp_path))
    wanted = predicted_memory(SHAPES[layout.model], found[0][0], layout.rules)
    for rank, (_, held) in enumerate(found):
        expected = wanted[mesh.coordinates(rank).pipe]
        assert {c: held.get(c, 0) for c in COUNTED} == {c: getattr(expected, c) for c in COUNTED}
        assert held.get("lower_tier", 0) >= expected.lower_tier  # in whole pages


# --- what autograd keeps -------------------------------------------------------------------------


def saved_in_a_step(recompute: str) -> tuple[SavedBytes, Memory]:
    """Train one step of two samples; return what autograd kept, and what was predicted."""
    layout = Layouts("gpt", Plan(microbatch_size=2, recompute=recompute))

    def body(world: World) -> SavedBytes:
        with make_run(world, layout.plan, layout.case) as run:
            saved = run.count_saved()
            list(run.steps([share_of(make_batches(layout.case)[0], world, layout.plan)]))
            return saved

    (held,) = predicted_memory(SHAPES["gpt"], layout.plan, StateRules())
    return run_threads(Mesh(), body)[0], held


def test_what_autograd_keeps_is_counted_while_it_lives() -> None:
    saved, held = saved_in_a_step("none")
    assert saved.live_peak == pytest.approx(held.activations, rel=0.05)  # and the tokens
    assert saved.again_peak == 0
    assert saved.num_bytes == 0, "all is let go after backward"


def test_the_inside_of_a_block_that_runs_again_is_counted_apart() -> None:
    saved, held = saved_in_a_step("full")
    assert saved.live_peak == pytest.approx(held.activations, rel=0.05)
    assert saved.again_peak == pytest.approx(held.recomputed, rel=0.05)
    assert saved.num_bytes == 0


def test_memory_that_two_nodes_keep_is_counted_once() -> None:
    x = torch.ones(1000, requires_grad=True)
    saved = SavedBytes([])
    with saved.watching():
        y = x.exp()
        z = y * y.detach() + y.sin()
    assert saved.num_bytes == saved.live_peak == y.nbytes
    z.sum().backward()  # type: ignore[no-untyped-call]
    assert saved.num_bytes == 0


def test_counting_ends_when_it_is_switched_off() -> None:
    saved = SavedBytes([])
    saved.is_on = False
    with saved.watching():
        torch.ones(10, requires_grad=True).exp()
    assert saved.live_peak == 0


# --- the process ---------------------------------------------------------------------------------


def test_the_peak_is_that_of_memory_above_the_baseline() -> None:
    watch = MemoryWatch(torch.device("cpu"))
    before = watch.peak_bytes()
    size = before + 64 * 2**20  # what other tests took is below the peak of the process
    # Straight from the kernel: the C library may hand out what others freed, which is resident.
    with mmap.mmap(-1, size) as taken:
        for _ in range(size // 2**20):
            taken.write(bytes(2**20))
        assert watch.peak_bytes() - before >= 32 * 2**20


def test_memory_is_counted_where_it_comes_first() -> None:
    flat = torch.zeros(10)
    parameter = nn.Parameter(flat[:4])
    tensors: dict[str, list[Tensor]] = {"weights": [parameter], "versions": [flat, torch.ones(3)]}
    assert held_bytes(tensors) == {"weights": 40, "versions": 12}


def test_servers_are_no_ranks_that_were_measured(tmp_path: Path) -> None:
    plan = Plan(data=2, averaging="async_easgd", servers=1)
    measured = [(Memory(weights=4), 10), (Memory(weights=8), 20)]
    write_memory(tmp_path, measured, file=RunFile(), plan=plan, shape=None, device="cpu")
    ranks = json.loads((tmp_path / MEMORY_FILE).read_text())["ranks"]
    assert [rank["measured_peak"] for rank in ranks] == [10, 20]


def test_activations_that_somebody_else_listens_to_are_not_told() -> None:
    assert {"activations", "recomputed"} <= set(counted_categories(Plan()))
    widened = Plan(precision="bf16_master", compute_fp32=True)
    for plan in (widened, Plan(offload_activations="disk")):
        assert not {"activations", "recomputed"} & set(counted_categories(plan))
