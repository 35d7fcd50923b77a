"""Elastic averaging: workers that train on their own and are drawn to a shared centre."""

from ganglion.averaging.average import ElasticAverage
from ganglion.averaging.elastic import elastic_step_
from ganglion.averaging.method import ExchangeMetrics, Method
from ganglion.averaging.outer import diloco, local_sgd, slow_momentum
from ganglion.averaging.packed import Packed

__all__ = [
    "ElasticAverage",
    "ExchangeMetrics",
    "Method",
    "Packed",
    "diloco",
    "elastic_step_",
    "local_sgd",
    "slow_momentum",
]
