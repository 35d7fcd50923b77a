"""Schedules of the user's own and options of a plan: known by name, checked before a launch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ganglion.decide.config import load_run_file, resolve
from ganglion.decide.costs import (
    ComputeClock,
    StageTimes,
    find_cluster,
    model_work,
    parse_cluster,
    stage_times,
)
from ganglion.decide.plan import Plan
from ganglion.decide.schedules.pipeline import (
    BUILT_IN,
    SCHEDULES,
    RankSchedule,
    ScheduleOptions,
    check_planned,
    check_rehearsal,
    make_schedule,
    planned_options,
    planned_schedule,
    planned_stage_map,
)
from ganglion.decide.schedules.pipeline.laws import LawBroken
from ganglion.decide.schedules.pipeline.listed import GPipe, OneFOneB
from ganglion.decide.shapes import MLPShape
from ganglion.decide.simulator import simulate, simulate_plan, with_known_costs
from ganglion.errors import ConfigError, GanglionError, LayoutError

MODULE = '''
from ganglion.decide.schedules.pipeline import ListedSchedule, StageMap, StageSchedule

class Fine(ListedSchedule):
    """GPipe, written by a user; `chunks` is an option of its own."""

    def __init__(self, rank, num_ranks, *, chunks=1):
        super().__init__(rank, StageMap(num_ranks, chunks))

    def _list(self, m):
        stages = self.stage_map.stages_of(self.rank)
        forwards = [("F", s, k) for s in stages for k in range(m)]
        return forwards + [("B", s, k) for s in reversed(stages) for k in range(m)]

    live_bound = None

def fine(rank, num_ranks):
    return Fine(rank, num_ranks)

class Waits(Fine):
    """The last stage wants to go back before it went forward."""

    def _list(self, m):
        order = super()._list(m)
        return order[::-1] if self.rank == self.stage_map.num_ranks - 1 else order

class Forgets(Fine):
    def _list(self, m):
        return super()._list(m)[:-1]

class Greedy(Fine):
    live_bound = 2

class Repeats(Fine):
    """Never ends: it begins the same forward over and over."""

    def _choose(self):
        return None if self.rank else self._order[0]

    def begin(self, chosen):
        self._busy.add(chosen.lane)

class Fails(Fine):
    def _list(self, m):
        return [("F", self.rank, {}["no"])]

class Lonely(Fine):
    def __init__(self):
        pass

def nothing(rank, num_ranks):
    return 42

number = 42
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with modules of a user, from which the commands are run."""
    (tmp_path / "mine_of_test.py").write_text(MODULE)
    (tmp_path / "broken_of_test.py").write_text("def wrong(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine_of_test", raising=False)
    return tmp_path


# --- registries ------------------------------------------------------------------------------


def test_register_returns_a_larger_registry() -> None:
    larger = BUILT_IN.register("mine", GPipe, aliases=("my", "own"))
    assert larger.canonical("own") == larger.canonical("mine") == "mine"
    assert isinstance(larger.make("my", 1, 2), GPipe)
    assert larger.canonical("1f1b") == "one_f_one_b"
    assert list(BUILT_IN.makers) == list(SCHEDULES)
    with pytest.raises(ConfigError, match="'mine' is not a schedule"):
        BUILT_IN.canonical("mine")


@pytest.mark.parametrize(
    ("word", "text"),
    [("gpipe", "is taken"), ("2bw", "is taken"), ("a:b", "not a word"), ("Mine", "not a word")],
)
def test_names_that_cannot_be_registered(word: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        BUILT_IN.register(word, GPipe)
    with pytest.raises(ConfigError, match=text):
        BUILT_IN.register("mine", GPipe, aliases=(word,))


def test_a_schedule_gets_the_options_it_names() -> None:
    found: list[tuple[int, str]] = []

    def make(rank: int, num_ranks: int, *, limit: int = 3, priority: str = "") -> RankSchedule:
        found.append((limit, priority))
        return OneFOneB(rank, num_ranks)

    mine = BUILT_IN.register("mine", make)
    assert mine.options_of("mine") == ("limit", "priority")
    mine.make("mine", 0, 2)
    mine.make("mine", 0, 2, ScheduleOptions(limit=7, priority="x"))
    assert found == [(3, ""), (7, "x")]
    with pytest.raises(ConfigError, match="mine has no chunks"):
        mine.make("mine", 0, 2, ScheduleOptions(chunks=2))


def test_the_options_of_every_schedule() -> None:
    options = {name: BUILT_IN.options_of(name) for name in SCHEDULES}
    assert {name: known for name, known in options.items() if known} == {
        "interleaved": ("chunks",),
        "message_driven": ("limit", "priority"),
        "two_bw": ("extra",),
    }


# --- references ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mine_of_test:Fine", "mine_of_test:fine"])
def test_a_reference_is_imported(folder: Path, name: str) -> None:
    plan = Plan(pipe=3, num_microbatches=4, schedule=name)
    check_planned(plan)
    times = [StageTimes(forward_s=1, backward_s=1, weight_s=1)] * 3
    mine = simulate(lambda rank: make_schedule(name, rank, 3), times, [4])
    gpipe = simulate(lambda rank: make_schedule("gpipe", rank, 3), times, [4])
    assert [mine.order(rank) for rank in range(3)] == [gpipe.order(rank) for rank in range(3)]


def test_a_run_file_and_a_plan_file_name_it(folder: Path) -> None:
    tables = {
        "parallel": {"pipe": 2, "schedule": "mine_of_test:Fine", "chunks": 2},
        "model": {"layers": 2},
    }
    plan = resolve(load_run_file(tables), 2)
    assert (plan.schedule, plan.chunks) == ("mine_of_test:Fine", 2)
    assert Plan.from_json(plan.to_json()) == plan
    assert planned_stage_map(plan).num_stages == 4


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("eager", "parallel.schedule = 'eager' is not a schedule"),
        ("mine_of_test:", 'is not of the form "package.module:function"'),
        ("no_module_of_test:Fine", "there is no module 'no_module_of_test'"),
        ("broken_of_test:wrong", "module 'broken_of_test' does not load: invalid syntax"),
        ("mine_of_test:Missing", "has nothing named 'Missing'"),
        ("mine_of_test:number", "'number' is of type int and cannot be called"),
        ("mine_of_test:nothing", "made a int, not a schedule: derive a class from"),
        ("mine_of_test:Lonely", r"is called as \(rank, num_ranks\), but takes \(\)"),
        ("mine_of_test:Waits", r"breaks a law of schedules with 3 ranks and 4 .* never ran"),
        ("mine_of_test:Forgets", "breaks a law .* never ran"),
        ("mine_of_test:Greedy", "breaks a law .* rank 0: 4 live > 2"),
        ("mine_of_test:Repeats", "breaks a law .* 0F0 ran twice"),
        ("mine_of_test:Fails", "failed with 3 ranks and 4 microbatches: KeyError: 'no'"),
    ],
)
def test_what_is_no_schedule_is_refused_in_one_line(folder: Path, name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as refused:
        check_planned(Plan(pipe=3, num_microbatches=4, schedule=name))
    assert "\n" not in str(refused.value)
    assert name in str(refused.value)


def test_registered_schedules_are_rehearsed_too() -> None:
    class Greedy(GPipe):
        live_bound = 1

    mine = BUILT_IN.register("greedy", Greedy)
    with pytest.raises(ConfigError, match=r"schedule = 'greedy' breaks a law"):
        check_planned(Plan(pipe=2, num_microbatches=2, schedule="greedy"), mine)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_passes_its_rehearsal(name: str) -> None:
    for num_ranks in range(1, 5):
        for m in (num_ranks, num_ranks + 3):
            make: Callable[[int], RankSchedule] = lambda rank: make_schedule(name, rank, num_ranks)  # noqa: B023, E731
            check_rehearsal(make, num_ranks, (m, m, m))


def test_a_rehearsal_finds_a_deadlock() -> None:
    class Backwards(GPipe):
        def _list(self, num_microbatches: int) -> list[tuple[str, int, int]]:
            return super()._list(num_microbatches)[::-1]

    with pytest.raises(LawBroken, match="never ran"):
        check_rehearsal(lambda rank: Backwards(rank, 2), 2, (2,))


# --- options of a plan -----------------------------------------------------------------------


def test_old_plan_files_load() -> None:
    record = json.loads(Plan(pipe=2).to_json())
    for field in ("limit", "extra", "chunks", "priority"):
        del record[field]
    assert Plan.from_json(json.dumps(record)) == Plan(pipe=2)


def test_options_reach_the_schedule() -> None:
    plan = Plan(pipe=4, num_microbatches=9)
    assert planned_stage_map(replace(plan, schedule="interleaved")).num_chunks == 2
    assert planned_stage_map(replace(plan, schedule="interleaved", chunks=3)).num_chunks == 3
    assert planned_schedule(replace(plan, schedule="2bw"), 1).live_bound == 3
    assert planned_schedule(replace(plan, schedule="2bw", extra=2), 1).live_bound == 5
    driven = replace(plan, schedule="axonn", limit=5, priority="arrival")
    assert planned_options(driven) == ScheduleOptions(limit=5, priority="arrival")
    assert planned_schedule(driven, 1).live_bound == 5


def test_a_limit_left_open() -> None:
    """Two a stage where no cost is known, at most the batch; else what the cost model says."""
    plan = Plan(pipe=4, num_microbatches=16, schedule="message_driven")
    assert planned_options(plan).limit == 8
    assert planned_options(replace(plan, num_microbatches=6)).limit == 6
    assert planned_schedule(plan, 0).live_bound == 8
    times = [StageTimes(forward_s=1, backward_s=2, latency_s=0.0)] * 4
    assert with_known_costs(plan, times).limit == 4
    slow = [replace(one, latency_s=3.0) for one in times]
    assert with_known_costs(plan, slow).limit > 8
    assert with_known_costs(replace(plan, limit=3), slow).limit == 3
    assert with_known_costs(Plan(pipe=4), slow) == Plan(pipe=4)


def test_the_open_limit_mends_the_papers() -> None:
    """Spec axonn A.9, item 9: 70.5 with the number of stages as the limit, 58.5 with twice it."""
    plan = Plan(pipe=4, num_microbatches=16, schedule="message_driven")
    times = [StageTimes(forward_s=1, backward_s=2, latency_s=0.25)] * 4
    result = simulate(lambda rank: planned_schedule(plan, rank), times, [16])
    assert result.makespan_s == 58.5
    paper = replace(plan, limit=4)
    assert simulate(lambda rank: planned_schedule(paper, rank), times, [16]).makespan_s == 70.5


def test_simulated_plans_use_their_options() -> None:
    machine = parse_cluster(
        "num_nodes = 1\nranks_per_node = 4\n[links.intra]\nlatency_s = 0.25\nbandwidth_gbps = 1e9\n"
        "[stages]\nforward_s = 1.0\nbackward_s = 2.0\n",
        "test.toml",
    )
    times = [StageTimes(forward_s=1, backward_s=2, latency_s=0.25)] * 4
    plan = Plan(pipe=4, num_microbatches=16, schedule="axonn", limit=4)
    found = simulate_plan(plan, times, machine, num_steps=1)
    assert found.simulation.makespan_s == pytest.approx(70.5)
    assert found.options.limit == 4
    chosen = simulate_plan(replace(plan, limit=0), times, machine, num_steps=1)
    assert chosen.simulation.makespan_s < 70.5
    three = Plan(pipe=4, num_microbatches=16, schedule="interleaved", chunks=3)
    rows = simulate_plan(three, times, machine, num_steps=1).simulation.rows
    assert max(action.stage for action, *_ in rows) == 11


@pytest.mark.parametrize(
    ("tables", "kind", "text"),
    [
        (
            {"chunks": 2},
            ConfigError,
            "parallel.chunks = 2 means nothing to parallel.schedule = 'one_f_one_b', which has no "
            "options: remove parallel.chunks",
        ),
        (
            {"schedule": "2bw", "limit": 4},
            ConfigError,
            "parallel.limit = 4 means nothing .* 'two_bw', which has only extra",
        ),
        (
            {"schedule": "1f1b", "priority": "forward"},
            ConfigError,
            "parallel.priority = 'forward' means nothing",
        ),
        (
            {"schedule": "2bw", "extra": 3, "pipe": 2},
            LayoutError,
            r"parallel.schedule = 'two_bw', parallel.pipe = 2, parallel.extra = 3: two_bw needs at "
            r"least stages \+ extra = 2 \+ 3 = 5 microbatches a batch, not 4",
        ),
        ({"schedule": "axonn", "priority": "none"}, ConfigError, "priority 'none' is not one of"),
        ({"limit": -1}, ConfigError, "parallel.limit = -1 cannot be used"),
        (
            {"schedule": "interleaved", "pipe": 2, "stage_boundaries": [2]},
            LayoutError,
            "parallel.stage_boundaries has 1 cuts, but 2 ranks with 2 stages each need 3",
        ),
        (
            {"pipe": 2, "stage_boundaries": [1, 2, 3]},
            LayoutError,
            "has 3 cuts, but 2 ranks with 1 stages each need 1",
        ),
        (
            {"schedule": "interleaved", "pipe": 2, "chunks": 4},
            LayoutError,
            r"makes 8 stages \(4 a rank under interleaved\), but the model has 6 blocks",
        ),
    ],
)
def test_options_that_do_not_fit(
    tables: dict[str, object], kind: type[GanglionError], text: str
) -> None:
    with pytest.raises(kind, match=text):
        resolve(load_run_file({"parallel": tables, "model": {"layers": 2}}))


def test_cuts_of_several_chunks_are_taken() -> None:
    tables = {"schedule": "zbv", "pipe": 2, "stage_boundaries": [1, 2, 5]}
    plan = resolve(load_run_file({"parallel": tables, "model": {"layers": 2}}))
    assert plan.stage_boundaries == (1, 2, 5)


def test_the_times_of_several_chunks_add_up_by_rank() -> None:
    """Rank 0 of a V holds the first stage and the last, and sends what the first one makes."""
    plan = Plan(pipe=2, schedule="zero_bubble_v", num_microbatches=2, stage_boundaries=(1, 2, 3))
    machine = find_cluster("laptop")
    blocks = model_work(MLPShape(num_inputs=8, num_outputs=3, num_layers=4, hidden=16), plan)
    stage_map = planned_stage_map(plan)
    held = [stage_map.stages_of(rank) for rank in range(2)]
    first, second = stage_times(blocks, plan, machine, held)
    clock = ComputeClock(plan, machine.require_compute())
    forward_s = [clock.block(block).forward_s for block in blocks]
    action_s = machine.require_compute().action_s
    assert first.forward_s == pytest.approx(forward_s[0] + forward_s[3] + action_s)
    assert second.forward_s == pytest.approx(forward_s[1] + forward_s[2] + action_s)
    assert first.message_bytes == second.message_bytes == 16 * 4
