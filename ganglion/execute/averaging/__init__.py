"""Elastic averaging: workers that train on their own and are drawn to a shared centre."""

from ganglion.execute.averaging.average import ElasticAverage
from ganglion.execute.averaging.choosing import Wishes, choose_method
from ganglion.execute.averaging.methods import (
    ExchangeMetrics,
    Method,
    Packed,
    diloco,
    elastic_step_,
    local_sgd,
    slow_momentum,
)
from ganglion.execute.averaging.workers import own_address, server_place

__all__ = [
    "ElasticAverage",
    "ExchangeMetrics",
    "Method",
    "Packed",
    "Wishes",
    "choose_method",
    "diloco",
    "elastic_step_",
    "local_sgd",
    "own_address",
    "server_place",
    "slow_momentum",
]
