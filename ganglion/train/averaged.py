"""Replicas as workers of elastic averaging: each trains by itself, exchanges draw them together.

A rank exchanges what it holds of the model with the ranks that hold the same of other replicas:
every element has its own force, so a worker may be a whole pipeline of split layers.

    worker 0   [stage 0] [stage 1]        each column is one group of `data`,
    worker 1   [stage 0] [stage 1]        each cell packs its weights and has a part of the centre
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from ganglion.averaging.choosing import Wishes, choose_method
from ganglion.averaging.method import ExchangeMetrics, Method
from ganglion.averaging.outer import local_sgd
from ganglion.averaging.packed import Packed
from ganglion.comm import Group, World
from ganglion.config.averaging_checks import DEFAULT_BETA
from ganglion.plan import LOCAL_SGD, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragingSettings:
    """How replicas average: exactly one of alpha, beta and rho; beta = 0.9 without any.

    Local SGD has no rate. Exchanges come every `tau` steps, and run beside forward and backward
    with `overlap`.
    """

    alpha: float | None = None
    beta: float | None = None
    rho: float | None = None
    tau: int = 10
    overlap: bool = True
    unsafe: bool = False

    def wishes(self, method: str) -> Wishes:
        """Return what the method of a plan is asked for."""
        has_rate = any(rate is not None for rate in (self.alpha, self.beta, self.rho))
        is_elastic = method != LOCAL_SGD
        return Wishes(
            alpha=self.alpha,
            beta=DEFAULT_BETA if is_elastic and not has_rate else self.beta,
            rho=self.rho,
            tau=self.tau,
            overlap=self.overlap,
            unsafe=self.unsafe,
            outer=None if is_elastic else local_sgd(),
        )


def average(
    tensors: Mapping[str, Tensor],
    optimizers: Sequence[Optimizer],
    plan: Plan,
    world: World,
    settings: AveragingSettings,
    position: int = 0,
) -> Averaged | None:
    """Return the averaging of tensors that some optimizers train, if the plan wants it.

    All ranks call it alike; `position` counts what a rank averages apart: its stages.
    """
    if not plan.averages:
        return None
    # Stages of a rank end their batches in an order of their own: a group for each.
    group = world.group("data", use=f"averaging {position}")
    if not optimizers:
        return None
    lr = float(optimizers[0].param_groups[0]["lr"])
    return Averaged(tensors, group, settings.wishes(plan.averaging), lr)


class Averaged:
    """Some weights of a rank, and the method that averages them over workers."""

    def __init__(
        self, tensors: Mapping[str, Tensor], group: Group, wishes: Wishes, lr: float
    ) -> None:
        """Pack parameters and buffers, which must be the same in all workers of `group`."""
        self._packed = Packed(_holder(tensors))
        self._names = {_inner(name): name for name in tensors}
        self._method: Method = choose_method(wishes, self._packed, group, lr)

    def begin_pass(self) -> None:
        """Say that the forward of a batch begins."""
        self._method.begin_pass()

    def before_step(self, lr: float) -> None:
        """Say that the optimizer is about to step."""
        self._method.before_step(lr)

    def after_step(self, lr: float) -> None:
        """Say that it has stepped."""
        self._method.after_step(lr)

    def metrics(self) -> ExchangeMetrics:
        """Return what this worker saw of the exchanges so far."""
        return self._method.metrics()

    @contextmanager
    def center_weights(self) -> Iterator[None]:
        """Let the modules have the weights of the centre."""
        kept = self._packed.gather().clone()
        self._set(self._method.center())
        try:
            yield
        finally:
            self._set(kept)

    def center(self) -> dict[str, Tensor]:
        """Return the centre by the names of the tensors, as views."""
        views = self._packed.views(self._method.center())
        return {self._names[inner]: view for inner, view in views.items()}

    def restart(self, step: int, num_exchanges: int, *, at_weights: bool) -> None:
        """Continue after `step` steps, with the centre at the present weights or where it is."""
        center = self._packed.gather() if at_weights else self._method.center()
        state = {**self._method.state_dict(), "center": center.clone()}
        self._method.load_state_dict({**state, "step": step, "version": num_exchanges})

    def close(self) -> None:
        """Let nothing be in flight."""
        self._method.close()

    def _set(self, flat: Tensor) -> None:
        self._packed.gather().copy_(flat)
        self._packed.scatter()


@contextmanager
def averaging_around(averaged: Averaged | None, lr: float) -> Iterator[None]:
    """Take the force of an exchange before the step of an optimizer, and apply it after."""
    if averaged is not None:
        averaged.before_step(lr)
    yield
    if averaged is not None:
        averaged.after_step(lr)


def _holder(tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a module that has just these tensors."""
    holder = nn.Module()
    for name, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter):
            holder.register_parameter(_inner(name), tensor)
        else:
            holder.register_buffer(_inner(name), tensor)
    return holder


def _inner(name: str) -> str:
    """Return a name without dots, which torch keeps for modules inside modules."""
    return name.replace(".", "/")
