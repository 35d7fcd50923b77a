"""What a run file describes is built and learns: every kind of model, data and tokenizer."""

from __future__ import annotations

import logging
import math
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch

from ganglion.decide.config import Override, load_run_file, resolve
from ganglion.decide.schedules.loss_scale import LossScale
from ganglion.decide.topology import Launch
from ganglion.errors import GanglionError
from ganglion.execute.comm import open_world
from ganglion.execute.measure.peak import machine_peak
from ganglion.execute.train import Job, build_job, file_observers, train
from ganglion.trace import StepMetrics, read_metrics, read_trace

SMALL = {
    "model.layers": "2",
    "model.hidden": "32",
    "model.heads": "2",
    "data.seq_len": "16",
    "optimizer.lr": "1e-2",
    "train.steps": "15",
    "train.global_batch_size": "8",
    "train.microbatch_size": "4",
    "output.tensorboard": "false",
}
USER_MODULE = """
import torch
from torch import nn

def build(width):
    hidden = {"flat": nn.Flatten(), "in": nn.Linear(784, width), "act": nn.GELU()}
    return {**hidden, "out": nn.Linear(width, 10)}

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        x = torch.tensor([index / 64.0])
        return x, x * x

def squares():
    return Squares()

def line():
    return [nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)]

def huber(output, target):
    return nn.functional.huber_loss(output, target)
"""


def make_job(folder: Path, **settings: str) -> Job:
    overrides = [Override(key, text) for key, text in {**SMALL, **settings}.items()]
    file = load_run_file({}, overrides)
    launch = Launch()
    plan = resolve(file, 1)
    world = open_world(launch, plan.mesh())
    return build_job(file, plan, world, launch, folder, folder / "cache")


class Watch:
    def __init__(self) -> None:
        self.seen: list[StepMetrics] = []
        self.closed = False

    def on_step(self, metrics: StepMetrics) -> None:
        self.seen.append(metrics)

    def close(self) -> None:
        self.closed = True


KINDS: dict[str, dict[str, str]] = {
    "gpt on synthetic tokens": {"data.kind": "synthetic"},
    "gpt on text": {"data.source": "corpus.txt"},
    "gpt on BPE": {
        "data.source": "corpus.txt",
        "data.tokenizer": "bpe",
        "data.bpe_vocab_size": "300",
    },
    "tied gpt": {"data.source": "corpus.txt", "model.tied_embedding": "true", "model.bias": "true"},
    "learned positions": {"data.source": "corpus.txt", "model.positions": "learned"},
    "grouped queries": {"data.source": "corpus.txt", "model.kv_heads": "1"},
    "bf16": {"data.source": "corpus.txt", "train.precision": "bf16"},
    "bf16 masters": {"data.source": "corpus.txt", "train.precision": "bf16_master"},
    "fp16 masters, widened": {
        "data.source": "corpus.txt",
        "train.precision": "fp16_master",
        "memory.compute_fp32": "true",
    },
    "fp16 masters on images": {
        "model.build": "mine:build",
        "model.args.width": "32",
        "data.kind": "images",
        "train.precision": "fp16_master",
    },
    "muon": {"data.source": "corpus.txt", "optimizer.name": "muon"},
    "sgd": {"data.source": "corpus.txt", "optimizer.name": "sgd", "optimizer.lr": "0.1"},
    "mlp on images": {"model.kind": "mlp", "data.kind": "images"},
    "conv on images": {"model.kind": "conv", "data.kind": "images"},
    "own model": {"model.build": "mine:build", "model.args.width": "32", "data.kind": "images"},
    "own data and loss": {
        "model.build": "mine:line",
        "model.loss": "mine:huber",
        "data.kind": "dataset",
        "data.source": "mine:squares",
        "optimizer.lr": "5e-2",
    },
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "corpus.txt").write_text("she sells sea shells by the sea shore. " * 60)
    (tmp_path / "mine.py").write_text(USER_MODULE)
    monkeypatch.chdir(tmp_path)
    # Half a second of products for every job: the figure is not what is looked at here.
    brief = partial(machine_peak, budget_s=1e-3)
    monkeypatch.setattr(import_module("ganglion.execute.train.job"), "machine_peak", brief)
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_learns(kind: str, folder: Path) -> None:
    job, watch = make_job(folder, **KINDS[kind]), Watch()
    with job.run:
        train(job, [watch])
    losses = [metrics.loss for metrics in watch.seen]
    assert len(losses) == job.run.step == 15
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert watch.seen[-1].val_loss is not None
    assert (folder / "tokenizer.json").exists() == (job.source.tokenizer is not None)


def test_files_of_a_run(folder: Path) -> None:
    job = make_job(
        folder, **{"data.kind": "synthetic", "train.steps": "4", "output.tensorboard": "true"}
    )
    observers = file_observers(job)
    with job.run:
        train(job, observers)
    for observer in observers:
        observer.close()
    assert [r.step for r in read_metrics(folder / "metrics.jsonl")] == [1, 2, 3, 4]
    events = read_trace(folder / "trace" / "rank0.jsonl")
    assert {e.step for e in events if e.kind == "forward"} == {0, 1, 2, 3}
    assert all(e.end_s >= e.start_s for e in events)
    curves = read_scalars(folder / "tensorboard")
    assert [event.step for event in curves["loss"]] == [1, 2, 3, 4]
    assert set(curves) == {
        "loss", "grad_norm", "tokens_per_s", "step_s", "lr", "peak_bytes", "val_loss",
    }  # fmt: skip


def test_skipped_steps_are_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A scale that is much too large: the first steps overflow, and the run says so."""
    made = partial(LossScale, initial=2.0**24)
    monkeypatch.setattr(import_module("ganglion.execute.train.parallelize"), "LossScale", made)
    settings = {"data.kind": "synthetic", "train.steps": "8", "output.tensorboard": "true"}
    job = make_job(folder, **settings, **{"train.precision": "fp16_master"})
    observers = file_observers(job)
    with job.run, caplog.at_level(logging.WARNING):
        train(job, observers)
    for observer in observers:
        observer.close()
    found = read_metrics(folder / "metrics.jsonl")
    bad = [record.step for record in found if record.skipped]
    assert bad and bad[0] == 1 and found[-1].skipped is False
    assert [r.loss_scale for r in found[:2]] == [2.0**24, 2.0**23]
    assert math.isnan(found[0].grad_norm), "JSON has no infinity"
    lines = [r.getMessage() for r in caplog.records if "skipped" in r.getMessage()]
    assert lines[0] == "step 1 skipped: gradients overflowed at loss scale 16777216"
    assert len(lines) == len(bad)
    assert read_scalars(folder / "tensorboard")["skipped"][0].value == 1


def read_scalars(folder: Path) -> dict[str, list]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}


def test_evaluation_and_checkpoints_come_when_due(folder: Path) -> None:
    job, watch = make_job(
        folder,
        **{
            "data.kind": "synthetic",
            "train.steps": "5",
            "train.eval_every": "2",
            "checkpoint.every": "2",
            "checkpoint.keep": "9",
        },
    ), Watch()  # fmt: skip
    with job.run:
        train(job, [watch])
    assert [m.step for m in watch.seen if m.val_loss is not None] == [2, 4, 5]
    kept = sorted(path.name for path in job.checkpoints.iterdir())
    assert kept == ["step-00000002", "step-00000004", "step-00000005"]


def test_nothing_held_out_means_no_evaluation(folder: Path) -> None:
    settings = {"data.kind": "synthetic", "train.steps": "2", "data.val_fraction": "0"}
    job, watch = make_job(folder, **settings), Watch()
    with job.run:
        train(job, [watch])
    assert [m.val_loss for m in watch.seen] == [None, None]


def test_the_same_seed_gives_the_same_model(folder: Path) -> None:
    first = make_job(folder, **{"data.kind": "synthetic"})
    torch.rand(7)
    second = make_job(folder, **{"data.kind": "synthetic"})
    other = make_job(folder, **{"data.kind": "synthetic", "train.seed": "1"})
    weights = [job.run.model_tensors() for job in (first, second, other)]
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name])
    assert any(not torch.equal(t, weights[2][n]) for n, t in weights[0].items())


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"model.kind": "conv", "data.kind": "synthetic"}, "model.kind"),
        ({"model.kind": "mlp", "data.kind": "synthetic"}, "model.kind"),
        ({"model.kind": "gpt", "data.kind": "images"}, "model.kind"),
        ({"model.vocab_size": "50", "data.source": "corpus.txt"}, "model.vocab_size"),
        ({"model.build": "mine:nothing", "data.kind": "images"}, "model.build"),
        ({"data.kind": "dataset", "data.source": "mine:nothing"}, "data.source"),
        ({"data.kind": "dataset", "data.source": "mine:build"}, "data.args {} do not fit"),
        ({"model.loss": "mine:nothing", "data.kind": "synthetic"}, "model.loss"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, str], text: str, folder: Path) -> None:
    with pytest.raises(GanglionError, match=text):
        make_job(folder, **settings)
