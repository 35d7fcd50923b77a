"""The memory model: published numbers, known answers, and laws that hold for every layout."""

from __future__ import annotations

import math
from bisect import bisect
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ganglion.decide.config import load_run_file, resolve
from ganglion.decide.costs import (
    CATEGORIES,
    MIXED,
    TWO_MASTERS,
    Memory,
    StageBlocks,
    StateRules,
    activation_memory,
    gathered_blocks,
    gathered_memory,
    message_memory,
    moved_to_tier,
    state_memory,
    with_norm,
)
from ganglion.decide.plan import Plan
from ganglion.decide.predict import predicted_memory, state_rules
from ganglion.decide.schedules.pipeline import planned_holding, planned_schedule
from ganglion.decide.shapes import (
    BlockActivations,
    ConvShape,
    GPTShape,
    MLPShape,
    ModelShape,
    Parameter,
    blocks_of,
    parameters_of,
)
from ganglion.decide.topology import Mesh
from ganglion.errors import ConfigError

GB = 1e9
ONE = Mesh()
SCHEDULES = (
    *("gpipe", "one_f_one_b", "interleaved", "zero_bubble", "zero_bubble_v"),
    *("message_driven", "two_bw", "stash"),
)


def again(stage: StageBlocks) -> StageBlocks:
    """Return a stage whose every block is computed again."""
    singles = [range(number, number + 1) for number in range(len(stage.blocks))]
    return replace(stage, segments=singles)


def flat(count: int) -> list[Parameter]:
    """Return parameters of so many elements, as one vector."""
    return [Parameter(shape=(count,), axes=(None,))]


def layer_bytes(seq_len: int, hidden: int, num_heads: int) -> int:
    """What a layer keeps in fp16, where attention is not fused (2205.05198, equation 2)."""
    return seq_len * hidden * 34 + 5 * num_heads * seq_len**2


# --- published numbers ---------------------------------------------------------------------------


def test_bytes_a_parameter_of_mixed_precision() -> None:
    """AxoNN, spec A.6: 20 bytes, of which 4 stay and 12 go to a lower tier; 16 an element there."""
    count, bucket = 2_000_000, 16_000
    resident = state_memory(flat(count), ONE, StateRules(formats=MIXED))
    assert resident.total == pytest.approx(20 * count, abs=8)
    lowered = moved_to_tier(resident, flat(count), ONE, StateRules(formats=MIXED), 16 * bucket)
    assert lowered.total == pytest.approx(4 * count + 16 * bucket, abs=8)
    assert lowered.lower_tier == pytest.approx(12 * count, abs=8)
    assert (lowered.master, lowered.moments) == (0, 4)  # the count of steps stays


def test_axonn_520_to_130_gb() -> None:
    """12 B parameters, 48 GPUs, G_inter 24, microbatches of 1, checkpoints of two layers (A.6)."""
    seq_len, hidden, num_heads, num_stages = 512, 4512, 24, 24
    shape = parameters_of(
        GPTShape(
            vocab_size=50304,
            seq_len=seq_len,
            num_layers=48,
            hidden=hidden,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_size=hidden // num_heads,
            mlp_hidden=4 * hidden,
            bias=True,
        )
    )
    edge = seq_len * hidden * 2
    segment = BlockActivations(
        input_bytes=edge,
        output_bytes=edge,
        kept_bytes=2 * layer_bytes(seq_len, hidden, num_heads) - edge,
    )
    edges = [0, *(1 + 4 * stage for stage in range(1, num_stages)), len(shape)]
    totals = []
    rules = StateRules(formats=MIXED)
    for is_lowered in (False, True):
        total = 0
        for stage in range(num_stages):
            mine = [p for block in shape[edges[stage] : edges[stage + 1]] for p in block]
            blocks = StageBlocks(
                blocks=[segment], is_first=stage == 0, is_last=stage == num_stages - 1
            )
            alive = 1 if stage == num_stages - 1 else num_stages  # A.9, item 10
            held = state_memory(mine, ONE, rules)
            if is_lowered:
                held = moved_to_tier(held, mine, ONE, rules, 16 * 16_000_000)
            held += activation_memory([again(blocks)], [(alive,)])
            total += 2 * held.total
        totals.append(total / GB)
    assert totals[0] == pytest.approx(520, rel=0.10)
    assert totals[1] == pytest.approx(130.24, rel=0.10)


def gpt_22(num_layers: int = 32) -> GPTShape:
    return GPTShape(
        vocab_size=50304,
        seq_len=512,
        num_layers=num_layers,
        hidden=2304,
        num_heads=32,
        num_kv_heads=32,
        head_size=72,
        mlp_hidden=4 * 2304,
        positions="learned",
        tied_embedding=True,
        bias=True,
    )


def test_two_bw_minus_flush_on_gpt_22() -> None:
    """Spec G8: 1.55 GB measured on the first of 8 stages, whose 372 M parameters have 4 B more."""
    first = [p for block in parameters_of(gpt_22())[:9] for p in block]
    assert sum(p.num_stored(ONE) for p in first) == pytest.approx(372.0e6, rel=0.001)
    flush = state_memory(first, ONE, StateRules(formats=TWO_MASTERS))
    two_bw = state_memory(first, ONE, StateRules(formats=TWO_MASTERS, num_versions=2, num_sets=1))
    assert (two_bw.total - flush.total) / GB == pytest.approx(1.49, abs=0.01)
    assert (two_bw.total - flush.total) / GB == pytest.approx(1.55, rel=0.20)
    assert two_bw.total / GB == pytest.approx(8.93, abs=0.01)


@pytest.mark.parametrize(("depth", "billions"), [(1, 0.58), (2, 1.1), (4, 2.0), (8, 4.1)])
def test_largest_model_by_depth(depth: int, billions: float) -> None:
    """Spec G9: GPT of width 1024 under 2BW with recomputation by layer, in 14.2 GB (A.9)."""
    hidden, seq_len, heads = 1024, 512, 16
    edge = seq_len * hidden * 2
    layer = BlockActivations(
        input_bytes=edge,
        output_bytes=edge,
        kept_bytes=layer_bytes(seq_len, hidden, heads) - edge,
    )
    rules = StateRules(formats=TWO_MASTERS, num_versions=2, num_sets=1)

    def fits(num_layers: int) -> bool:
        mine = _gpt_1024(num_layers)[: 1 + 2 * num_layers // depth]
        stage = StageBlocks(blocks=[layer] * (num_layers // depth), is_first=True)
        held = state_memory([p for block in mine for p in block], ONE, rules)
        held += activation_memory([again(stage)], [(depth,)])
        return held.total <= 14.2 * GB

    sizes = range(depth, 500, depth)  # more layers never need less
    most = sizes[bisect(sizes, False, key=lambda n: not fits(n)) - 1]
    blocks = _gpt_1024(most)
    count = sum(p.num_stored(ONE) for block in blocks for p in block if not p.is_tied)
    assert count / GB == pytest.approx(billions, rel=0.10)


def _gpt_1024(num_layers: int) -> list[tuple[Parameter, ...]]:
    return parameters_of(
        replace(
            gpt_22(num_layers),
            hidden=1024,
            num_heads=16,
            num_kv_heads=16,
            head_size=64,
            mlp_hidden=4096,
        )
    )


# --- state ---------------------------------------------------------------------------------------


def test_optimizers_in_fp32() -> None:
    shape = MLPShape(num_inputs=8, num_outputs=4, num_layers=2, hidden=8)
    parameters = [p for block in parameters_of(shape) for p in block]
    count, matrices = 64 + 8 + 32 + 4, 64 + 32

    def moments(**rules: Any) -> int:
        held = state_memory(parameters, ONE, StateRules(**rules))
        assert held.weights == held.gradients == 4 * count
        return held.moments

    assert moments() == 8 * count + 4 * 4  # with the steps of four parameters
    assert moments(optimizer="sgd") == 4 * count
    assert moments(optimizer="sgd", has_momentum=False) == 0
    assert moments(optimizer="muon") == 4 * matrices + 8 * (count - matrices) + 2 * 4
    assert moments(optimizer="sgd", error_feedback=True) == 8 * count


def test_versions_and_sets() -> None:
    held = state_memory(flat(10), ONE, StateRules(num_versions=3))
    assert (held.weights, held.versions, held.gradients) == (40, 80, 120)


def test_what_has_no_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer.name = 'lion' has no memory model: use"):
        StateRules(optimizer="lion")


GPT = GPTShape(
    vocab_size=48,
    seq_len=16,
    num_layers=2,
    hidden=24,
    num_heads=12,
    num_kv_heads=6,
    head_size=4,
    mlp_hidden=96,
    bias=True,
)
MODELS: list[ModelShape] = [
    GPT,
    replace(GPT, positions="learned", tied_embedding=True),
    MLPShape(num_inputs=12, num_outputs=12, num_layers=4, hidden=24),
    MLPShape(num_inputs=12, num_outputs=12, num_layers=1, hidden=24, bias=False),
    ConvShape(image_size=28, num_channels=1, num_outputs=10),
]


@pytest.mark.parametrize("shape", MODELS)
def test_parameters_are_as_many_as_the_costs_of_blocks_say(shape: ModelShape) -> None:
    counts = [sum(math.prod(p.shape) for p in block) for block in parameters_of(shape)]
    assert counts == [block.num_parameters for block in blocks_of(shape, 1)]


def test_rows_that_z_does_not_divide_stay_whole() -> None:
    weight = Parameter(shape=(12, 10), axes=("x", "y"), role="matrix")
    assert weight.num_stored(Mesh(x=2, y=2, z=3)) == 12 * 10 // 12
    assert weight.num_stored(Mesh(x=2, y=2, z=4)) == 12 * 10 // 4
    assert not weight.is_gathered(Mesh(x=2, y=2, z=4))
    bias = Parameter(shape=(12,), axes=("x",))
    assert bias.num_stored(Mesh(x=2, z=3)) == 6


# --- activations and what travels ----------------------------------------------------------------


def block(kept: int, size: int = 10, **fields: Any) -> BlockActivations:
    return BlockActivations(input_bytes=size, output_bytes=size, kept_bytes=kept, **fields)


def test_a_tensor_between_blocks_counts_once() -> None:
    neither = block(40, keeps_input=False)
    blocks = [block(100, keeps_output=True), block(200), neither, block(300), neither]
    kept = 100 + 200 + 40 + 300 + 40
    stage = StageBlocks(blocks=blocks)
    assert stage.live_bytes() == kept + 2 * 10 + (10 + 10)  # with both ends
    by_output = StageBlocks(blocks=[block(100, keeps_output=True), neither])
    assert by_output.live_bytes() == 140 + 10 + (10 + 10)
    assert again(stage).live_bytes() == 4 * 10 + (10 + 10)
    whole = StageBlocks(blocks=blocks, is_first=True, is_last=True)
    assert again(whole).live_bytes() == 40
    assert again(stage).recomputed_bytes() == 300 and again(by_output).recomputed_bytes() == 110


def test_the_worst_moment_counts() -> None:
    stages = [StageBlocks(blocks=[block(100)]), StageBlocks(blocks=[block(1000)])]
    held = activation_memory(stages, [(5, 0), (2, 1)])
    assert held.activations == 2 * 120 + 1020
    recomputed = activation_memory([again(stage) for stage in stages], [(5, 0), (2, 1)])
    assert (recomputed.activations, recomputed.recomputed) == (100, 1000)


def test_scratch_may_use_what_later_blocks_freed() -> None:
    blocks = [block(5, scratch_bytes=1000), block(200, scratch_bytes=700)]
    stage = StageBlocks(blocks=blocks, is_last=True)
    assert stage.scratch_bytes() == 1000 - 200 - 10
    rerun = 5 + 1000 + 10  # its inside, its scratch and its output, while the last input is free
    assert again(stage).scratch_bytes() == max(700, rerun - 200 - 10)


def test_messages_that_wait() -> None:
    stages = [StageBlocks(blocks=[block(0, 10), block(0, 10)], num_waiting=3)]
    assert message_memory(stages).communication == 3 * 10 + 2 * 10


def test_weights_along_z() -> None:
    mesh = Mesh(z=2)
    weights = [Parameter(shape=(rows, 10), axes=(None, None), role="matrix") for rows in (2, 8, 4)]
    summed = 4 * (140 + 70)
    assert gathered_memory(weights, mesh).communication == summed + 4 * 120
    assert gathered_memory(weights, mesh, overlap=False).communication == summed + 4 * 80
    kept = gathered_memory(weights, mesh, keep_gathered=True).communication
    assert kept == summed + 4 * 140
    some = gathered_memory(weights, mesh, keep_gathered=[False, True, False]).communication
    assert some == summed + 4 * (80 + 40)  # the others are never in use one after the other
    first = gathered_memory(weights, mesh, keep_gathered=[True, False, False], overlap=False)
    assert first.communication == summed + 4 * (20 + 80)
    assert gathered_blocks(weights, mesh) == [80, 320, 160]
    assert gathered_blocks(weights, mesh, "bf16_master") == [40, 160, 80]
    half = gathered_memory(weights, mesh, keep_gathered=True, precision="bf16").communication
    assert half == kept + 2 * 80
    assert gathered_memory(weights, ONE).communication == 0


def test_the_norm_may_take_the_place_of_activations() -> None:
    working = Memory(activations=100, scratch=30)
    assert with_norm(working, 10, flushes=False).scratch == 160
    assert with_norm(working, 10, flushes=True).scratch == 60
    assert with_norm(working, 1, flushes=True) == working


# --- what schedules hold -------------------------------------------------------------------------


@pytest.mark.parametrize("pipe", [1, 2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_alive_keeps_to_the_bound_of_the_schedule(schedule: str, pipe: int) -> None:
    plan = Plan(pipe=pipe, schedule=schedule, num_microbatches=2 * pipe)
    for rank in range(pipe):
        holding, declared = planned_holding(plan, rank), planned_schedule(plan, rank)
        most = max(sum(moment) for moment in holding.alive)
        if pipe == 1 and declared.flushes:
            assert (holding.num_stages, most, holding.num_versions) == (1, 1, 1)
            continue
        bound = declared.live_bound
        assert 1 <= most <= (2 * pipe * len(holding.stages) if bound is None else bound)
        if schedule not in ("interleaved", "zero_bubble_v"):
            assert most == (2 * pipe if bound is None else bound)


def test_inputs_wait_where_fewer_are_alive_than_before() -> None:
    """Of 6 in flight the last stage computes with one; a gradient is on its way, too."""
    edge = 2 * GPT.seq_len * GPT.hidden * 4
    plan = Plan(pipe=2, schedule="message_driven", limit=6, num_microbatches=8, microbatch_size=2)
    first, last = predicted_memory(GPT, plan, StateRules())
    samples = 16 * 2 * GPT.seq_len * 8
    assert first.communication == samples + edge
    assert last.communication == samples + 5 * edge + edge


def test_versions_as_the_engine_keeps_them() -> None:
    def versions(schedule: str, m: int) -> list[int]:
        plan = Plan(pipe=3, schedule=schedule, num_microbatches=m)
        return [planned_holding(plan, rank).num_versions for rank in range(3)]

    assert versions("one_f_one_b", 3) == [1, 1, 1]
    assert versions("two_bw", 3) == [2, 2, 2]
    assert versions("stash", 1) == [3, 2, 2]


def test_chunks_are_told_apart() -> None:
    """The first rank of a V holds both ends: many of the first stage, few of the last."""
    holding = planned_holding(Plan(pipe=2, schedule="zero_bubble_v", num_microbatches=4), 0)
    assert holding.stages == (0, 3)
    assert holding.most_alive(0) >= 3 and holding.most_alive(3) < 3


# --- laws ----------------------------------------------------------------------------------------

AXIS = st.sampled_from([1, 2, 3])


@st.composite
def plans(draw: st.DrawFn, /, **fixed: Any) -> Plan:
    pipe = fixed.pop("pipe", draw(st.sampled_from([1, 2])))
    schedule = draw(st.sampled_from(SCHEDULES))
    axes: dict[str, Any] = {axis: draw(AXIS) for axis in ("x", "y", "z")}
    return Plan(
        pipe=pipe,
        schedule=schedule,
        num_microbatches=pipe * draw(st.integers(1, 3)),
        microbatch_size=draw(st.integers(1, 4)),
        precision=draw(st.sampled_from(["fp32", "bf16"])),
        **axes,
        **fixed,
    )


SPLITTABLE = st.sampled_from(MODELS[:3])


@given(SPLITTABLE, plans(), st.booleans())
def test_total_is_the_sum_of_categories(shape: ModelShape, plan: Plan, keep: bool) -> None:
    for held in predicted_memory(shape, replace(plan, keep_gathered=keep), StateRules()):
        assert held.total == sum(getattr(held, name) for name in CATEGORIES)
        assert all(getattr(held, name) >= 0 for name in CATEGORIES)
        assert held.weights > 0 and held.activations >= 0


@given(SPLITTABLE, plans(pipe=1))
def test_recomputation_never_keeps_more(shape: ModelShape, plan: Plan) -> None:
    (plain,) = predicted_memory(shape, plan, StateRules())
    (again,) = predicted_memory(shape, replace(plan, recompute="full"), StateRules())
    assert again.activations + again.recomputed <= plain.activations + plain.recomputed
    assert again.weights == plain.weights


@given(SPLITTABLE, plans(pipe=2))
def test_recomputation_in_stages_keeps_at_most_one_tensor_more(
    shape: ModelShape, plan: Plan
) -> None:
    """A stage of two blocks whose norm keeps its result, not its input, gains nothing by it."""
    plain = predicted_memory(shape, plan, StateRules())
    again = predicted_memory(shape, replace(plan, recompute="full"), StateRules())
    widest = max(getattr(shape, "hidden", 0), 1)
    edge = plan.microbatch_size * getattr(shape, "seq_len", 1) * widest * 4
    for one, two in zip(plain, again, strict=True):
        assert two.activations + two.recomputed <= one.activations + edge


@given(SPLITTABLE, plans(), st.sampled_from(["x", "y", "z"]), st.sampled_from([2, 3]))
def test_splitting_never_needs_more_weights(
    shape: ModelShape, plan: Plan, axis: str, factor: int
) -> None:
    choices: list[dict[str, Any]] = [{axis: 1}, {axis: factor}]
    before, after = (
        predicted_memory(shape, replace(plan, **choice), StateRules()) for choice in choices
    )
    for whole, split in zip(before, after, strict=True):
        for name in ("weights", "versions", "gradients", "moments"):
            assert getattr(split, name) <= getattr(whole, name)


@given(SPLITTABLE, plans())
def test_larger_microbatches_never_need_less(shape: ModelShape, plan: Plan) -> None:
    small = predicted_memory(shape, plan, StateRules())
    size = 2 * plan.microbatch_size
    large = predicted_memory(shape, replace(plan, microbatch_size=size), StateRules())
    for one, two in zip(small, large, strict=True):
        assert one.activations <= two.activations


# --- a run file ----------------------------------------------------------------------------------


def test_options_of_a_run_file() -> None:
    tables = {
        "optimizer": {"name": "sgd", "momentum": 0.0},
        "parallel": {"keep_gathered": True, "bucket_mib": 2.0},
    }
    run = load_run_file(tables)
    assert state_rules(run) == StateRules(optimizer="sgd", has_momentum=False)
    plan = resolve(run)
    assert plan.keep_gathered and plan.overlap and plan.bucket_mib == 2.0


def test_a_budget_for_gathered_weights() -> None:
    shape = MLPShape(num_inputs=8, num_outputs=4, num_layers=3, hidden=16)
    first_mib = 4 * 8 * 16 / 2**20  # of the first layer; after it the last fits no more
    choices: list[dict[str, Any]] = [
        {"keep_gathered_mib": first_mib},
        {},
        {"keep_gathered": True},
        {"keep_gathered_mib": 1.0},
    ]
    some, none, all_, room = (
        predicted_memory(shape, Plan(z=2, **choice), StateRules())[0] for choice in choices
    )
    assert all_ == room
    passing = (16 * 16 + 16 * 4) * 4  # the two others, in use and next
    assert some.communication - none.communication == 4 * 8 * 16 + passing - 4 * (8 + 16) * 16
    assert all_.communication - some.communication == 0


def test_averaging_keeps_the_centre_and_what_is_on_its_way() -> None:
    shape = MLPShape(num_inputs=8, num_outputs=4, num_layers=3, hidden=16)
    for plan in (Plan(data=2, pipe=2), Plan(data=2, z=2)):
        plain = predicted_memory(shape, plan, StateRules())
        averaged = predicted_memory(shape, replace(plan, averaging="sync_easgd"), StateRules())
        for one, other in zip(plain, averaged, strict=True):
            assert (one.center, other.center) == (0, 2 * one.weights)
            assert other.total == one.total + 2 * one.weights


def test_tied_weights_count_once_on_a_rank_and_twice_on_two() -> None:
    shape = replace(GPT, tied_embedding=True)
    table = 4 * shape.vocab_size * shape.hidden
    (whole,) = predicted_memory(shape, Plan(), StateRules())
    (untied,) = predicted_memory(GPT, Plan(), StateRules())
    assert untied.weights - whole.weights == table
    both = predicted_memory(shape, Plan(pipe=2, num_microbatches=2), StateRules())
    assert sum(held.weights for held in both) == untied.weights
    folded = Plan(pipe=2, num_microbatches=4, schedule="zero_bubble_v")
    assert sum(m.weights for m in predicted_memory(shape, folded, StateRules())) == whole.weights
