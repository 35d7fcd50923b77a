"""Elastic averaging on a virtual clock: workers, servers and their exchanges.

The order of exchanges comes from `schedules.exchanges`; no weights are computed.
"""

from ganglion.decide.simulator.averaging.plan import (
    AveragingFigures,
    average_plan,
    without_sums,
    worker_disturbances,
)

__all__ = ["AveragingFigures", "average_plan", "without_sums", "worker_disturbances"]
