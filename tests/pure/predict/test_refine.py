"""A wrong cluster file comes near the truth by the trace of a run, here a simulated one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ganglion import Plan
from ganglion.decide.config import RunFile, expected_shape, load_run_file
from ganglion.decide.costs import Cluster, Compute, Link
from ganglion.decide.predict import StepSetting, model_times, predict_step, refine, scaled_compute
from ganglion.errors import ConfigError, DataError
from ganglion.trace import Event, event_to_json

TRUTH = Cluster(
    source="truth",
    name="truth",
    num_nodes=1,
    ranks_per_node=4,
    compute=Compute(
        fp32_tflops=0.1,
        bf16_tflops=0.2,
        efficiency=0.8,
        memory_gib=4.0,
        memory_bandwidth_gbps=80.0,
        activation_gbps=50.0,
        update_gbps=100.0,
        block_s=5e-5,
        update_s=1e-3,
    ),
    intra=Link(
        latency_s=2e-3, bandwidth_gbps=100.0, collective_gbps=5.0, collective_latency_s=1e-4
    ),
)
WRONG = replace(
    scaled_compute(TRUTH, 2.5),
    intra=Link(latency_s=1e-2, bandwidth_gbps=2.0, collective_gbps=20.0, collective_latency_s=1e-4),
)


def run_file(**parallel: object) -> RunFile:
    return load_run_file(
        {
            "model": {"layers": 4, "hidden": 128, "heads": 4, "vocab_size": 256},
            "data": {"kind": "synthetic", "seq_len": 64},
            "parallel": parallel,
        },
        (),
        "run.toml",
    )


def plan_of(**fields: object) -> Plan:
    return Plan(microbatch_size=2, num_microbatches=4, **fields)  # type: ignore[arg-type]


def write_trace(folder: Path, events: Sequence[Event]) -> None:
    (folder / "trace").mkdir(parents=True)
    for rank in {event.rank for event in events}:
        lines = [event_to_json(event) + "\n" for event in events if event.rank == rank]
        (folder / "trace" / f"rank{rank}.jsonl").write_text("".join(lines))


def trained(folder: Path, plan: Plan, num_steps: int = 12) -> Path:
    """Write the trace that a run of the plan leaves on the true machine."""
    times = model_times(expected_shape(run_file()), plan, TRUTH)
    _, events = predict_step(plan, times, TRUTH, StepSetting(num_steps=num_steps))
    write_trace(folder, sorted(events, key=lambda event: event.start_s))
    return folder


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(pipe=2),
        plan_of(pipe=4, schedule="two_bw"),
        plan_of(data=2),
        plan_of(data=2, pipe=2, schedule="message_driven", limit=4),
    ],
    ids=["pipe", "two_bw", "data", "both"],
)
def test_the_prediction_of_the_run_gets_better(tmp_path: Path, plan: Plan) -> None:
    found = refine(trained(tmp_path, plan), run_file(), plan, WRONG)
    assert abs(found.error_before) > 0.5
    assert abs(found.error_after) < 0.03
    (compute, *_) = found.changes
    assert compute.group == "computation"
    assert compute.factor == pytest.approx(1 / 2.5, rel=0.01)
    refined, truth = found.cluster.require_compute(), TRUTH.require_compute()
    assert refined.flops("fp32") == pytest.approx(truth.flops("fp32"), rel=0.01)
    assert refined.activation_gbps == pytest.approx(truth.activation_gbps, rel=0.01)


def test_messages_move_the_link_alone(tmp_path: Path) -> None:
    plan = plan_of(pipe=2)
    base = replace(TRUTH, intra=WRONG.intra)
    found = refine(trained(tmp_path, plan), run_file(), plan, base)
    assert [one.group for one in found.changes] == ["messages"]
    assert found.cluster.compute == TRUTH.compute
    assert found.cluster.intra is not None and base.intra is not None
    assert found.cluster.intra.latency_s < 0.3 * base.intra.latency_s
    assert found.cluster.intra.collective_gbps == base.intra.collective_gbps


def test_a_file_that_is_right_stays(tmp_path: Path) -> None:
    plan = plan_of(pipe=2)
    found = refine(trained(tmp_path, plan), run_file(), plan, TRUTH)
    assert found.changes == [] and found.cluster == TRUTH
    assert found.error_before == found.error_after


def test_a_share_above_the_peak_raises_the_peak() -> None:
    faster = scaled_compute(TRUTH, 0.5).require_compute()
    assert faster.efficiency == 1.0
    assert faster.flops("fp32") == pytest.approx(2 * 0.8e11)
    assert faster.memory_bandwidth_gbps == 160.0
    assert faster.update_gbps == 100.0  # an update is another group


def test_too_few_steps_are_refused(tmp_path: Path) -> None:
    plan = plan_of(pipe=2)
    with pytest.raises(DataError, match="2 steps are too few"):
        refine(trained(tmp_path, plan, num_steps=2), run_file(), plan, WRONG)


@pytest.mark.parametrize(
    ("plan", "cluster", "said"),
    [
        (plan_of(x=2), WRONG, r"the run has x 2, y 1, z 1, whose waits .* data and pipe alone"),
        (plan_of(data=2, averaging="sync_easgd"), WRONG, "the run has sync_easgd"),
    ],
)
def test_what_says_nothing_about_rates_is_refused(
    tmp_path: Path, plan: Plan, cluster: Cluster, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        refine(tmp_path, run_file(), plan, cluster)
