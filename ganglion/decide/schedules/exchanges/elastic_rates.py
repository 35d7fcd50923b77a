"""The rate of elastic averaging: alpha of one exchange, computed from one given number and checked.

| given | alpha of one exchange | while the learning rate falls  |
|-------|-----------------------|--------------------------------|
| alpha | alpha                 | the elasticity alpha / lr grows |
| beta  | beta / num_workers    | the same                       |
| rho   | lr * rho              | alpha shrinks with it          |

When workers join or leave, beta is divided anew among the present ones; alpha and rho stay. With
`amortise`, the given rate is that of the tau steps between two exchanges together, so alpha is
divided by tau (as in TensorFlow); without, that of one exchange (as in the authors' launcher).

Bounds on a quadratic of curvature h, x = lr * h (Zhang, Choromanska, LeCun 2015, section 4 and
lemmas 7.1, 7.4): beyond them the centre diverges even without noise.

    synchronous    alpha < 2 (2 - x) / (2 + P (2 - x))      2 / (P + 1) for small x
    round robin    alpha <= (4 - 2 x) / (4 - x)             1 for small x, whatever P
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ganglion.decide.plan import ASYNC, ROUND_ROBIN, SYNC
from ganglion.errors import ConfigError


def sync_alpha_limit(num_workers: int, lr_curvature: float = 0.0) -> float:
    """Return the alpha that synchronous exchanges must stay below; 0 if no alpha is stable."""
    slack = 2.0 - lr_curvature
    return max(0.0, 2.0 * slack / (2.0 + num_workers * slack)) if slack > 0 else 0.0


def round_robin_alpha_limit(lr_curvature: float = 0.0) -> float:
    """Return the greatest stable alpha of exchanges one worker at a time; 0 if none is."""
    return max(0.0, (4.0 - 2.0 * lr_curvature) / (4.0 - lr_curvature)) if lr_curvature < 2 else 0.0


@dataclass(frozen=True, slots=True)
class ElasticRate:
    """Exactly one of alpha, beta and rho; `unsafe` allows beta above 1."""

    alpha: float | None = None
    beta: float | None = None
    rho: float | None = None
    amortise: bool = False
    unsafe: bool = False

    def __post_init__(self) -> None:
        given = self._given()
        if len(given) != 1:
            named = ", ".join(f"{name} = {value}" for name, value in given.items()) or "none"
            raise ConfigError(
                f"averaging needs exactly one of alpha, beta and rho, got {named}: give one, for "
                f"example beta=0.9"
            )
        if not (math.isfinite(self.value) and self.value >= 0):
            raise ConfigError(f"{self.name} = {self.value} is no rate: give a number of 0 or more")

    @property
    def name(self) -> str:
        """Which of the three was given."""
        return next(iter(self._given()))

    @property
    def value(self) -> float:
        """The number that was given."""
        return next(iter(self._given().values()))

    def alpha_of(self, lr: float, num_workers: int, tau: int) -> float:
        """Return alpha of one exchange, unguarded."""
        share = {"alpha": 1.0, "beta": 1.0 / num_workers, "rho": lr}[self.name]
        return self.value * share / (tau if self.amortise else 1)

    def checked_alpha(
        self, lr: float, num_workers: int, tau: int, mode: str = SYNC, curvature: float = 0.0
    ) -> float:
        """Return alpha of one exchange; raise ConfigError if it is above a bound of `mode`.

        `curvature` is the greatest of the loss, if known. `unsafe` lifts the bound beta <= 1, never
        that of stability.
        """
        alpha = self.alpha_of(lr, num_workers, tau)
        how = self._check_beta(alpha, num_workers)
        x = lr * curvature
        if not _is_stable(alpha, num_workers, x, mode):
            raise ConfigError(
                f"{how}, which diverges in mode {mode!r}: alpha must stay below "
                f"{_bound(num_workers, x, mode)}, x = lr * curvature = {x:g}; lower {self.name}"
                + (" or lr" if x else "")
            )
        return alpha

    def following_alpha(self, lr: float, num_workers: int, tau: int, mode: str = SYNC) -> float:
        """Return alpha of one exchange between workers whose number has changed.

        A given beta is divided among the present workers. Where so few would diverge (with a beta
        of 1, a lone worker and the centre just swap), it is divided as if there were the least
        number of workers that does not. The result depends on the arguments only, so all workers
        get the same.
        """
        if self.name != "beta":
            return self.checked_alpha(lr, num_workers, tau, mode)
        shared = num_workers
        while not _is_stable(self.alpha_of(lr, shared, tau), num_workers, 0.0, mode):
            shared += 1
        alpha = self.alpha_of(lr, shared, tau)
        self._check_beta(alpha, num_workers)
        return alpha

    def _check_beta(self, alpha: float, num_workers: int) -> str:
        """Return how alpha was found, for errors; raise ConfigError if beta is above 1."""
        how = f"{self.name} = {self.value:g} gives alpha = {alpha:g}"
        beta = alpha * num_workers
        if beta > 1.0 + 1e-12 and not self.unsafe:
            raise ConfigError(
                f"{how} and beta = {num_workers} workers * alpha = {beta:g}, above 1: convergence "
                f"is proven up to 1; give beta=0.9, or ask for it with unsafe=True"
            )
        return how

    def _given(self) -> dict[str, float]:
        rates = {"alpha": self.alpha, "beta": self.beta, "rho": self.rho}
        return {name: value for name, value in rates.items() if value is not None}


def _is_stable(alpha: float, num_workers: int, x: float, mode: str) -> bool:
    """Return whether exchanges of `mode` with this alpha contract on a quadratic."""
    if mode in (ROUND_ROBIN, ASYNC):
        return 0 < round_robin_alpha_limit(x) >= alpha
    # Without locks, all workers may read the same centre, as in a synchronous step.
    return alpha < sync_alpha_limit(num_workers, x)


def _bound(num_workers: int, x: float, mode: str) -> str:
    """Return the bound of alpha as text for an error."""
    if mode in (ROUND_ROBIN, ASYNC):
        return f"(4 - 2x) / (4 - x) = {round_robin_alpha_limit(x):g}"
    limit = sync_alpha_limit(num_workers, x)
    return f"2(2 - x) / (2 + P(2 - x)) = {limit:g} with P = {num_workers}"
