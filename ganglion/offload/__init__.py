"""Memory tiers: host memory and files on disk, for optimizer state and saved activations."""

from ganglion.offload.conveyor import Conveyor, Freight
from ganglion.offload.disk import DiskTier
from ganglion.offload.freight import OptimizerFreight
from ganglion.offload.host import HostTier
from ganglion.offload.opening import open_tier
from ganglion.offload.store import Member, Slot, StateStore
from ganglion.offload.tier import Region, Tier
from ganglion.offload.weights import MASTER, MasterWeights, ResidentWeights, Weights

__all__ = [
    "MASTER",
    "Conveyor",
    "DiskTier",
    "Freight",
    "HostTier",
    "MasterWeights",
    "Member",
    "OptimizerFreight",
    "Region",
    "ResidentWeights",
    "Slot",
    "StateStore",
    "Tier",
    "Weights",
    "open_tier",
]
