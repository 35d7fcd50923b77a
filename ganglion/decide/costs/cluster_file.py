"""Reading cluster files: built-in ones by name, others by path, every value checked.

`costs.cluster` shows a whole file.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any

from ganglion.decide.costs.cluster import (
    Cluster,
    Compute,
    Link,
    PerStage,
    PrefixRates,
    Runtime,
    StageTable,
    Tier,
)
from ganglion.errors import ConfigError, UnknownKeyError


def parse_cluster(text: str, source: str) -> Cluster:
    """Read a cluster from TOML text; `source` names the file in error messages."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not valid TOML: {error}") from error
    return _cluster(_Table(tables, "cluster", source))


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
    return parse_cluster(text, str(path))


def builtin_clusters() -> list[str]:
    """Return the names of the cluster files inside the package."""
    folder = resources.files("ganglion.decide.costs").joinpath("clusters")
    names = [file.name for file in folder.iterdir()]
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def find_cluster(name_or_path: str) -> Cluster:
    """Read a built-in cluster by its name, or else a file by its path."""
    if name_or_path not in builtin_clusters():
        return read_cluster(Path(name_or_path))
    return parse_cluster(builtin_text(name_or_path), f"{name_or_path}.toml")


def builtin_text(name: str) -> str:
    """Return the text of a built-in cluster file, with its comments."""
    known = builtin_clusters()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
        raise ConfigError(f"{name!r} is no built-in cluster: {hint}")
    file = resources.files("ganglion.decide.costs").joinpath("clusters", f"{name}.toml")
    return file.read_text(encoding="utf-8")


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

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def has(self, name: str) -> bool:
        return name in self._values

    def text(self, name: str, default: str) -> str:
        value = self._values.get(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, "it must be text")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._values.get(name, default)
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
    own = [
        field.name for field in fields(Cluster) if field.name not in ("source", "intra", "inter")
    ]
    table.check_keys([*own, "links"])
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
        tiers=_tiers(table.table("tiers")),
        runtime=_runtime(table.table("runtime")),
        prefix_rates=_prefix_rates(table.table("prefix_rates")),
        price_per_hour=table.positive_or_none("price_per_hour"),
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
        activation_gbps=table.positive_or_none("activation_gbps"),
        update_gbps=table.positive_or_none("update_gbps"),
        **{name: table.number(name, 0.0) for name in ("jitter", "block_s", "update_s", "action_s")},
    )


def _link(table: _Table | None) -> Link | None:
    if table is None:
        return None
    table.check_keys([field.name for field in fields(Link)])
    return Link(
        latency_s=table.number("latency_s"),
        bandwidth_gbps=table.positive("bandwidth_gbps"),
        collective_gbps=table.positive_or_none("collective_gbps"),
        bucket_gbps=table.positive_or_none("bucket_gbps"),
        collective_latency_s=table.number("collective_latency_s")
        if table.has("collective_latency_s")
        else None,
        shared=table.flag("shared", False),
        collective_s=table.number("collective_s", 0.0),
    )


def _tiers(table: _Table | None) -> dict[str, Tier]:
    if table is None:
        return {}
    table.check_keys(["host", "disk"])
    return {name: _tier(table.table(name)) for name in table}


def _tier(table: _Table | None) -> Tier:
    assert table is not None, "only tiers that are there are read"
    table.check_keys([field.name for field in fields(Tier)])
    return Tier(read_gbps=table.positive("read_gbps"), write_gbps=table.positive("write_gbps"))


def _runtime(table: _Table | None) -> Runtime:
    if table is None:
        return Runtime()
    defaults = {field.name: bool(field.default) for field in fields(Runtime)}
    table.check_keys([*defaults])
    return Runtime(**{name: table.flag(name, default) for name, default in defaults.items()})


def _prefix_rates(table: _Table | None) -> PrefixRates | None:
    if table is None:
        return None
    table.check_keys([field.name for field in fields(PrefixRates)])
    inside = table.table("intra_gbps") or _Table({}, "cluster.prefix_rates", table.source)
    rates = {}
    for name in inside:
        numbers = re.fullmatch(r"(\d+)x(\d+)", name)
        if numbers is None:
            raise inside.wrong(name, 'name it "2x4": ranks inside the group, ranks of the group')
        rates[int(numbers[1]), int(numbers[2])] = inside.positive(name)
    return PrefixRates(inter_gbps=table.positive("inter_gbps"), intra_gbps=rates)


def _stages(table: _Table | None) -> StageTable | None:
    if table is None:
        return None
    names = [field.name for field in fields(StageTable)]
    table.check_keys(names)
    needed = ("forward_s", "backward_s")
    return StageTable(**{n: table.per_stage(n) for n in names if table.has(n) or n in needed})
