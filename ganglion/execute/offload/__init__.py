"""Memory tiers: host memory and files on disk, for optimizer state and saved activations."""

from ganglion.execute.offload.activation_tiers import open_activation_tier
from ganglion.execute.offload.activations import MIN_BYTES, ActivationOffload, Hooks, SavedTensors
from ganglion.execute.offload.bucket_mover import BucketMover, BucketState
from ganglion.execute.offload.optimizer_buckets import OptimizerBuckets
from ganglion.execute.offload.store import Member, Slot, StateStore
from ganglion.execute.offload.tiers import DiskTier, HostTier, Region, Tier, open_tier, page_buffer
from ganglion.execute.offload.weights import MASTER, MasterWeights, ResidentWeights, Weights

__all__ = [
    "MASTER",
    "MIN_BYTES",
    "ActivationOffload",
    "BucketMover",
    "BucketState",
    "DiskTier",
    "Hooks",
    "HostTier",
    "MasterWeights",
    "Member",
    "OptimizerBuckets",
    "Region",
    "ResidentWeights",
    "SavedTensors",
    "Slot",
    "StateStore",
    "Tier",
    "Weights",
    "open_activation_tier",
    "open_tier",
    "page_buffer",
]
