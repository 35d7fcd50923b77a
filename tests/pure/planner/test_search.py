"""The search against all layouts priced one by one, and its limits."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import product

import pytest

from ganglion.decide.costs import find_cluster
from ganglion.decide.plan import Plan
from ganglion.decide.planner import Answer, Question, answer_of, parse_fixed, plan, priced
from ganglion.decide.planner.candidates import layouts, rank_orders, schedules
from ganglion.decide.planner.question import device_bytes
from ganglion.decide.predict import predict_layout
from ganglion.decide.shapes import GPTShape, describe_shape
from ganglion.errors import ConfigError, LayoutError
from ganglion.units import GIB

GPT = GPTShape(
    vocab_size=8192,
    seq_len=512,
    num_layers=14,
    hidden=2048,
    num_heads=16,
    num_kv_heads=16,
    head_size=128,
    mlp_hidden=8192,
)


def ask(cluster: str = "perlmutter", *, fix: str = "", **changes: object) -> Question:
    on = find_cluster(cluster)
    question = Question(
        shape=describe_shape(GPT),
        name="gpt",
        cluster=on,
        num_ranks=8,
        global_batch_size=64,
        memory_bytes=device_bytes(on),
        fixed=parse_fixed(fix),
        sample_tokens=GPT.seq_len,
    )
    return replace(question, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("cluster", ["perlmutter", "summit", "p3.16xlarge"])
def test_the_best_is_that_of_all_layouts_priced_one_by_one(cluster: str) -> None:
    question = ask(cluster, num_ranks=4, global_batch_size=32)
    every = []
    for layout in layouts(question):
        for (name, chunks), order in product(
            schedules(question, layout), rank_orders(question, layout)
        ):
            plan = Plan(
                **layout._asdict(),
                schedule=name,
                chunks=chunks,
                rank_order=order,
                precision="bf16_master",
            )
            row = priced(question, plan)
            if row.memory_bytes <= question.memory_bytes:
                every.append(row.step_s)
    assert len(every) > 100
    assert answer_of(question).best.step_s <= 1.02 * min(every)


def test_plans_are_sorted_fit_and_follow_the_question() -> None:
    question = ask(fix="pipe=2|4,schedule=1f1b|2bw,precision=bf16")
    answer = answer_of(question)
    assert len(answer.plans) == 10
    steps = [row.step_s for row in answer.plans]
    assert steps == sorted(steps)
    for row in answer.plans:
        assert row.plan.pipe in (2, 4)
        assert row.plan.schedule in ("one_f_one_b", "two_bw")
        assert row.plan.precision == "bf16"
        assert row.plan.global_batch_size == 64
        assert row.plan.num_ranks == 8
        assert row.memory_bytes <= question.memory_bytes
        assert row.staleness == (row.plan.schedule == "two_bw")
        assert row.tokens_per_day == pytest.approx(64 * 512 * 86_400 / row.step_s)


def test_the_same_question_has_the_same_answer() -> None:
    first, second = (answer_of(ask()) for _ in range(2))
    assert [asdict(row) for row in first.plans] == [asdict(row) for row in second.plans]


def test_the_parts_of_a_step_add_up() -> None:
    for row in answer_of(ask(fix="recompute=full")).plans:
        parts = asdict(row.parts)
        assert sum(parts.values()) == pytest.approx(row.step_s)
        assert min(parts.values()) >= -1e-9
        assert parts["again_s"] > 0


def test_no_gradient_is_later_than_allowed() -> None:
    late = answer_of(ask(fix="data=1,x=1,y=1,z=1"))
    assert late.best.plan.schedule == "two_bw", "never flushes, so it is the fastest pipeline"
    fresh = answer_of(ask(fix="data=1,x=1,y=1,z=1", max_staleness=0))
    assert {row.staleness for row in fresh.plans} == {0}
    assert fresh.best.step_s > late.best.step_s


def test_storage_is_used_only_when_memory_needs_it() -> None:
    assert answer_of(ask()).best.storage == "-"
    little = answer_of(ask(memory_bytes=3 * GIB))
    assert little.best.storage != "-"
    assert all(row.memory_bytes <= 3 * GIB for row in little.plans)
    assert little.num_too_large > 0


def test_stages_are_cut_by_the_time_of_their_blocks() -> None:
    question = ask(fix="pipe=8,schedule=1f1b,microbatch=1")
    row = answer_of(question).best
    uniform = replace(row.plan, stage_boundaries=(4, 8, 12, 16, 20, 24, 28))
    longest = [
        max(a + b for a, b in zip(step.forward_s, step.backward_s, strict=True))
        for step in (
            predict_layout(question.shape, plan, question.cluster).step
            for plan in (row.plan, uniform, replace(row.plan, stage_boundaries=()))
        )
    ]
    assert len(row.plan.stage_boundaries) == 7
    assert longest[0] <= min(longest[1:]) * (1 + 1e-9)


def test_a_model_that_is_too_large_names_ranks_that_would_do() -> None:
    with pytest.raises(LayoutError) as caught:
        answer_of(ask(num_ranks=1, memory_bytes=2 * GIB))
    assert "no layout of gpt fits 1 ranks of 2.0 GiB: the smallest needs about" in str(caught.value)
    assert "--gpus" in str(caught.value)
    enough = int(str(caught.value).split("--gpus ")[1].split()[0])
    assert answer_of(ask(num_ranks=enough, memory_bytes=2 * GIB)).best


def test_a_batch_that_nothing_divides_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"no layout of --gpus 8 divides gpt and --batch 3"):
        answer_of(ask(global_batch_size=3, fix="data=8"))
    with pytest.raises(ConfigError, match="--method 'ful' is not one of"):
        answer_of(ask(), method="ful")
    with pytest.raises(LayoutError, match="--top 0"):
        answer_of(ask(), top=0)


def test_the_front_has_no_plan_that_another_beats() -> None:
    answer: Answer = answer_of(ask(memory_bytes=8 * GIB))
    front = answer.front
    assert answer.best in front or any(row.step_s == answer.best.step_s for row in front)
    for one, other in product(front, answer.plans):
        better = (
            other.step_s < one.step_s
            and other.memory_bytes < one.memory_bytes
            and other.staleness <= one.staleness
        )
        assert not better


def test_a_price_follows_from_hours_and_the_cluster_file() -> None:
    answer = answer_of(ask("p4d.24xlarge"))
    hours = answer.rank_hours(1e12)
    days = 1e12 / answer.best.tokens_per_day
    assert hours == pytest.approx(8 * 24 * days)
    per_hour = answer.question.cluster.price_per_hour
    assert per_hour is not None
    assert answer.price(1e12) == pytest.approx(per_hour * hours)
    assert answer_of(ask("summit")).price(1e12) is None


@pytest.mark.parametrize(
    ("model", "cluster", "gpus", "batch", "fix"),
    [
        # Groups of 4 ranks do not divide nodes of 6: some of them cross nodes.
        ("gpt-12b", "summit", 48, 2048, "data=2,pipe=6,x=2,y=1,z=2,microbatch=4,schedule=1f1b"),
        # Weights gathered between nodes for a small microbatch take longer than its products.
        ("axonn4d-10b", "perlmutter", 64, 64, "data=1,pipe=1,x=1,y=1,z=64,microbatch=1"),
    ],
)
def test_the_closed_form_is_near_the_simulation(
    model: str, cluster: str, gpus: int, batch: int, fix: str
) -> None:
    row = plan(model, cluster=cluster, gpus=gpus, batch=batch, fix=fix).best
    assert row.estimated_s == pytest.approx(row.step_s, rel=0.2)
