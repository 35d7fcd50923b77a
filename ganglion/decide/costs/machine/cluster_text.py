"""Writing cluster files: the text of a cluster, with a comment beside each value.

`read_cluster` reads back what `cluster_text` writes, value by value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from ganglion.decide.costs.cluster import Cluster

_WIDTH = 32  # where comments begin


def cluster_text(
    cluster: Cluster, *, head: Sequence[str] = (), comments: Mapping[str, str] | None = None
) -> str:
    """Return a cluster as TOML.

    `head` are the lines of the comment on top; `comments` go beside values, by keys such as
    `compute.efficiency`. Values that are not given, or have their default, are left out.
    """
    notes = comments or {}
    lines = [f"# {line}".rstrip() for line in head]
    lines += ["", f'name = "{_escaped(cluster.name)}"']
    plain = ("num_nodes", "ranks_per_node", "price_per_hour")
    lines += [
        _line(name, getattr(cluster, name), notes.get(name))
        for name in plain
        if getattr(cluster, name) is not None
    ]
    for header, record in _tables(cluster):
        values = list(_values(record, header, notes))
        lines += ["", f"[{header}]", *values] if values else []
    if cluster.prefix_rates is not None:
        rates = cluster.prefix_rates.intra_gbps.items()
        inside = ", ".join(f'"{a}x{b}" = {_value(rate)}' for (a, b), rate in sorted(rates))
        lines += ["", "[prefix_rates]", f"inter_gbps = {_value(cluster.prefix_rates.inter_gbps)}"]
        lines += [f"intra_gbps = {{{inside}}}"]
    return "\n".join(lines) + "\n"


def _tables(cluster: Cluster) -> Iterator[tuple[str, Any]]:
    found = {
        "compute": cluster.compute,
        "links.intra": cluster.intra,
        "links.inter": cluster.inter,
        **{f"tiers.{name}": tier for name, tier in cluster.tiers.items()},
        "runtime": cluster.runtime,
        "stages": cluster.stages,
    }
    yield from ((header, record) for header, record in found.items() if record is not None)


def _values(record: Any, header: str, notes: Mapping[str, str]) -> Iterator[str]:
    for field in fields(record):
        value = getattr(record, field.name)
        if field.default is MISSING or value != field.default:
            yield _line(field.name, value, notes.get(f"{header}.{field.name}"))


def _line(name: str, value: object, note: str | None) -> str:
    text = f"{name} = {_value(value)}"
    return text if note is None else f"{text:{_WIDTH}}# {note}"


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(_value(one) for one in value)}]"
    return repr(value)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
