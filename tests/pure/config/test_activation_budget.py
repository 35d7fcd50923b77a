"""A budget for activations: as little as possible is computed again, and what fits is told."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import chain, combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ganglion.decide.config import RunFile, expected_shape, load_run_file, resolve
from ganglion.decide.costs import RankBlocks, StageBlocks, activation_memory, choose_recomputed
from ganglion.decide.plan import Plan
from ganglion.decide.predict import (
    decide_activations,
    predicted_memory,
    state_rules,
)
from ganglion.decide.shapes import BlockActivations
from ganglion.errors import ConfigError
from ganglion.units import MIB
from tests.support.profiles import examples

GPT: dict[str, Any] = {
    "model": {"layers": 6, "hidden": 256, "heads": 4, "vocab_size": 4096},
    "data": {"seq_len": 256},
    "train": {"global_batch_size": 32, "microbatch_size": 4},
}


def run_file(activation_mib: float = 0, **more: dict[str, Any]) -> RunFile:
    memory = {"recompute": "budget", "activation_mib": activation_mib} if activation_mib else {}
    tables = {**GPT, "memory": memory}
    for section, values in more.items():
        tables[section] = {**tables.get(section, {}), **values}
    return load_run_file(tables)


def needs(run: RunFile, plan: Plan) -> list[float]:
    held = predicted_memory(expected_shape(run), plan, state_rules(run))
    return [(one.activations + one.recomputed) / MIB for one in held]


def decided(run: RunFile) -> Plan:
    return decide_activations(run, resolve(run))


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"pipe": 2},
    {"pipe": 4, "schedule": "2bw"},
    {"pipe": 2, "schedule": "gpipe"},
    {"pipe": 3, "schedule": "axonn", "x": 2},
    {"pipe": 2, "schedule": "interleaved"},
]


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
@pytest.mark.parametrize("share", [0.9, 0.7, 0.5, 0.35])
def test_the_budget_is_kept_and_used(parallel: dict[str, Any], share: float) -> None:
    plain = run_file(parallel=parallel)
    most = max(needs(plain, resolve(plain)))
    run = run_file(share * most, parallel=parallel)
    plan = decided(run)
    assert plan.recompute == "blocks" and plan.activation_mib == 0
    assert max(needs(run, plan)) <= share * most
    again = sum(len(span) for span in plan.recompute_spans())
    assert again < expected_shape(run).num_blocks or share < 0.5, "not all without need"


def test_nothing_is_computed_again_without_need() -> None:
    plain = run_file(parallel={"pipe": 2})
    most = max(needs(plain, resolve(plain)))
    plan = decided(run_file(most + 1, parallel={"pipe": 2}))
    assert (plan.recompute, plan.recompute_blocks) == ("none", ())
    assert len(plan.stage_boundaries) == 1, "the cut it was decided for"
    assert decide_activations(plain, resolve(plain)) == resolve(plain)


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_the_smallest_budget_is_told_and_is_enough(parallel: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"memory.activation_mib = 0.01 is too little") as error:
        decided(run_file(0.01, parallel=parallel))
    found = re.search(r"set it to ([0-9.]+) or more", str(error.value))
    assert found is not None
    smallest = float(found[1])
    run = run_file(smallest, parallel=parallel)
    assert max(needs(run, decided(run))) <= smallest
    with pytest.raises(ConfigError, match=f"set it to {smallest:g} or more"):
        decided(run_file(smallest - 0.02, parallel=parallel))


def test_the_decision_is_the_same_every_time() -> None:
    run = run_file(40, parallel={"pipe": 2})
    assert decided(run) == decided(run)
    assert Plan.from_json(decided(run).to_json()) == decided(run)


def test_a_cut_that_is_given_stays() -> None:
    run = run_file(40, parallel={"pipe": 2, "stage_boundaries": [5]})
    assert decided(run).stage_boundaries == (5,)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"model": {"build": "mine:build"}}, "model.build is code of your own"),
        ({"data": {"kind": "dataset"}}, 'data.kind = "dataset" is code of your own'),
    ],
)
def test_code_of_ones_own_is_refused_by_name(more: dict[str, Any], text: str) -> None:
    run = run_file(40, **more)
    with pytest.raises(ConfigError, match=rf'memory.recompute = "budget".*{text}.*"sqrt"'):
        decide_activations(run, Plan(recompute="budget", activation_mib=40.0))


@pytest.mark.parametrize(
    ("memory", "text"),
    [
        ({"recompute": "budget"}, r"memory.activation_mib = 0.0: set it"),
        ({"activation_mib": 5}, "memory.activation_mib = 5.0 is for memory.recompute = 'budget'"),
        ({"recompute": "sqrt", "recompute_every": 2}, "memory.recompute_every = 2 is for"),
        ({"recompute": "blocks", "recompute_blocks": ["x"]}, "memory.recompute_blocks has 'x'"),
        ({"offload_activations": "tape"}, "memory.offload_activations = 'tape' cannot be used"),
    ],
)
def test_keys_that_contradict_each_other(memory: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        resolve(load_run_file({**GPT, "memory": memory}))


# --- against all choices of single blocks --------------------------------------------------------

BLOCKS = st.lists(
    st.tuples(st.integers(8, 50), st.integers(1, 5), st.booleans()), min_size=1, max_size=6
)


def rank_of(numbers: list[tuple[int, int, bool]], alive: int) -> RankBlocks:
    blocks = [
        BlockActivations(input_bytes=4, output_bytes=4, kept_bytes=kept, keeps_input=keeps)
        for kept, _, keeps in numbers
    ]
    stage = StageBlocks(blocks=blocks)
    costs = [[float(cost) for _, cost, _ in numbers]]
    return RankBlocks(stages=[stage], costs=costs, alive=[(alive,)])


@settings(max_examples=examples(60))
@given(BLOCKS, st.integers(1, 4), st.floats(0.2, 1.0))
def test_never_far_from_the_best(
    numbers: list[tuple[int, int, bool]], alive: int, share: float
) -> None:
    """Whenever some set of blocks fits, one is found; it costs at most one block more, or so."""
    rank = rank_of(numbers, alive)

    def bytes_of(chosen: tuple[int, ...]) -> int:
        stage = replace(rank.stages[0], segments=[range(n, n + 1) for n in chosen])
        held = activation_memory([stage], rank.alive)
        return held.activations + held.recomputed

    budget = share * bytes_of(())
    found = choose_recomputed(rank, budget)
    places = range(len(numbers))
    sets = chain.from_iterable(combinations(places, size) for size in range(len(numbers) + 1))
    fitting = [one for one in sets if bytes_of(one) <= budget]
    if found.num_bytes > budget:
        assert not fitting
        return
    chosen = tuple(n for span in found.segments[0] for n in span)
    if all(len(span) == 1 for span in found.segments[0]):
        assert bytes_of(chosen) == found.num_bytes
        best = min(sum(numbers[n][1] for n in one) for one in fitting)
        assert found.cost <= 2 * best + max(cost for _, cost, _ in numbers)


def test_a_large_block_is_left_alone_if_small_ones_suffice() -> None:
    """It frees most for each flop, but needs as much again while it is computed again."""
    rank = rank_of([(600, 5, True), *[(100, 1, True)] * 10], alive=1)
    plain = choose_recomputed(rank, 10**6)
    assert plain.cost == 0
    found = choose_recomputed(rank, plain.num_bytes - 50)
    assert found.cost == 1  # in the place of what later blocks freed
    assert 0 not in [number for span in found.segments[0] for number in span]
