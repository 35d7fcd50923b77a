"""Memory tiers: host memory and files on disk, for optimizer state and saved activations."""

from ganglion.execute.offload.activation_tiers import open_activation_tier
from ganglion.execute.offload.activations import MIN_BYTES, ActivationOffload, Hooks, Trip
from ganglion.execute.offload.conveyor import Conveyor, Freight
from ganglion.execute.offload.freight import OptimizerFreight
from ganglion.execute.offload.store import Member, Slot, StateStore
from ganglion.execute.offload.tiers import DiskTier, HostTier, Region, Tier, open_tier
from ganglion.execute.offload.weights import MASTER, MasterWeights, ResidentWeights, Weights

__all__ = [
    "MASTER",
    "MIN_BYTES",
    "ActivationOffload",
    "Conveyor",
    "DiskTier",
    "Freight",
    "Hooks",
    "HostTier",
    "MasterWeights",
    "Member",
    "OptimizerFreight",
    "Region",
    "ResidentWeights",
    "Slot",
    "StateStore",
    "Tier",
    "Trip",
    "Weights",
    "open_activation_tier",
    "open_tier",
]
