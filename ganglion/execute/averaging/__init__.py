"""Elastic averaging: workers train on their own and are drawn to a shared centre.

`ElasticAverage` wraps a user's own loop; `train` builds the methods for replicas of a run. Models,
data and the training loop of a run stay outside.
"""

from ganglion.execute.averaging.average import ElasticAverage
from ganglion.execute.averaging.methods import (
    ExchangeMetrics,
    Method,
    Packed,
    diloco,
    elastic_step_,
    local_sgd,
    slow_momentum,
)
from ganglion.execute.averaging.options import AveragingOptions
from ganglion.execute.averaging.sync_factory import sync_method
from ganglion.execute.averaging.workers import own_address, server_place

__all__ = [
    "AveragingOptions",
    "ElasticAverage",
    "ExchangeMetrics",
    "Method",
    "Packed",
    "diloco",
    "elastic_step_",
    "local_sgd",
    "own_address",
    "server_place",
    "slow_momentum",
    "sync_method",
]
