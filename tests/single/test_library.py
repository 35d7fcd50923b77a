"""The library: a few names, pinned; a run that trains, evaluates, saves and says what is wrong."""

from __future__ import annotations

import inspect
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import ganglion
from ganglion.errors import CheckpointError, ConfigError, DataError, LayoutError
from tests.support.command import environment


def make_run(plan: ganglion.Plan | None = None, **options: object) -> ganglion.Run:
    torch.manual_seed(0)
    blocks = [nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 2)]
    own = options.pop("optimizer_factory", partial(torch.optim.AdamW, lr=1e-2))
    plan = plan or ganglion.Plan(microbatch_size=2, num_microbatches=2)
    settings = ganglion.RunSettings(**options)  # type: ignore[arg-type]
    return ganglion.parallelize(blocks, nn.functional.cross_entropy, own, plan, settings)  # type: ignore[arg-type]


def dataset(size: int = 20) -> torch.utils.data.TensorDataset:
    points = torch.randn(size, 3, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(points, (points.sum(1) > 0).long())


def test_the_surface_is_pinned() -> None:
    assert ganglion.__all__ == [
        "BUILT_IN",
        "NORMAL",
        "TRANSPOSED",
        "ActivationSettings",
        "Answer",
        "AveragingSettings",
        "DescribedModel",
        "ElasticAverage",
        "GanglionError",
        "InitialWeights",
        "ListedSchedule",
        "ModelCuts",
        "NormCut",
        "Plan",
        "PlannedLayout",
        "Prediction",
        "Recorder",
        "Registry",
        "Run",
        "RunSettings",
        "SampleOutline",
        "StageMap",
        "StageTimes",
        "StepResult",
        "TensorSettings",
        "__version__",
        "describe_model",
        "description_to_json",
        "diloco",
        "local_sgd",
        "named_model",
        "parallelize",
        "plan",
        "predict",
        "read_launch",
        "rehearse",
        "render_grid",
        "serve_centers",
        "simulate",
        "slow_momentum",
    ]
    assert dir(ganglion) == sorted(ganglion.__all__)
    for name in ganglion.__all__:
        assert getattr(ganglion, name) is not None
    public = {name for name in dir(ganglion.Run) if not name.startswith("_")}
    assert public == {
        "batches",
        "close",
        "count_saved",
        "drain",
        "evaluate",
        "exchanges",
        "gather_numbers",
        "gradients",
        "load",
        "model_tensors",
        "outputs",
        "placements",
        "request_stop",
        "save",
        "steps",
        "tensor_report",
        "tensors",
    }
    assert list(inspect.signature(ganglion.parallelize).parameters)[:4] == [
        "blocks",
        "loss_fn",
        "optimizer_factory",
        "plan",
    ]
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        ganglion.nothing  # noqa: B018


def test_importing_it_does_not_import_torch() -> None:
    code = "import sys, ganglion; ganglion.Plan(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment())


def test_steps_until_and_resume_repeat_dropout_and_batches(tmp_path: Path) -> None:
    whole = make_run()
    losses = [r.loss for r in whole.steps(whole.batches(dataset()), until=8)]
    first = make_run()
    begun = [r.loss for r in first.steps(first.batches(dataset()), until=3)]
    first.save(tmp_path)
    second = make_run()
    assert second.load(tmp_path)
    assert second.step == 3
    rest = [r.loss for r in second.steps(second.batches(dataset()), until=8)]
    assert begun + rest == losses
    assert list(second.steps(second.batches(dataset()), until=8)) == []


def test_nothing_to_load(tmp_path: Path) -> None:
    run = make_run()
    assert not run.load(tmp_path / "nowhere")
    assert run.step == 0


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    run = make_run()
    list(run.steps(run.batches(dataset()), until=1))
    run.save(tmp_path)
    other = ganglion.parallelize(
        [nn.Linear(3, 2)], nn.functional.cross_entropy, torch.optim.AdamW, run.plan
    )
    with pytest.raises(CheckpointError, match="model"):
        other.load(tmp_path)


def test_evaluation_has_no_dropout_and_leaves_no_trace() -> None:
    run = make_run()
    before = run.model_tensors()
    copies = {name: tensor.clone() for name, tensor in before.items()}
    assert run.evaluate(dataset(), 2) == run.evaluate(dataset(), 2)
    assert all(torch.equal(copies[name], tensor) for name, tensor in before.items())
    assert run.step == 0


def test_learning_rate_follows_the_factor() -> None:
    run = make_run(lr_factor=lambda step: 1.0 / (step + 1))
    rates = [result.lr for result in run.steps(run.batches(dataset()), until=3)]
    assert rates == pytest.approx([1e-2, 5e-3, 1e-2 / 3])


def test_running_statistics_are_saved(tmp_path: Path) -> None:
    blocks = [nn.BatchNorm1d(3), nn.Linear(3, 2)]
    plan = ganglion.Plan(microbatch_size=4)
    run = ganglion.parallelize(blocks, nn.functional.cross_entropy, torch.optim.AdamW, plan)
    list(run.steps(run.batches(dataset()), until=2))
    run.save(tmp_path)
    fresh = [nn.BatchNorm1d(3), nn.Linear(3, 2)]
    again = ganglion.parallelize(fresh, nn.functional.cross_entropy, torch.optim.AdamW, plan)
    again.load(tmp_path)
    assert torch.equal(fresh[0].running_mean, blocks[0].running_mean)  # type: ignore[arg-type]
    assert int(fresh[0].num_batches_tracked) == 2  # type: ignore[arg-type]


def test_several_optimizers() -> None:
    def factory(named: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(named[:2], lr=0.1), torch.optim.AdamW(named[2:], lr=0.1)]

    run = make_run(optimizer_factory=factory)
    before = {name: tensor.clone() for name, tensor in run.model_tensors().items()}
    list(run.steps(run.batches(dataset()), until=1))
    assert not any(torch.equal(before[n], t) for n, t in run.model_tensors().items())


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"plan": ganglion.Plan(servers=1)}, ConfigError, "averaging.servers = 1, but averaging"),
        ({"plan": ganglion.Plan(data=2)}, LayoutError, "needs 2 processes, but 1 were started"),
        (
            {"optimizer_factory": lambda named: torch.optim.SGD(named[:1], lr=1)},
            ConfigError,
            r"covers 1 of 4 parameters, leaving out '0.bias'",
        ),
    ],
)
def test_what_cannot_run_is_refused(
    options: dict[str, object], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        make_run(**options)  # type: ignore[arg-type]


def test_frozen_models_are_refused() -> None:
    layer = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ConfigError, match="no trainable parameter"):
        ganglion.parallelize([layer], nn.functional.mse_loss, torch.optim.SGD, ganglion.Plan())


def warnings_of(caplog: pytest.LogCaptureFixture) -> str:
    ours = [r for r in caplog.records if r.name.startswith("ganglion") and r.levelno >= 30]
    return "\n".join(record.getMessage() for record in ours)


def test_a_resumed_run_warns_of_changes_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def factor(step: int) -> float:
        return 0.5 ** (step + 1)

    run = make_run(lr_factor=factor)
    list(run.steps(run.batches(dataset()), until=2))
    run.save(tmp_path)
    make_run(lr_factor=factor).load(tmp_path)
    assert warnings_of(caplog) == ""
    other = partial(torch.optim.AdamW, lr=1e-3)
    make_run(lr_factor=factor, optimizer_factory=other, seed=5).load(tmp_path)
    assert "AdamW initial_lr: 0.01 -> 0.001" in warnings_of(caplog)
    assert "seed: 0 -> 5" in warnings_of(caplog)


def test_evaluation_leaves_frozen_parts_frozen() -> None:
    frozen = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    frozen[1].eval()
    plan = ganglion.Plan(microbatch_size=4)
    run = ganglion.parallelize([frozen], nn.functional.cross_entropy, torch.optim.AdamW, plan)
    run.evaluate(dataset(), 1)
    assert frozen.training and frozen[0].training and not frozen[1].training


def test_a_batch_of_the_wrong_size_is_refused_with_numbers() -> None:
    run = make_run()
    with pytest.raises(DataError, match=r"has 3 inputs and 3 targets, but .* = 2 \* 2 = 4"):
        list(run.steps([(torch.zeros(3, 3), torch.zeros(3).long())]))


def test_bf16_stays_close_to_fp32() -> None:
    losses = {}
    for precision in ("fp32", "bf16"):
        plan = ganglion.Plan(microbatch_size=4, precision=precision)
        run = make_run(plan)
        losses[precision] = [r.loss for r in run.steps(run.batches(dataset()), until=3)]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.05)
    assert losses["bf16"] != losses["fp32"]


def test_a_name_that_was_used_is_found_directly_afterwards() -> None:
    vars(ganglion).pop("Plan", None)
    assert ganglion.Plan.__name__ == "Plan"
    assert "Plan" in vars(ganglion)
