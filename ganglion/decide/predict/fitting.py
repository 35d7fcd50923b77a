"""A cluster file from what the ranks of a machine measured.

Rates are fitted to forwards, backwards and updates of small models, together with products alone
that come near the best: repeated on the same numbers, those find them in the cache and show the
rate of flop, as no training does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from ganglion.decide.costs import (
    BUCKET,
    FLOP,
    Cluster,
    Fit,
    FitError,
    Link,
    Runtime,
    Tier,
    Timing,
    cluster_text,
    compute_from,
    fit_times,
    link_from,
)
from ganglion.units import GIB

MESSAGE, AT_ONCE = "message", "messages at once"
# Messages of all pairs at once that take so much longer than those of one share a way.
_SHARES = 1.5
_NEAR_PEAK = 0.7
# Where less of a collective than this is hidden behind computation, it takes the time of it.
_HIDES = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured on a machine; times of the same label on several ranks are one median."""

    name: str
    device: str
    num_nodes: int
    ranks_per_node: int
    num_threads: int
    memory_bytes: int
    fp32_flops: float
    bf16_flops: float
    products: Sequence[Timing]
    training: Sequence[Timing]
    links: Mapping[str, Sequence[Timing]]
    hidden_share: float
    shares_memory: bool
    tiers: Mapping[str, Tier]


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """One measured time beside the fitted one."""

    group: str
    kind: str
    label: str
    measured_s: float
    fitted_s: float

    @property
    def error(self) -> float:
        """(fitted - measured) / measured."""
        return self.fitted_s / self.measured_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedCluster:
    """A cluster, and how far its numbers are from the times they were fitted to, by group."""

    cluster: Cluster
    measured: Measured
    errors: Mapping[str, Sequence[FitError]]
    residuals: Sequence[Residual]

    def text(self) -> str:
        """Return the cluster file."""
        return cluster_text(self.cluster, head=_head(self), comments=_comments(self))


def together(ranks: Iterable[Sequence[Timing]]) -> list[Timing]:
    """Return the median over ranks of the times that have the same kind and label."""
    found: dict[tuple[str, str], list[Timing]] = {}
    for timings in ranks:
        for timing in timings:
            found.setdefault((timing.kind, timing.label), []).append(timing)
    return [replace(same[0], seconds=median(t.seconds for t in same)) for same in found.values()]


def fit_cluster(measured: Measured) -> FittedCluster:
    """Fit the numbers of a cluster file; raise DataError where there are too few times."""
    computing = [*_large(measured.products), *measured.training]
    training = fit_times(computing, "training")
    groups: dict[str, tuple[Fit, Sequence[Timing]]] = {"compute": (training, computing)}
    links: dict[str, Link] = {}
    for name, timings in measured.links.items():
        messages = [one for one in timings if one.kind == MESSAGE]
        buckets = [one for one in timings if one.kind == BUCKET]
        rings = [one for one in timings if one.kind not in (MESSAGE, AT_ONCE, BUCKET)]
        of_messages = fit_times(messages, f"messages ({name})")
        of_rings = fit_times(rings, f"collectives ({name})") if rings else None
        enough = buckets and len(buckets) > len(buckets[0].terms)
        of_buckets = fit_times(buckets, f"buckets ({name})") if enough else None
        groups[f"links.{name}, messages"] = (of_messages, messages)
        if of_rings is not None:
            groups[f"links.{name}, collectives"] = (of_rings, rings)
        if of_buckets is not None:
            groups[f"links.{name}, buckets"] = (of_buckets, buckets)
        links[name] = link_from(of_messages, of_rings, of_buckets, shared=_is_shared(timings))
    compute = compute_from(
        training,
        fp32_flops=measured.fp32_flops,
        bf16_flops=measured.bf16_flops,
        memory_gib=measured.memory_bytes / GIB,
    )
    cluster = Cluster(
        source=measured.name,
        name=measured.name,
        num_nodes=measured.num_nodes,
        ranks_per_node=measured.ranks_per_node,
        compute=compute,
        intra=links.get("intra"),
        inter=links.get("inter"),
        tiers=dict(measured.tiers),
        runtime=Runtime(
            overlaps_collectives=measured.hidden_share >= _HIDES,
            shares_pieces=measured.shares_memory,
        ),
    )
    return FittedCluster(
        cluster=cluster,
        measured=measured,
        errors={name: fit.errors(timings) for name, (fit, timings) in groups.items()},
        residuals=[
            Residual(
                group=name,
                kind=one.kind,
                label=one.label,
                measured_s=one.seconds,
                fitted_s=fit.time_s(one),
            )
            for name, (fit, timings) in groups.items()
            for one in timings
        ],
    )


def _large(products: Sequence[Timing]) -> list[Timing]:
    """Return the products that are limited by their flop, without the bytes that stay in cache."""
    rates = {one.label: one.terms[FLOP] / one.seconds for one in products}
    limit = _NEAR_PEAK * max(rates.values())
    near = (one for one in products if rates[one.label] >= limit)
    return [replace(one, terms={FLOP: one.terms[FLOP]}) for one in near]


def _is_shared(timings: Sequence[Timing]) -> bool:
    """Return whether large messages are slower while other pairs send, too."""
    alone = {one.label: one.seconds for one in timings if one.kind == MESSAGE}
    at_once = {one.label: one.seconds for one in timings if one.kind == AT_ONCE}
    largest = list(alone)[-1]
    return largest in at_once and at_once[largest] > _SHARES * alone[largest]


def _head(fitted: FittedCluster) -> list[str]:
    found = fitted.measured
    ranks = found.num_nodes * found.ranks_per_node
    lines = [
        f"Measured by `ganglion profile`: {ranks} rank{'s' * (ranks > 1)} on {found.device}, "
        f"{found.num_threads} thread{'s' * (found.num_threads > 1)} each.",
        "",
        "All ranks measured at the same time. The fit's relative errors, median and worst:",
    ]
    for group, errors in fitted.errors.items():
        for one in errors:
            lines.append(
                f"  {group + ', ' + one.kind:48} {one.median:6.1%} {one.worst:6.1%} of "
                f"{one.num_timings} times"
            )
    return [*lines, "Everywhere `_gbps` is gigabits a second: 8 is 1 GB/s."]


def _comments(fitted: FittedCluster) -> dict[str, str]:
    products = max(fitted.measured.products, key=lambda one: one.terms[FLOP] / one.seconds)
    found = {
        "compute.fp32_tflops": f"the best product, {products.label}",
        "compute.bf16_tflops": "the best product in bf16",
        "compute.efficiency": "forward and backward of small models",
        "compute.memory_bandwidth_gbps": "operands of products, while training",
        "compute.activation_gbps": "norms, activations, softmax",
        "compute.update_gbps": "AdamW",
        "compute.block_s": "a block's own time",
        "compute.update_s": "an update's own time",
        "compute.action_s": "the engine's own time",
        "runtime.overlaps_collectives": (
            f"{fitted.measured.hidden_share:.0%} of an all-reduce was hidden behind products"
        ),
    }
    for name in fitted.measured.links:
        found[f"links.{name}.latency_s"] = "messages there and back, one pair at a time"
        found[f"links.{name}.collective_gbps"] = "all groups of a size at once"
    for name in fitted.measured.tiers:
        found[f"tiers.{name}.read_gbps"] = "all ranks at once"
    return found
