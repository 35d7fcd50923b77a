"""Models, clusters and layouts of published measurements."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ganglion.decide.costs import Cluster, Runtime, find_cluster
from ganglion.decide.plan import Plan
from ganglion.decide.predict import Prediction, predict_layout
from ganglion.decide.shapes import GPTShape

# Engines that stop for messages, reductions and updates: DeepSpeed and Megatron-LM of 2021, and
# PipeDream-2BW as released (its spec, C.6).
BLOCKING = Runtime(overlaps_messages=False, overlaps_reduction=False)
PIPE_INSIDE = ("x", "y", "z", "pipe", "data")


def gpt(
    num_layers: int, hidden: int, num_heads: int, *, seq_len: int, vocab_size: int = 51200
) -> GPTShape:
    """Return a GPT as papers write it: learned positions, biases, an MLP four times as wide."""
    return GPTShape(
        vocab_size=vocab_size,
        seq_len=seq_len,
        num_layers=num_layers,
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=hidden // num_heads,
        mlp_hidden=4 * hidden,
        positions="learned",
        bias=True,
    )


def equal_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return the cuts of equally many layers a stage, embedding and head at the ends beside."""
    each = 2 * (num_layers // num_stages)
    return tuple(1 + each * stage for stage in range(1, num_stages))


def blocking(name: str, *, action_s: float = 0.0) -> Cluster:
    """Return a built-in cluster under an engine that overlaps nothing."""
    cluster = find_cluster(name)
    compute = replace(cluster.require_compute(), action_s=action_s)
    return replace(cluster, runtime=BLOCKING, compute=compute)


def predicted(
    shape: GPTShape, cluster: Cluster, *, global_batch: int, microbatch: int, **fields: Any
) -> Prediction:
    """Return the prediction of a layout in half precision, with layers computed again."""
    plan = Plan(
        microbatch_size=microbatch,
        precision="fp16_master",
        recompute="full",
        recompute_every=1,
        **fields,
    )
    plan = replace(plan, num_microbatches=global_batch // microbatch // plan.num_shares)
    assert plan.global_batch_size == global_batch
    return predict_layout(shape, plan, cluster)


def off(value: float, measured: float) -> float:
    """Return by which share a value is above a measured one."""
    return value / measured - 1
