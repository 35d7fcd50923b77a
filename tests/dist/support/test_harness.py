"""The harness itself: failures, skips and overruns of ranks reach the test, and nothing hangs."""

from __future__ import annotations

import os
import time

import pytest
import torch

from ganglion.execute.comm import World
from tests.support.harness import RankFailed, Ranks


def pid_and_sum(world: World) -> tuple[int, float]:
    tensor = torch.tensor([float(world.rank)])
    world.group("data").all_reduce(tensor).wait()
    return os.getpid(), tensor.item()


def fail_on_last(world: World) -> None:
    if world.rank == world.num_ranks - 1:
        raise ValueError("broken on purpose")


def skip_everywhere(world: World) -> None:
    pytest.skip("not possible here")


def sleep_on_first(world: World) -> None:
    if world.rank == 0:
        time.sleep(60)


def die_on_first(world: World) -> None:
    if world.rank == 0:
        os._exit(7)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_talk_and_every_call_has_its_own(ranks: Ranks, num_ranks: int) -> None:
    first = ranks.run(num_ranks, pid_and_sum)
    second = ranks.run(num_ranks, pid_and_sum)
    assert [value for _, value in first] == [sum(range(num_ranks))] * num_ranks
    assert len({pid for pid, _ in first + second}) == 2 * num_ranks


def test_a_childs_traceback_is_raised() -> None:
    with pytest.raises(
        RankFailed, match=r"rank 1:\n(.|\n)*in fail_on_last(.|\n)*broken on purpose"
    ):
        Ranks().run(2, fail_on_last)


def test_a_childs_skip_is_the_tests_skip(ranks: Ranks) -> None:
    with pytest.raises(pytest.skip.Exception, match="not possible here"):
        ranks.run(2, skip_everywhere)


def test_an_overrun_dumps_the_stack() -> None:
    with pytest.raises(RankFailed, match=r"ranks \[0\] did not answer(.|\n)*in sleep_on_first"):
        Ranks().run(2, sleep_on_first, deadline_s=1.0)


def test_a_dead_child_is_noticed() -> None:
    with pytest.raises(RankFailed, match="the process died, exit code 7"):
        Ranks().run(2, die_on_first)
