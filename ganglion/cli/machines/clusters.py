"""`ganglion clusters`: the built-in cluster files, as a table, or one of them as text."""

from __future__ import annotations

import itertools
import json
from typing import Any

from rich.console import Console
from rich.table import Table

from ganglion.decide.costs import Link, builtin_clusters, builtin_text, parse_cluster


def clusters_command(name: str | None, *, as_json: bool) -> None:
    """Print one cluster file, or the table of all."""
    if name is not None:
        text = builtin_text(name)
        print(json.dumps(_record(name, text), indent=2) if as_json else text.rstrip())
        return
    records = [_record(one, builtin_text(one)) for one in builtin_clusters()]
    if as_json:
        print(json.dumps(records, indent=2))
        return
    _print(records)


def _record(name: str, text: str) -> dict[str, Any]:
    cluster = parse_cluster(text, f"{name}.toml")
    compute = cluster.compute
    return {
        "name": name,
        "from": _first_comment(text),
        "num_nodes": cluster.num_nodes,
        "ranks_per_node": cluster.ranks_per_node,
        "memory_gib": compute and compute.memory_gib,
        "fp32_tflops": compute and compute.fp32_tflops,
        "bf16_tflops": compute and compute.bf16_tflops,
        "intra_gbps": _gbps(cluster.intra),
        "inter_gbps": _gbps(cluster.inter),
        "tiers": sorted(cluster.tiers),
        "price_per_hour": cluster.price_per_hour,
    }


def _first_comment(text: str) -> str:
    """Return where the numbers come from: the first paragraph of the comment on top."""
    lines = itertools.takewhile(lambda line: line.startswith("# "), text.splitlines())
    return " ".join(line.removeprefix("# ").strip() for line in lines)


def _gbps(link: Link | None) -> float | None:
    return None if link is None else link.bandwidth_gbps


def _print(records: list[dict[str, Any]]) -> None:
    table = Table(box=None)
    columns = ("node", "GiB", "fp32", "bf16", "inside", "between", "tiers", "price")
    for column in ("name", *columns):
        left = column in ("name", "tiers")
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    for one in records:
        keys = ("memory_gib", "fp32_tflops", "bf16_tflops", "intra_gbps", "inter_gbps")
        table.add_row(
            one["name"],
            str(one["ranks_per_node"]),
            *(_number(one[key]) for key in keys),
            " ".join(one["tiers"]),
            _number(one["price_per_hour"]),
        )
    console = Console(highlight=False)
    console.print(table)
    for one in records:
        console.print(f"{one['name']}: {one['from']}", markup=False, soft_wrap=True)
    console.print(
        "devices of a node, peaks in Tflop/s and price an hour of one, links in gigabits/s; "
        "`ganglion clusters NAME` prints a file, `ganglion profile --write` makes one",
        soft_wrap=True,
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"
