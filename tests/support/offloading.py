"""An update over parameters of many shapes, with its state in memory or on a tier, to compare."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from ganglion.decide.config.schema import OptimizerSection
from ganglion.execute.comm import SoloGroup
from ganglion.execute.gradients import GradientBuckets, Reach
from ganglion.execute.update import WeightVersions
from ganglion.execute.update.masters import MasterUpdate
from ganglion.execute.update.offloaded import (
    OffloadedMasterUpdate,
    OffloadedUpdate,
    StateOnTier,
    masters_on_tier,
)
from ganglion.execute.update.optimizers import OptimizerFactory, optimizer_factory
from ganglion.execute.update.precision import take_masters
from ganglion.execute.update.updating import PlainUpdate, Update
from ganglion.trace import Recorder

# Several grains of 2048 elements and a tail; less than a grain; a matrix; a single number.
SHAPES: dict[str, tuple[int, ...]] = {
    "embedding.weight": (71, 83),
    "layers.0.weight": (64, 100),
    "layers.0.bias": (100,),
    "layers.1.weight": (130, 33),
    "layers.1.scale": (1,),
    "head.weight": (19, 130),
}


class Counting(Optimizer):
    """A user's own optimizer: looks at whole matrices, counts in its group and in itself."""

    def __init__(self, params: object, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "num_steps": 0})  # type: ignore[arg-type]
        self.num_calls = 0

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.num_calls += 1
        for group in self.param_groups:
            group["num_steps"] += 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                    state["rows"] = torch.zeros(p.shape[0])
                state["mean"].mul_(0.9).add_(p.grad)
                state["rows"].add_(p.grad.reshape(p.shape[0], -1).square().sum(1))
                scale = p.grad.norm() * group["num_steps"] + self.num_calls
                p.sub_(state["mean"] * (group["lr"] / (scale + state["rows"].sum())))


FACTORIES: dict[str, OptimizerFactory] = {
    "sgd": functools.partial(SGD, lr=0.1, weight_decay=0.01),
    "momentum": functools.partial(SGD, lr=0.1, momentum=0.9),
    "dampening": functools.partial(SGD, lr=0.1, momentum=0.9, dampening=0.3),
    "nesterov fused": functools.partial(SGD, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "adam": functools.partial(Adam, lr=0.01, amsgrad=True),
    "adamw": functools.partial(AdamW, lr=0.01, weight_decay=0.1),
    "adamw fused": functools.partial(AdamW, lr=0.01, weight_decay=0.1, fused=True),
    "adamw foreach": functools.partial(AdamW, lr=0.01, weight_decay=0.1, foreach=True),
    "rmsprop": functools.partial(RMSprop, lr=0.01, momentum=0.9, centered=True),
    "adagrad": functools.partial(Adagrad, lr=0.01),
    "groups": optimizer_factory(OptimizerSection(name="adamw", lr=0.01)),
    "muon": optimizer_factory(OptimizerSection(name="muon", lr=0.01)),
    "own": Counting,
}


@dataclass(frozen=True)
class Part:
    """An update with its parameters and gradients."""

    update: Update
    parameters: Mapping[str, nn.Parameter]
    buckets: GradientBuckets
    state: StateOnTier | None = None


def make_parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    """Return parameters of many shapes, the same at every call."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in SHAPES.items()
    }


def make_buckets(parameters: Mapping[str, nn.Parameter]) -> GradientBuckets:
    """Return their gradients in several buckets."""
    return GradientBuckets(parameters, Reach(SoloGroup(0)), Recorder(0), bucket_bytes=15_000)


def plain(
    parameters: Mapping[str, nn.Parameter], factory: OptimizerFactory, num_versions: int = 1
) -> Part:
    """Return an update with all in memory."""
    versions = make_versions(parameters, num_versions)
    buckets = make_buckets(parameters)
    return Part(PlainUpdate(parameters, factory, versions), parameters, buckets)


def masters(
    parameters: Mapping[str, nn.Parameter], factory: OptimizerFactory, num_versions: int = 1
) -> Part:
    """Return an update of masters, all in memory."""
    made = take_masters([], parameters, "bf16_master")
    versions = make_versions(parameters, num_versions)
    buckets = make_buckets(parameters)
    return Part(MasterUpdate(parameters, made, factory, versions), parameters, buckets)


def make_versions(
    parameters: Mapping[str, nn.Parameter], num_versions: int
) -> WeightVersions | None:
    return WeightVersions(parameters, num_versions) if num_versions > 1 else None


@dataclass(frozen=True)
class Offloaded:
    """Makes updates with their state on a tier."""

    folder: Path
    tier: str = "disk"
    bucket_size: int = 4096
    recorder: Recorder = field(default_factory=lambda: Recorder(0, enabled=False))
    timeout_s: float = 20.0

    def plain(
        self,
        parameters: Mapping[str, nn.Parameter],
        factory: OptimizerFactory,
        num_versions: int = 1,
    ) -> Part:
        """Return an update of weights that stay."""
        state = self.state(parameters)
        versions = make_versions(parameters, num_versions)
        buckets = make_buckets(parameters)
        update = OffloadedUpdate(parameters, factory, buckets, state, versions)
        return Part(update, parameters, buckets, state)

    def masters(
        self,
        parameters: Mapping[str, nn.Parameter],
        factory: OptimizerFactory,
        num_versions: int = 1,
    ) -> Part:
        """Return an update of masters on the tier, too."""
        state = self.state(parameters, torch.float32)
        made = take_masters(
            [], parameters, "bf16_master", lambda _: masters_on_tier(state), state.store.release
        )
        versions = make_versions(parameters, num_versions)
        buckets = make_buckets(parameters)
        update = OffloadedMasterUpdate(parameters, made, factory, buckets, state, versions)
        return Part(update, parameters, buckets, state)

    def state(
        self, parameters: Mapping[str, nn.Parameter], dtype: torch.dtype | None = None
    ) -> StateOnTier:
        return StateOnTier(
            parameters,
            self.tier,
            self.folder,
            self.bucket_size,
            torch.device("cpu"),
            self.recorder,
            self.timeout_s,
            dtype=dtype,
        )


def fill_gradients(parameters: Mapping[str, nn.Parameter], step: int) -> None:
    """Write the gradients of a step where the buckets want them."""
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters.values():
        assert parameter.grad is not None
        noise = torch.randn(parameter.shape, generator=generator) * 0.3
        parameter.grad.copy_(noise.to(parameter.dtype))


def factor_of(step: int) -> Tensor | None:
    """Return the factor that clips the gradients; every third step has none."""
    return None if step % 3 == 0 else torch.tensor(0.5 + 0.01 * step, dtype=torch.float64)


def train(part: Part, steps: range) -> None:
    """Make some steps; every seventh is skipped."""
    for step in steps:
        fill_gradients(part.parameters, step)
        for optimizer in part.update.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.01 / (1 + step)
        part.update.begin()
        if step % 7 == 6:
            part.update.skip()
        else:
            part.update.step(part.buckets.buffers(0), factor_of(step))


def state_of(part: Part) -> dict[str, object]:
    """Return copies of weights and state by parameter and entry, and the counters of groups."""
    found: dict[str, object] = {n: p.detach().clone() for n, p in part.parameters.items()}
    found |= {f"saved {name}": w.clone() for name, w in part.update.weights().items()}
    found |= {f"gradient {name}": g.clone() for name, g in part.update.gradients().items()}
    for number, optimizer in enumerate(part.update.optimizers):
        for g, group in enumerate(optimizer.param_groups):
            names = group.pop("param_names")
            for name, parameter in zip(names, group["params"], strict=True):
                for entry, value in optimizer.state.get(parameter, {}).items():
                    found[f"{name}.{entry}"] = value.clone() if isinstance(value, Tensor) else value
            found[f"group {number}.{g}"] = {k: v for k, v in group.items() if k != "params"}
            group["param_names"] = names
    return found


def assert_same_state(actual: Mapping[str, object], expected: Mapping[str, object]) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        other = actual[key]
        if isinstance(value, Tensor):
            assert isinstance(other, Tensor)
            assert torch.equal(other, value) and other.dtype == value.dtype, key
        else:
            assert other == value, key
