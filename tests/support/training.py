"""Bodies that ranks run in tests: training a small model under a plan, by threads or processes."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ganglion import Plan, RunSettings, parallelize
from ganglion.decide.config.schema import OptimizerSection
from ganglion.decide.shapes import ConvShape, GPTShape, MLPShape, ModelShape
from ganglion.execute.comm import World
from ganglion.execute.models import build_model, cross_entropy
from ganglion.execute.tensor import TensorSettings
from ganglion.execute.train import Run
from ganglion.execute.train.averaged import AveragingSettings
from ganglion.execute.train.settings import ActivationSettings
from ganglion.execute.update.optimizers import NamedParameters, OptimizerFactory, optimizer_factory
from ganglion.trace import Event, Recorder
from tests.support.serial import Batch, History, assert_same_gradients, copies, train_serially
from tests.support.tensors import WIDE, Held

SHAPES: dict[str, ModelShape] = {
    "gpt": GPTShape(
        vocab_size=19,
        seq_len=8,
        num_layers=2,
        hidden=16,
        num_heads=2,
        num_kv_heads=1,
        head_size=8,
        mlp_hidden=32,
        bias=True,
    ),
    "tied": GPTShape(
        vocab_size=19,
        seq_len=8,
        num_layers=1,
        hidden=16,
        num_heads=2,
        num_kv_heads=2,
        head_size=8,
        mlp_hidden=32,
        tied_embedding=True,
        positions="learned",
    ),
    "mlp": MLPShape(num_inputs=12, num_outputs=5, num_layers=3, hidden=16),
    "conv": ConvShape(image_size=28, num_channels=1, num_outputs=5),
    **WIDE,
}
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
}
# Muon comes with AdamW for what is not a matrix: several optimizers a stage.
MUON = optimizer_factory(OptimizerSection(name="muon", lr=1e-2))
FACTORIES: dict[str, OptimizerFactory] = {**OPTIMIZERS, "muon": MUON}

_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True)
class Case:
    """One training to compare: model, optimizer, batches and switches."""

    model: str = "gpt"
    optimizer: str = "adamw"
    dtype: torch.dtype = torch.float64
    max_grad_norm: float = 0.0
    error_feedback: bool = False
    global_batch_size: int = 8
    num_steps: int = 3
    overlap: bool = True
    bucket_mib: float = 0.002  # small, so that a small model still has several buckets
    tensor: TensorSettings | None = None
    averaging: AveragingSettings | None = None
    offload_dir: Path = Path()
    bucket_size: int = 2**22  # of offloaded state
    activations: ActivationSettings | None = None


def make_model(case: Case, seed: int = 1) -> nn.Module:
    """Return the model of a seed on any rank: threads share one random generator: take turns."""
    with _ONE_AT_A_TIME, torch.random.fork_rng():
        torch.manual_seed(seed)
        return build_model(SHAPES[case.model]).to(case.dtype)


def make_batches(case: Case) -> list[Batch]:
    """Return whole global batches."""
    generator = torch.Generator().manual_seed(2)
    return [_batch(case, generator) for _ in range(case.num_steps)]


def _batch(case: Case, generator: torch.Generator) -> Batch:
    shape, size = SHAPES[case.model], case.global_batch_size
    if isinstance(shape, GPTShape):
        ids = torch.randint(shape.vocab_size, (size, shape.seq_len + 1), generator=generator)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    inputs = (
        torch.randn(size, shape.num_inputs, generator=generator)
        if isinstance(shape, MLPShape)
        else torch.randn(size, 1, shape.image_size, shape.image_size, generator=generator)
    )
    return inputs.to(case.dtype), torch.randint(shape.num_outputs, (size,), generator=generator)


def share_of(batch: Batch, world: World, plan: Plan) -> Batch:
    """Cut this rank's contiguous share out of a global batch."""
    index = world.coordinates.data * plan.z + world.coordinates.z
    part = slice(index * plan.share_size, (index + 1) * plan.share_size)
    return batch[0][part], batch[1][part]


class Watch:
    """An optimizer factory that takes down each gradient its optimizers get, by name and step.

    They are seen where they count: reduced, clipped and handed over, whether or not the pipeline
    ever flushes. Of an optimizer with offloaded state nothing is seen, as it steps over pieces.
    """

    def __init__(self, factory: OptimizerFactory) -> None:
        self._factory = factory
        self._names: dict[nn.Parameter, str] = {}
        self._seen: dict[str, list[Tensor]] = {}

    def __call__(self, named: NamedParameters) -> list[Optimizer]:
        made = self._factory(named)
        optimizers = [made] if isinstance(made, Optimizer) else list(made)
        self._names |= {parameter: name for name, parameter in named}
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._take_down)
        return optimizers

    def gradients(self) -> list[dict[str, Tensor]]:
        """Return the gradients of every step."""
        counts = {name: len(seen) for name, seen in self._seen.items()}
        assert len({*counts.values()}) <= 1, f"not all have stepped as often: {counts}"
        steps = zip(*self._seen.values(), strict=True)
        return [dict(zip(self._seen, step, strict=True)) for step in steps]

    def _take_down(self, optimizer: Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in self._names and parameter.grad is not None:
                    seen = self._seen.setdefault(self._names[parameter], [])
                    seen.append(parameter.grad.detach().clone())


def make_run(
    world: World,
    plan: Plan,
    case: Case,
    seed: int = 1,
    recorder: Recorder | None = None,
    watch: Watch | None = None,
) -> Run:
    return parallelize(
        make_model(case, seed),
        cross_entropy,
        watch or FACTORIES[case.optimizer],
        replace(
            plan,
            overlap=case.overlap,
            bucket_mib=case.bucket_mib,
            bucket_size=case.bucket_size,
        ),
        RunSettings(
            max_grad_norm=case.max_grad_norm,
            error_feedback=case.error_feedback,
            tensor=case.tensor,
            averaging=case.averaging,
            offload_dir=case.offload_dir,
            activations=case.activations,
        ),
        world=world,
        recorder=recorder,
    )


def train_parallel(world: World, plan: Plan, case: Case) -> History:
    """Train under `plan` and return the history of this rank."""
    return train_split(world, plan, case).history


def train_split(world: World, plan: Plan, case: Case) -> Held:
    """Train under `plan` and return the tensors of this rank, with their places."""
    watch, history = Watch(FACTORIES[case.optimizer]), History()
    run = make_run(world, plan, case, watch=watch)
    for batch in make_batches(case):
        for result in run.steps([share_of(batch, world, plan)]):
            history.losses.append(result.loss)
            history.norms.append(result.grad_norm)
        history.gradients.append(copies(run.gradients()))
    if plan.offload == "none":
        assert_same_gradients(watch.gradients(), history.gradients, exactly=True)
    history.weights = copies(run.model_tensors())
    placements = run.placements()
    run.close()  # to ranks that are still at work, one that leaves without a word has died
    return Held(history, placements, world.coordinates, world.mesh)


def train_split_at_once(world: World, plan: Plan, case: Case) -> Held:
    """Train all batches in one go, so that a pipeline that never flushes really does not."""
    watch, history = Watch(FACTORIES[case.optimizer]), History()
    run = make_run(world, plan, case, watch=watch)
    for result in run.steps(share_of(batch, world, plan) for batch in make_batches(case)):
        history.losses.append(result.loss)
        history.norms.append(result.grad_norm)
    history.gradients = watch.gradients()
    history.weights = copies(run.model_tensors())
    placements = run.placements()
    run.close()  # to ranks that are still at work, one that leaves without a word has died
    return Held(history, placements, world.coordinates, world.mesh)


def train_serial(case: Case) -> History:
    """Train the whole model in this process, which every layout must equal.

    Many layouts are compared with one training, so that is remembered: leave it as it is.
    """
    return _train_serial(in_one_process(case))


def in_one_process(case: Case) -> Case:
    """Return a case without the settings that change nothing in one process."""
    return replace(
        case,
        overlap=True,
        bucket_mib=0.0,
        tensor=None,
        averaging=None,
        offload_dir=Path(),
        bucket_size=0,
        activations=None,
    )


@lru_cache(maxsize=32)
def _train_serial(case: Case) -> History:
    return train_serially(
        make_model(case),
        cross_entropy,
        FACTORIES[case.optimizer],
        make_batches(case),
        max_grad_norm=case.max_grad_norm,
    )


def train_traced(world: World, plan: Plan, case: Case) -> tuple[Plan, list[Event]]:
    """Train under `plan` with SGD; return the plan as decided and this rank's events."""
    recorder = Recorder(world.rank)
    run = parallelize(
        make_model(case), cross_entropy, OPTIMIZERS["sgd"], plan, world=world, recorder=recorder
    )
    list(run.steps(share_of(batch, world, plan) for batch in make_batches(case)))
    return run.plan, recorder.events()
