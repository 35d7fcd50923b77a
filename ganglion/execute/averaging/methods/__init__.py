"""The equations of the averaging methods, over packed weights.

Holds synchronous methods, shared memory and their parts; no sockets, launchers or user options.
"""

from ganglion.execute.averaging.methods.centers import (
    Center,
    DeltaCenter,
    ReplicatedCenter,
    RootCenter,
)
from ganglion.execute.averaging.methods.compress import CompressedSum, make_codec
from ganglion.execute.averaging.methods.hogwild import HogwildEasgd, HogwildSgd
from ganglion.execute.averaging.methods.method import (
    Method,
    NoOverlap,
    State,
    elastic_force,
    elastic_step_,
)
from ganglion.execute.averaging.methods.metrics import BREAKDOWN, ExchangeMetrics, Motion, Stopwatch
from ganglion.execute.averaging.methods.outer import (
    OuterAveraging,
    OuterFactory,
    diloco,
    local_sgd,
    slow_momentum,
)
from ganglion.execute.averaging.methods.packed import Packed
from ganglion.execute.averaging.methods.shared_center import SharedCenter
from ganglion.execute.averaging.methods.sums import Bounds, GroupSum, Meter, Sum, Votes
from ganglion.execute.averaging.methods.sync import MEAN_OF, SUM_OF, SyncEasgd, SyncSgd
from ganglion.execute.averaging.methods.tree import TreeGroup

__all__ = [
    "BREAKDOWN",
    "MEAN_OF",
    "SUM_OF",
    "Bounds",
    "Center",
    "CompressedSum",
    "DeltaCenter",
    "ExchangeMetrics",
    "GroupSum",
    "HogwildEasgd",
    "HogwildSgd",
    "Meter",
    "Method",
    "Motion",
    "NoOverlap",
    "OuterAveraging",
    "OuterFactory",
    "Packed",
    "ReplicatedCenter",
    "RootCenter",
    "SharedCenter",
    "State",
    "Stopwatch",
    "Sum",
    "SyncEasgd",
    "SyncSgd",
    "TreeGroup",
    "Votes",
    "diloco",
    "elastic_force",
    "elastic_step_",
    "local_sgd",
    "make_codec",
    "slow_momentum",
]
