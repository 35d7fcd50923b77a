"""A resumed pipeline is cut where the saved one was, unless the plan says otherwise."""

from __future__ import annotations

from pathlib import Path

import torch

from ganglion.decide.plan import Plan
from ganglion.decide.topology import Launch
from ganglion.execute.checkpoint import SavedState, save
from ganglion.execute.comm import World, open_world
from ganglion.execute.train.saved import with_saved_cut

SAVED = Plan(pipe=2, schedule="two_bw", num_microbatches=4, stage_boundaries=(3,))
OPEN = Plan(pipe=2, schedule="two_bw", num_microbatches=4)


def _saved(folder: Path) -> World:
    world = open_world(Launch(), Plan().mesh())
    state = SavedState(step=1, plan=SAVED, optimizer={}, extra={})
    save(folder, {"model.weight": torch.zeros(2)}, state, world, process_group=None, keep=1)
    return world


def test_the_saved_cut_is_taken(tmp_path: Path) -> None:
    assert with_saved_cut(OPEN, tmp_path, _saved(tmp_path)) == SAVED


def test_what_the_plan_says_goes_first(tmp_path: Path) -> None:
    asked = Plan(pipe=2, schedule="two_bw", num_microbatches=4, stage_boundaries=(1,))
    assert with_saved_cut(asked, tmp_path, _saved(tmp_path)) == asked


def test_the_cut_of_another_layout_is_of_no_use(tmp_path: Path) -> None:
    other = Plan(pipe=3, schedule="two_bw", num_microbatches=4)
    assert with_saved_cut(other, tmp_path, _saved(tmp_path)) == other


def test_a_damaged_checkpoint_is_left_for_the_load_to_report(tmp_path: Path) -> None:
    world = _saved(tmp_path)
    next(tmp_path.rglob("state.json")).write_text("{")
    assert with_saved_cut(OPEN, tmp_path, world) == OPEN
