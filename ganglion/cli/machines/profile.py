"""`ganglion profile`: measure this machine, fit the cost model to it, write a cluster file."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from ganglion.cli.environment import usable_cores
from ganglion.cli.machines.written import check_target
from ganglion.decide.costs import BYTES_PER_GBIT, Tier, rounded
from ganglion.decide.predict import FittedCluster, Measured, fit_cluster, together
from ganglion.decide.topology import Launch, read_launch
from ganglion.errors import ConfigError, LaunchError
from ganglion.units import format_time

if TYPE_CHECKING:
    from ganglion.cli.launch import RankProfile
    from ganglion.execute.measure import ProductTime, ProfileSizes

_WORST_SHOWN = 5
_FOLDER = "ganglion-profile-"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """The options of the command."""

    nproc: int | None
    quick: bool
    write: Path | None
    name: str


def profile_command(request: ProfileRequest, *, as_json: bool) -> None:
    """Measure, fit, print, and write the cluster file if asked.

    Under torchrun or srun this process is one of the ranks, on as many nodes as there are; rank 0
    prints and writes what it measured.
    """
    import torch

    from ganglion.execute.measure import profile_sizes

    launch = read_launch(os.environ)
    _check(request, launch)
    sizes = profile_sizes(quick=request.quick, has_device=torch.accelerator.is_available())
    if launch.launcher == "alone":
        ranks = run_ranks(request.nproc or default_ranks(), sizes)
    else:
        ranks = {launch.rank: _run_as_rank(sizes)}
    if launch.rank:
        return
    fitted = fit_cluster(measured_of(ranks, request.name))
    if request.write is not None:
        request.write.write_text(fitted.text(), encoding="utf-8")
    if as_json:
        print(json.dumps(record_of(fitted, ranks), indent=2))
        return
    _print(fitted, ranks, request.write)


def default_ranks() -> int:
    """Return a rank for each device, or for each usable core where there is none."""
    import torch

    if torch.accelerator.is_available():
        return torch.accelerator.device_count()
    return usable_cores()


def measured_of(ranks: Mapping[int, RankProfile], name: str) -> Measured:
    """Return what all ranks measured, as one."""
    first = ranks[min(ranks)]
    profiles = list(ranks.values())
    mine = [[p for p in one.products if _is_used(p, one)] for one in profiles]
    return Measured(
        name=name,
        device=first.device,
        num_nodes=first.num_nodes,
        ranks_per_node=first.ranks_per_node,
        num_threads=first.num_threads,
        memory_bytes=first.memory_bytes,
        fp32_flops=_peak(profiles, "fp32"),
        bf16_flops=_peak(profiles, "bf16"),
        products=together([p.timing() for p in products] for products in mine),
        training=together(one.timings for one in profiles),
        links=first.links,
        shares_memory=first.carrier == "shm" and first.device == "cpu",
        hidden_share=median(one.hidden_share for one in profiles),
        tiers=_tiers(profiles),
    )


def _is_used(product: ProductTime, profile: RankProfile) -> bool:
    return product.precision == "fp32" and product.num_threads == profile.num_threads


def _peak(profiles: list[RankProfile], precision: str) -> float:
    """Return the best rate of a rank, the median of all ranks."""
    return median(
        max(p.flops for p in one.products if p.precision == precision) for one in profiles
    )


def _tiers(profiles: list[RankProfile]) -> dict[str, Tier]:
    return {
        tier.name: Tier(
            read_gbps=rounded(tier.read_bytes_per_s / BYTES_PER_GBIT),
            write_gbps=rounded(tier.write_bytes_per_s / BYTES_PER_GBIT),
        )
        for tier in profiles[0].tiers
    }


def _check(request: ProfileRequest, launch: Launch) -> None:
    if launch.launcher == "mpiexec":
        raise ConfigError(
            "profile measures over shared memory and torch.distributed, but mpiexec started this "
            "process: call `ganglion profile` directly, or with torchrun or srun on several nodes"
        )
    if launch.launcher != "alone" and request.nproc is not None:
        raise ConfigError(
            f"--nproc {request.nproc}, but {launch.launcher} has started {launch.num_ranks} "
            f"processes already: leave out --nproc"
        )
    check_target(request.write)


def _run_as_rank(sizes: ProfileSizes) -> RankProfile:
    from ganglion.cli.launch import profile_ranks

    with tempfile.TemporaryDirectory(prefix=_FOLDER, dir=".") as folder:
        return profile_ranks(sizes, folder)


def run_ranks(num_ranks: int, sizes: ProfileSizes) -> dict[int, RankProfile]:
    """Measure on so many local ranks; return what each found."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    from ganglion.cli.launch import launch_config, profile_ranks

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix=_FOLDER, dir=".") as folder:
        config = launch_config(num_ranks, DefaultLogsSpecs(log_dir=folder))
        try:
            found: dict[int, RankProfile] = elastic_launch(config, profile_ranks)(sizes, folder)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            raise LaunchError(
                f"rank {rank} of the profile failed: {failure.message}; try fewer ranks with "
                f"--nproc, or see what `ganglion doctor` says"
            ) from error
    return found


# --- what is printed -----------------------------------------------------------------------------


def record_of(fitted: FittedCluster, ranks: Mapping[int, RankProfile]) -> dict[str, Any]:
    """Return all figures, for machines."""
    cluster = fitted.cluster
    return {
        "cluster": {
            "name": cluster.name,
            "num_nodes": cluster.num_nodes,
            "ranks_per_node": cluster.ranks_per_node,
            "compute": cluster.compute and asdict(cluster.compute),
            "links": {
                name: asdict(link)
                for name, link in (("intra", cluster.intra), ("inter", cluster.inter))
                if link is not None
            },
            "tiers": {name: asdict(tier) for name, tier in cluster.tiers.items()},
            "runtime": asdict(cluster.runtime),
        },
        "errors": {group: list(map(asdict, found)) for group, found in fitted.errors.items()},
        "times": [{**asdict(one), "error": one.error} for one in fitted.residuals],
        "products": [
            {**asdict(product), "rank": rank, "flops": product.flops}
            for rank, profile in sorted(ranks.items())
            for product in profile.products
        ],
    }


def _print(fitted: FittedCluster, ranks: Mapping[int, RankProfile], written: Path | None) -> None:
    console = Console(highlight=False)
    console.print(_products_table(ranks))
    console.print(_errors_table(fitted))
    console.print(_worst_table(fitted))
    console.print(fitted.text().split("\n\n", 1)[1].rstrip(), markup=False, soft_wrap=True)
    if written is not None:
        console.print(
            f"\nwritten to {written}: use it as --cluster {written}", markup=False, soft_wrap=True
        )


def _table(title: str, *columns: str, left: int = 1) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right")
    return table


def _products_table(ranks: Mapping[int, RankProfile]) -> Table:
    """Return the rate of each product on a rank, the median of all, by precision and threads."""
    rates: dict[str, dict[str, list[float]]] = {}
    for profile in ranks.values():
        for one in profile.products:
            way = one.precision + (f", {one.num_threads} threads" if one.num_threads > 1 else "")
            shape = f"{one.m} x {one.k} x {one.n}"
            rates.setdefault(shape, {}).setdefault(way, []).append(one.flops)
    ways = list(dict.fromkeys(way for found in rates.values() for way in found))
    table = _table("products, Gflop/s of a rank", "m x k x n", *ways)
    for shape, found in rates.items():
        cells = (f"{median(found[way]) / 1e9:.1f}" if way in found else "" for way in ways)
        table.add_row(shape, *cells)
    return table


def _errors_table(fitted: FittedCluster) -> Table:
    table = _table("errors of the fit", "", "of", "times", "median", "worst", left=2)
    for group, errors in fitted.errors.items():
        for one in errors:
            table.add_row(
                group, one.kind, str(one.num_timings), f"{one.median:.1%}", f"{one.worst:.1%}"
            )
    return table


def _worst_table(fitted: FittedCluster) -> Table:
    table = _table("farthest from the fit", "", "of", "measured", "fitted", "error", left=2)
    worst = sorted(fitted.residuals, key=lambda one: -abs(one.error))[:_WORST_SHOWN]
    for one in worst:
        table.add_row(
            one.kind,
            one.label,
            format_time(one.measured_s),
            format_time(one.fitted_s),
            f"{one.error:+.1%}",
        )
    return table
