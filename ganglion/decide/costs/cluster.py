"""A cluster as the cost models see it: nodes, speed of a rank, links, tiers, times by hand.

name = "two boxes"
num_nodes = 2               # left out: as many as a plan asks for
ranks_per_node = 4
price_per_hour = 2.5        # of one rank, in any currency; left out: no cost is shown

[compute]                   # not needed where [stages] gives the times
fp32_tflops = 15.7
bf16_tflops = 125.0
efficiency = 0.5            # share of that peak which large products reach
memory_gib = 16
memory_bandwidth_gbps = 7200
activation_gbps = 7200      # of norms, activations and softmax; left out: the memory's bandwidth
update_gbps = 7200          # of weights and optimizer state in an update; left out: as above
block_s = 1e-5              # what one forward or backward of a block takes beyond its work
update_s = 1e-3             # what one update takes beyond moving weights and optimizer state
action_s = 1e-3             # time of the engine for one forward or backward of a stage

[links.intra]               # between ranks of one node
latency_s = 12e-6
bandwidth_gbps = 220        # gigaBITS a second everywhere in Ganglion: 220 is 27.5 GB/s
[links.inter]               # between nodes
latency_s = 14e-6
bandwidth_gbps = 103
collective_latency_s = 5e-6 # of a step of a collective; left out: latency_s
bucket_gbps = 200           # of sums of gradients over replicas; left out: as other collectives
collective_s = 50e-6        # what each collective takes beyond its steps; left out: 0
shared = true               # one adapter for all ranks of the node

[tiers.host]                # where a plan may keep optimizer state; also [tiers.disk]
read_gbps = 90              # of one rank, while all ranks of the node move theirs
write_gbps = 90

[runtime]                   # of the engine; left out, it overlaps everything
overlaps_messages = true    # stages compute while messages are under way
overlaps_reduction = true   # and while replicas sum gradients and update
overlaps_collectives = true # and while ranks sum and gather inside layers
shares_pieces = false       # ranks of a node read each other's pieces of weights; left out: false

[prefix_rates]              # the communication model of AxoNN-4D, for `--method axonn`
inter_gbps = 640
intra_gbps = {"1x2" = 608}  # "ranks inside x ranks of the group"

[stages]                    # seconds; a number for all stages, or a list with one for each
forward_s = [1.0, 1.2]
backward_s = 2.0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ganglion.errors import ConfigError, LayoutError

PerStage = float | tuple[float, ...]
BYTES_PER_GBIT = 1e9 / 8

# Flop a device does in fp32 while it moves one byte, where a file does not say: about 17 on a
# V100, 13 on an A100 and 5 on a CPU core.
FLOP_PER_MEMORY_BYTE = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """The speed of one rank; `jitter` is the sigma of a log-normal factor with median 1.

    `activation_gbps` is the rate at which kept activations move through the kernels that make and
    read them, which compute beside it; `update_gbps` that of weights, gradients and optimizer state
    in an update. `block_s`, `update_s` and `action_s` are the times that a
    block's forward or backward, an update, and the engine's forward or backward of a stage take
    beyond their work.
    """

    fp32_tflops: float
    bf16_tflops: float
    efficiency: float
    memory_gib: float
    memory_bandwidth_gbps: float | None = None
    activation_gbps: float | None = None
    update_gbps: float | None = None
    jitter: float = 0.0
    block_s: float = 0.0
    update_s: float = 0.0
    action_s: float = 0.0

    def peak_flops(self, precision: str) -> float:
        """Return the peak flop a second in `fp32` or a half precision."""
        return (self.fp32_tflops if precision == "fp32" else self.bf16_tflops) * 1e12

    def flops(self, precision: str) -> float:
        """Return the flop a second that large products reach in `fp32` or a half precision."""
        return self.peak_flops(precision) * self.efficiency

    @property
    def memory_bytes_per_s(self) -> float:
        """The rate of device memory, estimated from the fp32 peak where it is not given."""
        if self.memory_bandwidth_gbps is None:
            return self.fp32_tflops * 1e12 / FLOP_PER_MEMORY_BYTE
        return self.memory_bandwidth_gbps * BYTES_PER_GBIT

    @property
    def activation_bytes_per_s(self) -> float:
        """The rate of kept activations, that of device memory where it is not given."""
        return self._rate(self.activation_gbps)

    @property
    def update_bytes_per_s(self) -> float:
        """The rate of an update's bytes, that of device memory where it is not given."""
        return self._rate(self.update_gbps)

    def _rate(self, gbps: float | None) -> float:
        return self.memory_bytes_per_s if gbps is None else gbps * BYTES_PER_GBIT


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A way between two ranks, one direction; `_gbps` is gigabits (10^9 bits) a second.

    `bandwidth_gbps` is that of one message. `collective_gbps` is the bus bandwidth of a ring
    through all ranks of its nodes, where it is known: several adapters may serve such a ring.
    `bucket_gbps` is that of gradients summed over replicas, whose buckets may lie where the carrier
    need not copy them. `collective_latency_s` is that of each step of a collective, where it is not
    a message's, and `collective_s` what a collective takes beyond its steps.
    `shared`: ranks of one node that send at the same time divide the bandwidth among them.
    """

    latency_s: float
    bandwidth_gbps: float
    collective_gbps: float | None = None
    bucket_gbps: float | None = None
    collective_latency_s: float | None = None
    collective_s: float = 0.0
    shared: bool = False

    @property
    def bytes_per_s(self) -> float:
        """The bandwidth of one message in bytes a second."""
        return self.bandwidth_gbps * BYTES_PER_GBIT

    @property
    def step_s(self) -> float:
        """The latency of each step of a collective."""
        return self.latency_s if self.collective_latency_s is None else self.collective_latency_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A lower tier of memory, as one rank sees it while all ranks of its node use it."""

    read_gbps: float
    write_gbps: float

    def moved_s(self, num_bytes: float) -> float:
        """Return the time to bring in and take back `num_bytes`, both at the same time."""
        return num_bytes / (min(self.read_gbps, self.write_gbps) * BYTES_PER_GBIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """What the engine of a run can do while it computes; ours can do all of it.

    Without `overlaps_messages`, sender and receiver both stop for each message; without
    `overlaps_reduction`, a rank stops for its reduction and its update. So do the released engines
    of Megatron-LM, DeepSpeed and PipeDream-2BW. Without `overlaps_collectives`, those inside layers
    take the time of computation: where processors copy and add, and all are busy. With
    `shares_pieces`, ranks along z of one node and without a pipeline gather nothing.
    """

    overlaps_messages: bool = True
    overlaps_reduction: bool = True
    overlaps_collectives: bool = True
    shares_pieces: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRates:
    """The bandwidths of AxoNN-4D's communication model (2502.08145, section V-B; spec B.3).

    `intra_gbps` is measured for groups inside a node, by ("ranks inside", "ranks of the group").
    """

    inter_gbps: float
    intra_gbps: Mapping[tuple[int, int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTable:
    """Times and sizes written by hand: each for all stages, or one for each."""

    forward_s: PerStage
    backward_s: PerStage
    backward_weight_s: PerStage = 0.0
    reduce_s: PerStage | None = None
    update_s: PerStage = 0.0
    message_bytes: PerStage = 0
    gradient_bytes: PerStage = 0
    jitter: PerStage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A machine as the cost models see it; ranks fill its nodes in order."""

    source: str
    name: str
    num_nodes: int | None = None
    ranks_per_node: int = 1
    compute: Compute | None = None
    intra: Link | None = None
    inter: Link | None = None
    tiers: Mapping[str, Tier] = field(default_factory=dict)
    runtime: Runtime = Runtime()
    prefix_rates: PrefixRates | None = None
    price_per_hour: float | None = None
    stages: StageTable | None = None

    def require_compute(self) -> Compute:
        """Return [compute]; refuse to compute times from a model without it."""
        if self.compute is None:
            raise ConfigError(
                f"{self.source}: cluster.compute is missing, so times cannot be computed from the "
                f"model: write [compute] with the speed of a rank"
            )
        return self.compute

    def require_tier(self, name: str) -> Tier:
        """Return a tier; refuse to price moves to one whose rates are not known."""
        if name not in self.tiers:
            raise ConfigError(
                f"{self.source}: cluster.tiers.{name} is missing, so moves to it cannot be priced: "
                f"write [tiers.{name}] with read_gbps and write_gbps"
            )
        return self.tiers[name]

    def node_of(self, rank: int) -> int:
        """Return the node a rank sits on."""
        node = rank // self.ranks_per_node
        if rank < 0 or (self.num_nodes is not None and node >= self.num_nodes):
            raise LayoutError(
                f"{self.source}: rank {rank} has no place on cluster.num_nodes * ranks_per_node = "
                f"{self.num_nodes} * {self.ranks_per_node} ranks: use fewer processes, or raise "
                f"cluster.num_nodes"
            )
        return node
