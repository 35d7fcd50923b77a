"""Pipelines over real processes whose ranks fail or die: everybody hears of it within seconds."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ganglion import RunSettings, parallelize
from ganglion.errors import GanglionError
from ganglion.execute.comm import World, torch_world
from ganglion.execute.models import cross_entropy
from tests.single.pipeline.test_pipeline_faults import broken_parts
from tests.support.command import TINY, ganglion
from tests.support.harness import RankFailed, Ranks
from tests.support.pipelines import CASE, plan_for
from tests.support.training import OPTIMIZERS, make_batches, share_of

LONG = dataclasses.replace(CASE, num_steps=200, global_batch_size=8)
# Far longer than a test may take: whoever is told by the deadline only is told too late.
DEADLINE_S = 120.0


def ending(world: World, schedule: str, transport: str, parts: dict[str, Any]) -> str:
    """Train on pipe=2 x data=2 until it fails, and return how."""
    plan = plan_for(LONG, schedule, 2, 2, 2, stage_boundaries=(2,))
    own = torch_world(world.rank, plan.mesh(), timeout_s=DEADLINE_S, transport=transport)
    whole = {"loss_fn": cross_entropy, "optimizer_factory": OPTIMIZERS["sgd"], **parts}
    settings = RunSettings(timeout_s=DEADLINE_S)
    try:
        with parallelize(**whole, plan=plan, settings=settings, world=own) as run:
            for _ in run.steps(share_of(batch, own, plan) for batch in make_batches(LONG)):
                pass
    except GanglionError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing happened"


def fail_at(world: World, schedule: str, transport: str, what: str) -> str:
    parts = broken_parts("nothing") | {"loss_fn": cross_entropy}
    return ending(world, schedule, transport, broken_parts(what) if world.rank == 3 else parts)


@pytest.mark.parametrize(
    ("schedule", "transport", "what", "text"),
    [
        ("one_f_one_b", "shm", "forward", "forward of stage 1, microbatch 1 failed on rank 3"),
        ("one_f_one_b", "shm", "update", "update of stage 1, batch 1 failed on rank 3"),
        ("two_bw", "shm", "backward", "backward of stage 1, microbatch 1 failed on rank 3"),
        ("two_bw", "torch", "loss", "forward of stage 1, microbatch 0 failed on rank 3"),
    ],
)
def test_a_failing_action_is_named_on_every_rank(
    ranks: Ranks, schedule: str, transport: str, what: str, text: str
) -> None:
    for found in ranks.run(4, fail_at, schedule, transport, what, deadline_s=30.0):
        assert found.startswith("PipelineError: ")
        assert text in found
        assert "ValueError: broken on purpose" in found


def die_at_third(world: World, schedule: str, transport: str, folder: str) -> None:
    """Rank 3 is killed in its third batch; the others write down what they saw."""
    parts = broken_parts("nothing") | {"loss_fn": cross_entropy}
    if world.rank == 3:
        parts["blocks"][3].register_forward_hook(_killer(2 * 2 + 1))
    found = ending(world, schedule, transport, parts)
    (Path(folder) / f"rank{world.rank}").write_text(found)


def _killer(num_forwards: int) -> Any:
    seen = []

    def hook(*_: Any) -> None:
        seen.append(1)
        if len(seen) == num_forwards:
            os.kill(os.getpid(), signal.SIGKILL)

    return hook


def test_a_killed_rank_is_named_by_all_others(ranks: Ranks, tmp_path: Path) -> None:
    """A pool gives the others five seconds after the death: who writes nothing was too slow."""
    with pytest.raises(RankFailed, match="the process died"):
        ranks.run(4, die_at_third, "two_bw", "shm", str(tmp_path), deadline_s=30.0)
    for rank in range(3):
        found = (tmp_path / f"rank{rank}").read_text()
        assert found.startswith("PeerLost: ")
        assert "rank 3" in found


def test_the_command_shows_the_traceback_of_the_rank_that_failed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "class Bad(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        raise ValueError('broken on purpose')\n"
        "def build(width):\n"
        "    return [nn.Flatten(), nn.Linear(784, width), Bad(width, 10)]\n"
    )
    result = ganglion(
        *("train", *TINY, "--nproc", "2", "--parallel.pipe", "2", "--train.steps", "3"),
        *("--model.build", "mine:build", "--model.args.width", "16", "--data.kind", "images"),
        *("--parallel.stage_boundaries", "[2]", "--output.dir", "run"),
        cwd=tmp_path,
    )
    assert result.returncode == 1
    assert "error: rank 1 failed: PipelineError: forward of stage 1, microbatch 0" in result.stderr
    assert "ValueError: broken on purpose" in result.stderr
    assert "mine.py" in result.stderr
