"""Published measurements beside what the planner predicts: the tables of docs/planner.md.

    python -m benchmarks.planner.published

Rows with a configuration are priced as it was run; of others, whose configurations are not
published, the planner chooses. One calibrated rate per machine (its cluster file).
"""

from __future__ import annotations

from collections.abc import Iterator

import ganglion

# Model, GPUs, configuration, measured seconds a batch: AxoNN (2110.13005), table II, figure 9.
AXONN = (
    ("gpt-12b", 48, "pipe=6,data=8,microbatch=8", 247.5),
    ("gpt-24b", 96, "pipe=12,data=8,microbatch=4", 245.6),
    ("gpt-50b", 192, "pipe=24,data=8,microbatch=4", 266.7),
    ("gpt-100b", 384, "pipe=48,data=8,microbatch=2", 289.0),
)
AXONN_FIX = "order=pipe-data,schedule=axonn,recompute=full,offload=host"
# Cluster, model, ranks, seconds a batch of 8192: AxoNN-4D (2502.08145), table III.
WEAK_SCALING = (
    ("perlmutter", "axonn4d-5b", 512, 8.96),
    ("perlmutter", "axonn4d-10b", 1024, 7.42),
    ("perlmutter", "axonn4d-20b", 2048, 7.97),
    ("perlmutter", "axonn4d-40b", 4096, 8.77),
    ("frontier", "axonn4d-5b", 512, 17.91),
    ("frontier", "axonn4d-10b", 1024, 18.98),
    ("frontier", "axonn4d-20b", 2048, 19.29),
    ("frontier", "axonn4d-40b", 4096, 18.38),
    ("frontier", "axonn4d-80b", 8192, 18.48),
    ("frontier", "axonn4d-160b", 16384, 20.65),
    ("frontier", "axonn4d-320b", 32768, 30.74),
)
# Without a pipeline, with recomputation and all samples of a rank at once, as those runs were.
WEAK_SCALING_FIX = "pipe=1,recompute=full,offload=none"
# Model and published depth: PipeDream-2BW (2006.09503), section 5.2, 64 V100s.
DEPTHS = (("gpt-2.2b", 8), ("gpt-3.8b", 16))

Row = tuple[str, ...]


def axonn_rows() -> Iterator[Row]:
    for model, gpus, fix, measured_s in AXONN:
        best = ganglion.plan(
            model, cluster="summit", gpus=gpus, batch=16384, fix=f"{fix},{AXONN_FIX}", top=1
        ).best
        yield _row(f"{model}, {gpus} V100", fix, best.step_s, measured_s)


def weak_scaling_rows() -> Iterator[Row]:
    for cluster, model, gpus, measured_s in WEAK_SCALING:
        found = ganglion.plan(
            model, cluster=cluster, gpus=gpus, batch=8192, fix=WEAK_SCALING_FIX, top=1
        )
        yield _row(
            f"{model}, {gpus} of {cluster}", found.best.layout, found.best.step_s, measured_s
        )


def depth_rows() -> Iterator[Row]:
    for model, depth in DEPTHS:
        found = ganglion.plan(
            model,
            cluster="p3.16xlarge",
            gpus=64,
            batch=512,
            method="pipedream_2bw",
            fix="recompute=full",
        )
        own = ganglion.plan(model, cluster="p3.16xlarge", gpus=64, batch=512).best
        chosen = f"{own.layout}, {own.plan.schedule}"
        yield (f"{model}, 64 V100", str(depth), str(found.best.plan.pipe), chosen)


def headline_rows() -> Iterator[Row]:
    """Claims of the abstract of 2305.13525, whose configurations are not published."""
    ours = ganglion.plan("axonn4d-80b", cluster="perlmutter", gpus=1024, batch=2048, top=1).best
    megatron = ganglion.plan(
        "axonn4d-80b",
        cluster="perlmutter",
        gpus=1024,
        batch=2048,
        fix="x=4,y=1,z=1,schedule=1f1b,recompute=full,offload=none",
        top=1,
    ).best
    yield ("GPT-80B on 1,024 A100s, share of peak", "57 %", f"{ours.peak_share:.1%}", _about(ours))
    gain = 1 - ours.step_s / megatron.step_s
    assumed = f"Megatron-LM's kind of layout: {_about(megatron)}"
    yield ("its step beside Megatron-LM's layouts", "26 % faster", f"{gain:.0%} less time", assumed)


def _about(row: ganglion.PlannedLayout) -> str:
    return f"{row.layout}, {row.plan.schedule}, recompute {row.plan.recompute}, batch 2048 assumed"


def _row(name: str, layout: str, predicted_s: float, measured_s: float) -> Row:
    error = predicted_s / measured_s - 1
    return (name, layout, f"{predicted_s:.1f}", f"{measured_s:.1f}", f"{error:+.1%}")


def _print(heading: Row, rows: Iterator[Row]) -> None:
    for row in (heading, ("---",) * len(heading), *rows):
        print(f"| {' | '.join(row)} |")
    print()


def main() -> None:
    """Print all tables as Markdown."""
    timed = ("run", "layout", "predicted, s", "measured, s", "error")
    _print(timed, axonn_rows())
    _print(timed, weak_scaling_rows())
    _print(("run", "published depth", "--method pipedream_2bw", "--method full"), depth_rows())
    _print(("claim", "published", "planned", "with"), headline_rows())


if __name__ == "__main__":
    main()
