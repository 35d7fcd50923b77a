"""Candidates: every layout that divides, and no other."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from ganglion.decide.costs import find_cluster
from ganglion.decide.plan import Plan
from ganglion.decide.planner import Question, parse_fixed
from ganglion.decide.planner.candidates import (
    Layout,
    TensorSplits,
    layouts,
    rank_orders,
    schedules,
)
from ganglion.decide.schedules.pipeline import check_planned
from ganglion.decide.shapes import ConvShape, MLPShape, parameters_of
from ganglion.decide.topology import Mesh
from ganglion.errors import LayoutError
from ganglion.units import GIB
from tests.pure.planner.test_question import SMALL


def question(num_ranks: int = 8, batch: int = 16, fix: str = "") -> Question:
    return Question(
        shape=SMALL,
        name="small",
        cluster=find_cluster("perlmutter"),
        num_ranks=num_ranks,
        global_batch_size=batch,
        memory_bytes=40 * GIB,
        fixed=parse_fixed(fix),
    )


def test_axes_multiply_to_the_ranks_and_microbatches_to_the_batch() -> None:
    found = list(layouts(question()))
    assert len(found) == len(set(found))
    for one in found:
        assert one.data * one.pipe * one.x * one.y * one.z == 8
        assert one.microbatch_size * one.num_microbatches * one.data * one.z == 16


def test_no_layout_is_forgotten() -> None:
    """Against all products of sizes and microbatches, checked one by one."""
    wanted = set()
    for pipe, x, y, z, data, size in product(range(1, 9), repeat=6):
        sizes = (data, pipe, x, y, z)
        divides = data * pipe * x * y * z == 8 and 16 % (data * z * size) == 0
        if not divides or size & (size - 1) or SMALL.num_heads % x:
            continue
        wanted.add(Layout(*sizes, size, 16 // (data * z * size)))
    # Microbatches of 16 need one share.
    wanted |= {one for one in layouts(question()) if one.microbatch_size == 16}
    assert set(layouts(question())) == wanted


def test_fixed_fields_are_kept() -> None:
    found = list(layouts(question(fix="pipe=2,data=2|4,microbatch=3|4", batch=48)))
    assert {one.pipe for one in found} == {2}
    assert {one.data for one in found} == {2, 4}
    assert {one.microbatch_size for one in found} == {3, 4}


def test_a_pipeline_has_no_more_stages_than_blocks() -> None:
    deep = question(num_ranks=16, fix="data=1,x=1,y=1,z=1")
    assert list(layouts(deep)) == [], "14 blocks"
    assert {one.pipe for one in layouts(question(num_ranks=14, fix="data=1"))} == {7, 14}


def test_every_schedule_can_run_its_microbatches() -> None:
    asked = question(num_ranks=8, batch=64)
    names = set()
    for layout in layouts(asked):
        for (name, chunks), order in product(schedules(asked, layout), rank_orders(asked, layout)):
            names.add(name)
            check_planned(Plan(**layout._asdict(), schedule=name, chunks=chunks, rank_order=order))
    assert names == {
        "one_f_one_b", "interleaved", "zero_bubble", "zero_bubble_v", "message_driven", "two_bw"
    }  # fmt: skip


def test_a_fixed_schedule_is_tried_even_if_it_is_never_the_fastest() -> None:
    asked = question(fix="schedule=gpipe|stash,pipe=4,data=2,x=1,y=1,z=1")
    layout = next(layouts(asked))
    assert dict(schedules(asked, layout)) == {"gpipe": 0, "stash": 0}


@pytest.mark.parametrize(
    "shape",
    [
        SMALL,
        replace(SMALL, num_kv_heads=2),
        MLPShape(num_inputs=12, num_outputs=10, num_layers=3, hidden=24),
        ConvShape(image_size=28, num_channels=1, num_outputs=8),
    ],
    ids=["gpt", "grouped", "mlp", "conv"],
)
def test_tensor_axes_divide_what_they_split(shape) -> None:
    splits = TensorSplits(shape)
    for x, y in product((1, 2, 3, 4, 8), repeat=2):
        divides = True
        try:
            for block in parameters_of(shape):
                for parameter in block:
                    parameter.num_gathered(Mesh(x=x, y=y))
        except LayoutError:
            divides = False
        heads = getattr(shape, "num_kv_heads", 0), getattr(shape, "num_heads", 0)
        assert splits.fits(x, y, 1) == (divides and not any(h % x for h in heads))
