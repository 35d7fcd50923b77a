"""Optimizers by name: torch's own, over named parameters.

A factory receives `(name, parameter)` pairs, which every torch optimizer accepts, and returns one
optimizer or several over disjoint parameters. The learning rate is a function of the step, so that
a resumed run needs no scheduler state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from ganglion.decide.config import OptimizerSection
from ganglion.errors import ConfigError

NamedParameters = list[tuple[str, nn.Parameter]]
OptimizerFactory = Callable[[NamedParameters], Optimizer | Sequence[Optimizer]]


def optimizer_factory(section: OptimizerSection) -> OptimizerFactory:
    """Return the factory that a run file asks for."""

    def build(named: NamedParameters) -> Sequence[Optimizer]:
        if section.name == "sgd":
            return [
                SGD(
                    _groups(named, section.weight_decay),
                    lr=section.lr,
                    momentum=section.momentum,
                )
            ]
        if section.name == "adamw":
            return [_adamw(named, section)]
        return _muon(named, section)

    return build


def build_optimizers(
    factory: OptimizerFactory, parameters: Mapping[str, nn.Parameter]
) -> list[Optimizer]:
    """Call a factory and check that it covers each parameter exactly once."""
    made = factory(list(parameters.items()))
    optimizers = [made] if isinstance(made, Optimizer) else list(made)
    names = {id(parameter): name for name, parameter in parameters.items()}
    covered = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    left = [name for key, name in names.items() if key not in {id(p) for p in covered}]
    if left or len(covered) != len(names):
        raise ConfigError(
            f"the optimizer factory covers {len(covered)} of {len(names)} parameters"
            + (f", leaving out {left[0]!r}" if left else "")
            + ": each must be given to exactly one optimizer"
        )
    return optimizers


def _adamw(named: NamedParameters, section: OptimizerSection) -> Optimizer:
    return AdamW(
        _groups(named, section.weight_decay),
        lr=section.lr,
        betas=(section.beta1, section.beta2),
        eps=section.eps,
        fused=True,
    )


def _muon(named: NamedParameters, section: OptimizerSection) -> list[Optimizer]:
    """Muon for matrices inside the model; AdamW for the rest: norms, biases and token tables.

    `match_rms_adamw` scales Muon's updates to AdamW's size, so that one rate serves both.
    """
    from torch.optim import Muon  # newer than the oldest torch this package accepts

    inner = [pair for pair in named if _suits_muon(*pair)]
    rest = [pair for pair in named if not _suits_muon(*pair)]
    optimizers: list[Optimizer] = []
    if inner:
        optimizers.append(
            Muon(
                inner,
                lr=section.lr,
                weight_decay=section.weight_decay,
                momentum=section.momentum,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    if rest:
        optimizers.append(_adamw(rest, section))
    return optimizers


def _suits_muon(name: str, parameter: torch.Tensor) -> bool:
    return parameter.ndim == 2 and not name.startswith(("embedding.", "head."))


def _groups(named: NamedParameters, weight_decay: float) -> list[dict[str, object]]:
    """Split into decayed matrices and undecayed vectors, leaving out an empty group."""
    matrices = [pair for pair in named if pair[1].ndim >= 2]
    vectors = [pair for pair in named if pair[1].ndim < 2]
    groups: list[dict[str, object]] = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


LrFactor = Callable[[int], float]


def constant(step: int) -> float:
    """Return 1 for every step: the optimizer's own rate."""
    return 1.0


def warmup_cosine(
    warmup_steps: int, steps: int, min_fraction: float, *, decay: bool = True
) -> LrFactor:
    """Return the share of the peak rate for update number `step`, counted from 0.

    It rises linearly over the warm-up, then falls along a half cosine to `min_fraction`.
    """

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        if not decay:
            return 1.0
        progress = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
        return min_fraction + (1 - min_fraction) * 0.5 * (1 + math.cos(math.pi * progress))

    return factor


class RateSetter:
    """Sets the learning rate of an update: the optimizers' own rates times a factor."""

    def __init__(self, factor: LrFactor) -> None:
        """Use `factor(step)`; the optimizers come later."""
        self._factor = factor
        self._groups: list[dict[str, Any]] = []

    def take(self, optimizers: Sequence[Optimizer]) -> None:
        """Remember the rates of some optimizers as their base rates."""
        self._groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group in self._groups:
            group.setdefault("initial_lr", group["lr"])  # torch's own name for the base rate

    def set(self, step: int) -> float:
        """Set the rate of update `step` and return it, that of the first group."""
        factor = self._factor(step)
        for group in self._groups:
            group["lr"] = group["initial_lr"] * factor
        return float(self._groups[0]["lr"]) if self._groups else 0.0
