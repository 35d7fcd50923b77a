"""The cluster file: nodes, speed of a rank, links, or times measured by hand.

name = "two boxes"
num_nodes = 2               # left out: as many as a plan asks for
ranks_per_node = 4

[compute]                   # not needed where [stages] gives the times
fp32_tflops = 15.7
bf16_tflops = 125.0
efficiency = 0.5            # share of that peak which a model really reaches
memory_gib = 16

[links.intra]               # between ranks of one node
latency_s = 12e-6
bandwidth_gbps = 220        # gigaBITS a second everywhere in Ganglion: 220 is 27.5 GB/s
[links.inter]               # between nodes
latency_s = 14e-6
bandwidth_gbps = 103
shared = true               # one adapter for all ranks of the node

[stages]                    # seconds; a number for all stages, or a list with one for each
forward_s = [1.0, 1.2]
backward_s = 2.0
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

from ganglion.errors import ConfigError, LayoutError, UnknownKeyError

PerStage = float | tuple[float, ...]
BYTES_PER_GBIT = 1e9 / 8

# Flop a device does in fp32 while it moves one byte, where a file does not say: about 17 on a
# V100, 13 on an A100 and 5 on a CPU core.
FLOP_PER_MEMORY_BYTE = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """The speed of one rank; `jitter` is the sigma of a log-normal factor with median 1."""

    fp32_tflops: float
    bf16_tflops: float
    efficiency: float
    memory_gib: float
    memory_bandwidth_gbps: float | None = None
    jitter: float = 0.0

    def flops(self, precision: str) -> float:
        """Return the flop a second that a model reaches in `fp32` or `bf16`."""
        peak = self.fp32_tflops if precision == "fp32" else self.bf16_tflops
        return peak * 1e12 * self.efficiency

    @property
    def memory_bytes_per_s(self) -> float:
        """The rate of device memory, estimated from the fp32 peak where it is not given."""
        if self.memory_bandwidth_gbps is None:
            return self.fp32_tflops * 1e12 / FLOP_PER_MEMORY_BYTE
        return self.memory_bandwidth_gbps * BYTES_PER_GBIT


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A way between two ranks, one direction; `_gbps` is gigabits (10^9 bits) a second.

    `bandwidth_gbps` is that of one message. `collective_gbps` is the bus bandwidth of a ring
    through all ranks of its nodes, where it is known: several adapters may serve such a ring.
    `shared`: ranks of one node that send at the same time divide the bandwidth among them.
    """

    latency_s: float
    bandwidth_gbps: float
    collective_gbps: float | None = None
    shared: bool = False

    @property
    def bytes_per_s(self) -> float:
        """The bandwidth of one message in bytes a second."""
        return self.bandwidth_gbps * BYTES_PER_GBIT


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
    stages: StageTable | None = None

    @classmethod
    def from_toml(cls, text: str, source: str) -> Cluster:
        """Read a cluster from TOML text; `source` names the file in error messages."""
        try:
            tables = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{source} is not valid TOML: {error}") from error
        return _cluster(_Table(tables, "cluster", source))

    def require_compute(self) -> Compute:
        """Return [compute]; refuse to compute times from a model without it."""
        if self.compute is None:
            raise ConfigError(
                f"{self.source}: cluster.compute is missing, so times cannot be computed from the "
                f"model: write [compute] with the speed of a rank"
            )
        return self.compute

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


def read_cluster(path: Path) -> Cluster:
    """Read a cluster file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(
            f"cluster file {path} does not exist; check the path, or name a built-in one of "
            f"{builtin_clusters()}"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cluster file {path} cannot be read: {error}") from error
    return Cluster.from_toml(text, str(path))


def builtin_clusters() -> list[str]:
    """Return the names of the cluster files inside the package."""
    folder = resources.files("ganglion.decide.costs").joinpath("clusters")
    names = [file.name for file in folder.iterdir()]
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def find_cluster(name_or_path: str) -> Cluster:
    """Read a built-in cluster by its name, or else a file by its path."""
    if name_or_path not in builtin_clusters():
        return read_cluster(Path(name_or_path))
    file = resources.files("ganglion.decide.costs").joinpath("clusters", f"{name_or_path}.toml")
    return Cluster.from_toml(file.read_text(encoding="utf-8"), f"{name_or_path}.toml")


class _Table:
    """One table of the file: hands out checked values and knows its own key."""

    def __init__(self, values: Mapping[str, Any], key: str, source: str) -> None:
        self._values = values
        self._key = key
        self.source = source

    def check_keys(self, known: list[str]) -> None:
        for name in self._values:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
                hint = f"did you mean {self._path(near[0])!r}?" if near else f"known are {known}"
                raise UnknownKeyError(f"{self.source}: unknown key {self._path(name)!r}; {hint}")

    def table(self, name: str) -> _Table | None:
        if name not in self._values:
            return None
        if not isinstance(self._values[name], Mapping):
            header = self._path(name).removeprefix("cluster.")
            raise self.wrong(name, f"it must be a table, written under [{header}]")
        return _Table(self._values[name], self._path(name), self.source)

    def has(self, name: str) -> bool:
        return name in self._values

    def text(self, name: str, default: str) -> str:
        value = self._values.get(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, "it must be text")
        return value

    def flag(self, name: str) -> bool:
        value = self._values.get(name, False)
        if not isinstance(value, bool):
            raise self.wrong(name, "it must be true or false")
        return value

    def count(self, name: str) -> int | None:
        value = self._values.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise self.wrong(name, "it must be a whole number of 1 or more")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number of 0 or more; without a default the key must be there."""
        if name not in self._values:
            if default is None:
                raise ConfigError(f"{self.source}: {self._path(name)} is missing: write it")
            return default
        return self._checked(name, self._values[name])

    def positive(self, name: str) -> float:
        value = self.number(name)
        if value == 0:
            raise self.wrong(name, "it must be more than 0")
        return value

    def positive_or_none(self, name: str) -> float | None:
        return self.positive(name) if self.has(name) else None

    def per_stage(self, name: str) -> PerStage:
        value = self._values.get(name)
        if not isinstance(value, list):
            return self.number(name)
        if not value:
            raise self.wrong(name, "a list needs one number for each stage")
        return tuple(self._checked(name, item) for item in value)

    def wrong(self, name: str, complaint: str) -> ConfigError:
        given = f"{self._path(name)} = {self._values[name]!r}"
        return ConfigError(f"{self.source}: {given} cannot be used: {complaint}")

    def _checked(self, name: str, value: object) -> float:
        # TOML's true is Python's 1, and TOML can write inf and nan.
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "it must be a number")
        if not math.isfinite(value) or value < 0:
            raise self.wrong(name, "it must be a finite number of 0 or more")
        return value

    def _path(self, name: str) -> str:
        return f"{self._key}.{name}"


def _cluster(table: _Table) -> Cluster:
    table.check_keys(["name", "num_nodes", "ranks_per_node", "compute", "links", "stages"])
    links = table.table("links") or _Table({}, "cluster.links", table.source)
    links.check_keys(["intra", "inter"])
    cluster = Cluster(
        source=table.source,
        name=table.text("name", Path(table.source).stem),
        num_nodes=table.count("num_nodes"),
        ranks_per_node=table.count("ranks_per_node") or 1,
        compute=_compute(table.table("compute")),
        intra=_link(links.table("intra")),
        inter=_link(links.table("inter")),
        stages=_stages(table.table("stages")),
    )
    _check_complete(cluster)
    return cluster


def _check_complete(cluster: Cluster) -> None:
    """Refuse a file that lacks a part which its own numbers of nodes and ranks call for."""
    if cluster.compute is None and cluster.stages is None:
        raise ConfigError(
            f"{cluster.source}: cluster.compute and cluster.stages are both missing: write "
            f"[compute] with the speed of a rank, or [stages] with times"
        )
    if cluster.ranks_per_node > 1 and cluster.intra is None:
        raise ConfigError(
            f"{cluster.source}: cluster.links.intra is missing, but cluster.ranks_per_node = "
            f"{cluster.ranks_per_node}: write [links.intra] with latency_s and bandwidth_gbps"
        )
    if cluster.num_nodes != 1 and cluster.inter is None:
        nodes = "not limited" if cluster.num_nodes is None else cluster.num_nodes
        raise ConfigError(
            f"{cluster.source}: cluster.links.inter is missing, but cluster.num_nodes is {nodes}: "
            f"write [links.inter] with latency_s and bandwidth_gbps, or num_nodes = 1"
        )


def _compute(table: _Table | None) -> Compute | None:
    if table is None:
        return None
    table.check_keys([field.name for field in fields(Compute)])
    efficiency = table.positive("efficiency")
    if efficiency > 1:
        raise table.wrong("efficiency", "it is a share of the peak, at most 1")
    return Compute(
        fp32_tflops=table.positive("fp32_tflops"),
        bf16_tflops=table.positive("bf16_tflops"),
        efficiency=efficiency,
        memory_gib=table.positive("memory_gib"),
        memory_bandwidth_gbps=table.positive_or_none("memory_bandwidth_gbps"),
        jitter=table.number("jitter", 0.0),
    )


def _link(table: _Table | None) -> Link | None:
    if table is None:
        return None
    table.check_keys([field.name for field in fields(Link)])
    return Link(
        latency_s=table.number("latency_s"),
        bandwidth_gbps=table.positive("bandwidth_gbps"),
        collective_gbps=table.positive_or_none("collective_gbps"),
        shared=table.flag("shared"),
    )


def _stages(table: _Table | None) -> StageTable | None:
    if table is None:
        return None
    names = [field.name for field in fields(StageTable)]
    table.check_keys(names)
    needed = ("forward_s", "backward_s")
    return StageTable(**{n: table.per_stage(n) for n in names if table.has(n) or n in needed})
