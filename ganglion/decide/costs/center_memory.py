"""What elastic averaging keeps beside the weights, counted in copies of what a rank holds of them.

| method                     | a worker keeps                                       | copies |
|----------------------------|------------------------------------------------------|--------|
| sync_easgd, local_sgd      | the centre, the sum on its way                       | 2      |
| slow_momentum, diloco      | these, and the momentum of the centre                | 3      |
| original_ and async_easgd, async_measgd | its message to the servers, the force   | 2      |
| async_sgd, async_msgd      | its message, where it started from, its update       | 3      |
| hogwild_easgd, hogwild_sgd | the centre as it saw it last                         | 1      |

Whoever serves keeps the centre, what it shows to those who look, the last answer to each of P
workers (a lost one is sent again), and a force or a velocity: 3 + P copies, without a velocity
2 + P. Without a lock it is one, the shared memory itself.
"""

from __future__ import annotations

from ganglion.decide.plan import (
    ASYNC_MSGD,
    ASYNC_SGD,
    DILOCO,
    HOGWILD_EASGD,
    HOGWILD_SGD,
    SLOW_MOMENTUM,
    Plan,
)

_UNLOCKED = (HOGWILD_EASGD, HOGWILD_SGD)
_WITH_UPDATE = (ASYNC_SGD, ASYNC_MSGD)


def center_copies(plan: Plan, worker: int) -> int:
    """Return how many copies of its weights a rank of a worker keeps; the first may serve, too."""
    if not plan.averages:
        return 0
    serves = plan.drifts and not plan.servers and worker == 0
    return _worker_copies(plan) + (server_copies(plan) if serves else 0)


def arriving_copies(plan: Plan, worker: int) -> int:
    """Return how many more a rank may have to read at a time: its answer, or what all workers ask.

    Sums are made in place, and shared memory needs no message.
    """
    if not plan.drifts or plan.averaging in _UNLOCKED:
        return 0
    return 1 + (plan.data if not plan.servers and worker == 0 else 0)


def server_copies(plan: Plan) -> int:
    """Return how many copies of a centre, or of its part, whoever serves it keeps."""
    if plan.averaging in _UNLOCKED:
        return 1
    return 2 + plan.data + (plan.averaging != ASYNC_SGD)


def _worker_copies(plan: Plan) -> int:
    if plan.averaging in _UNLOCKED:
        return 1
    return 3 if plan.averaging in (*_WITH_UPDATE, SLOW_MOMENTUM, DILOCO) else 2
