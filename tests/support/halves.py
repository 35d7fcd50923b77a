"""The oracle of half precision: a plain torch loop with half weights and fp32 masters, written out.

Nothing of the package but the model and its loss takes part: microbatches, replicas, the delay of
two_bw, the loss scale, clipping and rounding are spelled out here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ganglion.execute.models import cross_entropy
from tests.support.serial import History, copies, load_weights
from tests.support.training import FACTORIES, Case, make_batches, make_model

HALVES = {"bf16_master": torch.bfloat16, "fp16_master": torch.float16}


@dataclass
class HalfHistory(History):
    """Also the loss scale of each step, and which steps were skipped."""

    scales: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)


@dataclass(frozen=True)
class Scale:
    """The rule of the loss scale."""

    initial: float = 2.0**16
    lowest: float = 2.0**10
    patience: int = 200


def train_in_half(
    case: Case,
    precision: str,
    num_microbatches: int,
    *,
    num_replicas: int = 1,
    delay: int = 0,
    scale: Scale | None = None,
    compute_fp32: bool = False,
    spoiled: int | None = None,
) -> HalfHistory:
    """Train with half weights and gradients; return the masters.

    Each replica adds up its own microbatches in half, then the replicas are summed in half. With
    `compute_fp32` the model has rounded weights, but computes in fp32. The gradients of batch
    `spoiled` are bad.
    """
    dtype = HALVES[precision]
    computed = torch.float32 if compute_fp32 else dtype
    model = make_model(case)
    masters = {n: nn.Parameter(p.detach().clone()) for n, p in model.named_parameters()}
    model = model.to(dtype).to(computed)
    named = dict(model.named_parameters())
    made = FACTORIES[case.optimizer](list(masters.items()))
    optimizers = [made] if isinstance(made, torch.optim.Optimizer) else made
    versions, history = [copies(named)], HalfHistory()
    if scale is None and precision == "fp16_master":
        scale = Scale()
    scales, num_fine = [1.0 if scale is None else scale.initial] * (delay + 1), 0
    for step, (inputs, targets) in enumerate(make_batches(case)):
        load_weights(named, versions[max(step - delay, 0)])
        used = scales[step]
        inputs = inputs.to(computed) if inputs.is_floating_point() else inputs
        losses, sums = [], []
        for replica in range(num_replicas):
            summed = {name: torch.zeros_like(p, dtype=dtype) for name, p in named.items()}
            shares = (part.chunk(num_replicas)[replica] for part in (inputs, targets))
            pairs = zip(*(share.chunk(num_microbatches) for share in shares), strict=True)
            for part, target in pairs:
                model.zero_grad()
                loss = cross_entropy(model(part).float(), target)
                (loss * (used / (num_microbatches * num_replicas))).backward()
                losses.append(loss.item())
                for name, p in named.items():
                    summed[name] += p.grad.to(dtype)
            sums.append(summed)
        total = {name: sum_in_half([each[name] for each in sums]) for name in named}
        history.losses.append(sum(losses) / len(losses))
        is_finite = all(bool(torch.isfinite(gradient).all()) for gradient in total.values())
        is_fine = is_finite and step != spoiled
        history.scales.append(used)
        history.skipped.append(scale is not None and not is_fine)
        if scale is None or is_fine:
            norm = torch.linalg.vector_norm(torch.cat([t.float().ravel() for t in total.values()]))
            limit = case.max_grad_norm or float("inf")
            factor = min(1.0, limit / (norm.item() / used + 1e-6)) / used
            for name, master in masters.items():
                master.grad = total[name].float() * factor
            history.norms.append(norm.item() / used)
            history.gradients.append(copies({n: m.grad for n, m in masters.items()}))
            for optimizer in optimizers:
                optimizer.step()
        else:
            history.norms.append(float("inf"))
        versions.append({n: m.detach().to(dtype).to(computed) for n, m in masters.items()})
        if scale is not None:
            num_fine = num_fine + 1 if is_fine else 0
            following = scales[-1] if is_fine else max(scale.lowest, min(scales[-1], used / 2))
            if num_fine == scale.patience:
                following, num_fine = 2 * following, 0
            scales.append(following)
        else:
            scales.append(1.0)
    history.weights = copies(masters)
    return history


def sum_in_half(parts: list[Tensor]) -> Tensor:
    """Add in fp32 and round once, in order."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)
