"""The oracle: plain one-process training, and comparison of every tensor by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
LossFn = Callable[[Tensor, Tensor], Tensor]
MakeOptimizers = Callable[
    [list[tuple[str, nn.Parameter]]], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
]

# How far a sum taken in another order may move a result, relative and absolute.
TOLERANCE = {torch.float64: (1e-10, 1e-12), torch.float32: (2e-4, 2e-5)}


@dataclass
class History:
    """The history of a training: losses, norms and gradients of each step, and final weights."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def train_serially(
    model: nn.Module,
    loss_fn: LossFn,
    make_optimizers: MakeOptimizers,
    batches: Sequence[Batch],
    *,
    max_grad_norm: float = 0.0,
) -> History:
    """Train on whole global batches with nothing but torch."""
    history = History()
    made = make_optimizers(list(model.named_parameters()))
    optimizers = [made] if isinstance(made, torch.optim.Optimizer) else made
    for inputs, targets in batches:
        model.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm or float("inf"))
        history.losses.append(loss.item())
        history.norms.append(norm.item())
        history.gradients.append(copies({n: p.grad for n, p in model.named_parameters()}))
        for optimizer in optimizers:
            optimizer.step()
    history.weights = copies(dict(model.named_parameters()))
    return history


def train_delayed(
    model: nn.Module,
    loss_fn: LossFn,
    make_optimizers: MakeOptimizers,
    batches: Sequence[Batch],
    *,
    max_grad_norm: float = 0.0,
    error_feedback: bool = False,
) -> History:
    """2BW written out: batch t computes its gradients with the weights after max(t - 1, 0).

    With error feedback, the optimizers move by u(t) and the weights by 2 u(t) - u(t - 1).
    """
    named = dict(model.named_parameters())
    made = make_optimizers(list(named.items()))
    optimizers = [made] if isinstance(made, torch.optim.Optimizer) else made
    versions, history = [copies(named)], History()
    last = {name: torch.zeros_like(weight) for name, weight in versions[0].items()}
    for step, (inputs, targets) in enumerate(batches):
        load_weights(named, versions[max(step - 1, 0)])
        model.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm or float("inf"))
        history.losses.append(loss.item())
        history.norms.append(norm.item())
        history.gradients.append(copies({n: p.grad for n, p in named.items()}))
        load_weights(named, versions[-1])
        for optimizer in optimizers:
            optimizer.step()
        if error_feedback:
            update = {name: p.detach() - versions[-1][name] for name, p in named.items()}
            moved = {n: w + 2 * update[n] - last[n] for n, w in versions[-1].items()}
            load_weights(named, moved)
            last = update
        versions.append(copies(named))
    history.weights = versions[-1]
    return history


@torch.no_grad()
def load_weights(named: Mapping[str, nn.Parameter], weights: Mapping[str, Tensor]) -> None:
    """Give the parameters these values."""
    for name, parameter in named.items():
        parameter.copy_(weights[name])


def copies(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in tensors.items() if t is not None}


def assert_same_by_name(
    actual: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    *,
    exactly: bool = False,
    what: str = "",
) -> None:
    """Compare every tensor under its name; `exactly` means to the last bit.

    `what` names the tensors in errors.
    """
    strange = sorted(set(actual) ^ set(expected))
    assert not strange, f"{what}{', '.join(strange)} only on one side"
    for name, wanted in expected.items():
        if exactly:
            assert torch.equal(actual[name], wanted), f"{what}{name} differs"
        else:
            relative, absolute = TOLERANCE[wanted.dtype]
            torch.testing.assert_close(
                actual[name],
                wanted,
                rtol=relative,
                atol=absolute,
                msg=lambda text, name=name: f"{what}{name}: {text}",
            )


def assert_same_gradients(
    actual: Sequence[Mapping[str, Tensor]],
    expected: Sequence[Mapping[str, Tensor]],
    *,
    exactly: bool = False,
) -> None:
    """Compare the gradient of every parameter at every step."""
    assert len(actual) == len(expected) > 0, f"{len(actual)} steps, not {len(expected)}"
    for step, (found, wanted) in enumerate(zip(actual, expected, strict=True)):
        assert_same_by_name(found, wanted, exactly=exactly, what=gradients_of(step))


def gradients_of(step: int) -> str:
    """Return the name of the gradients of a step, for errors."""
    return f"step {step}, gradient of "


def assert_same_history(found: History, expected: History, dtype: torch.dtype) -> None:
    """Compare every gradient of every step and every weight by name; losses and norms."""
    relative = TOLERANCE[dtype][0]
    assert_same_gradients(found.gradients, expected.gradients)
    assert found.losses == pytest.approx(expected.losses, rel=relative), "losses"
    assert found.norms == pytest.approx(expected.norms, rel=relative), "norms"
    assert_same_by_name(found.weights, expected.weights)
