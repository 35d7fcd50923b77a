"""Evaluation, outputs and generation on pipelines: the engine's loop with forwards only."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from ganglion import Plan
from ganglion.decide.schedules.pipeline import SCHEDULES, ForwardOnly, StageMap
from ganglion.decide.schedules.pipeline.action import FORWARD, Message
from ganglion.errors import ProtocolError
from ganglion.execute.comm import Arrival, Header, World, run_threads
from ganglion.execute.models import generate
from ganglion.execute.pipeline.engine.ledger import ForwardOnlyInputs
from tests.support.training import Case, make_batches, make_model, make_run, share_of

CASE = Case(model="gpt", optimizer="sgd", num_steps=2)
SAMPLES = TensorDataset(*(torch.cat(part) for part in zip(*make_batches(CASE), strict=True)))


def plan_of(schedule: str, data: int = 1) -> Plan:
    return Plan(pipe=2, data=data, schedule=schedule, microbatch_size=2, num_microbatches=4 // data)


def _losses(world: World, plan: Plan) -> list[float]:
    """Evaluate before, between and after training steps: nothing may get mixed up."""
    run = make_run(world, plan, CASE)
    found = [run.evaluate(SAMPLES, 2), run.evaluate(SAMPLES, 1)]
    for batch in make_batches(CASE):
        list(run.steps([share_of(batch, world, plan)]))
        found.append(run.evaluate(SAMPLES, 2))
    return found


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_held_out_losses_equal_those_of_the_whole_model(schedule: str, data: int) -> None:
    plan = plan_of(schedule, data)
    whole = Plan(data=1, schedule=_flushing(schedule), microbatch_size=2, num_microbatches=4)
    expected = run_threads(whole.mesh(), partial(_losses, plan=whole))[0]
    for losses in run_threads(plan.mesh(), partial(_losses, plan=plan)):
        torch.testing.assert_close(losses[:2], expected[:2], rtol=1e-12, atol=1e-12)
        if _flushing(schedule) == schedule:
            torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-9)


def _flushing(schedule: str) -> str:
    """Return a schedule whose updates a whole model repeats."""
    return "gpipe" if schedule in ("two_bw", "stash") else schedule


def _outputs(world: World, plan: Plan) -> tuple[Tensor, Tensor]:
    run = make_run(world, plan, CASE)
    inputs = make_batches(CASE)[0][0]
    written = generate(run.outputs, inputs[:1, :3], 6, seq_len=8, temperature=0)
    return run.outputs(inputs), written


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_rank_gets_the_outputs_and_writes_the_same_text(schedule: str) -> None:
    plan, model = plan_of(schedule), make_model(CASE)
    inputs = make_batches(CASE)[0][0]
    with torch.no_grad():
        expected = model(inputs)
    written = generate(model, inputs[:1, :3], 6, seq_len=8, temperature=0)
    for outputs, tokens in run_threads(plan.mesh(), partial(_outputs, plan=plan)):
        torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)
        assert tokens.tolist() == written.tolist()


def _broken(world: World, plan: Plan) -> str:
    run = make_run(world, plan, CASE)
    list(run.steps([share_of(make_batches(CASE)[0], world, plan)]))
    bad = TensorDataset(SAMPLES.tensors[0], torch.full_like(SAMPLES.tensors[1], 999))
    with pytest.raises(Exception, match="failed on rank 1") as raised:
        run.evaluate(bad, 1)
    return str(raised.value)


def test_what_fails_in_an_evaluation_reaches_every_rank() -> None:
    plan = plan_of("one_f_one_b")
    for said in run_threads(plan.mesh(), partial(_broken, plan=plan)):
        assert "forward of stage 1, microbatch 0 failed on rank 1" in said


def test_forwards_take_what_is_theirs_and_the_last_stage_first() -> None:
    schedule = ForwardOnly(0, StageMap(2, 2), range(4, 6))  # stages 0 and 2 of four
    first = schedule.next()
    assert str(first) == "0F4" and schedule.next() is None
    schedule.on_arrival(Message(FORWARD, 2, 4, 0))
    schedule.on_arrival(Message(FORWARD, 2, 6, 0))  # of a later run
    assert first is not None
    schedule.on_finish(first)
    order = []
    while (action := schedule.next()) is not None:
        order.append(str(action))
        schedule.on_finish(action)
    assert order == ["2F4", "0F5"] and not schedule.done
    schedule.on_arrival(Message(FORWARD, 2, 5, 0))
    last = schedule.next()
    assert last is not None and str(last) == "2F5"
    schedule.on_finish(last)
    assert schedule.done


def _arrival(microbatch: int) -> Arrival:
    header = Header("predict", -1, 1, microbatch, -1, torch.Size([1]), torch.float32, 7)
    return Arrival(0, header, torch.full((1,), float(microbatch)))


def test_activations_that_come_twice_are_refused_also_when_their_run_is_over() -> None:
    predictions, schedule = ForwardOnlyInputs(), ForwardOnly(1, StageMap(2), range(2))
    predictions.take(_arrival(0))
    with pytest.raises(ProtocolError, match=r"rank 0 sent .* which has come before"):
        predictions.take(_arrival(0))
    predictions.begin(schedule)  # announces what came before it
    first = schedule.next()
    assert first is not None and float(predictions.pop(first)) == 0.0
    predictions.end(range(2))
    predictions.take(_arrival(2))  # of the next run
    with pytest.raises(ProtocolError, match="which has come before"):
        predictions.take(_arrival(1))
