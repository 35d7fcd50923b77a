"""Cutting this rank's share of a batch into microbatches."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ganglion.errors import DataError
from ganglion.plan import Plan
from ganglion.train.executor import Batch


def cut_batch(batch: Batch, plan: Plan, device: torch.device) -> Iterator[Batch]:
    """Yield the microbatches of a share, on the device; refuse one of another size."""
    inputs, targets = batch
    if not len(inputs) == len(targets) == plan.share_size:
        raise DataError(
            f"a batch has {len(inputs)} inputs and {len(targets)} targets, but this rank's "
            f"share is microbatch_size * num_microbatches = {plan.microbatch_size} * "
            f"{plan.num_microbatches} = {plan.share_size}: draw batches with "
            f"run.batches(dataset)"
        )
    for start in range(0, plan.share_size, plan.microbatch_size):
        part = slice(start, start + plan.microbatch_size)
        yield inputs[part].to(device), targets[part].to(device)
