"""torch.distributed.checkpoint as this package calls it: tensors only, quiet, with our errors.

DCP gathers what any rank raised and raises it on all of them, so every rank leaves a failed call
at the same point. Its exception is a BaseException around pickled ones; ours is one sentence.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, WriteItem

from ganglion.checkpoint.storage import ShardReader, ShardWriter
from ganglion.errors import CheckpointError, GanglionError, PeerLost

T = TypeVar("T")


class TensorSavePlanner(DefaultSavePlanner):
    """Deals tensors to ranks, each piece once; refuses what DCP would pickle."""

    def __init__(self) -> None:
        """Plan over a flat mapping of names."""
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Refuse values that are no tensors before anything is planned."""
        for name, value in state_dict.items():
            if not isinstance(value, Tensor):
                raise CheckpointError(
                    f"{name} is a {type(value).__name__}, not a tensor: put it into the extra "
                    f"state, which is saved as JSON"
                )
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def transform_object(self, write_item: WriteItem, object: Any) -> Tensor:
        """Return the tensor itself; the base class would pickle anything else."""
        assert isinstance(object, Tensor), write_item.index
        return object


class TensorLoadPlanner(DefaultLoadPlanner):
    """Plans reads into tensors; refuses what DCP would unpickle."""

    def __init__(self) -> None:
        """Plan over a flat mapping of names."""
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refuse: no file of ours holds pickled bytes."""
        raise CheckpointError(f"{read_item.dest_index.fqn} is not stored as a tensor")


def save_shards(
    tensors: Mapping[str, Tensor], writer: ShardWriter, process_group: dist.ProcessGroup | None
) -> None:
    """Write all ranks' tensors; collective. Fails on every rank if it fails on one."""
    with _our_errors(process_group):
        state_dict_saver.save(
            dict(tensors),
            storage_writer=writer,
            planner=TensorSavePlanner(),
            process_group=process_group,
            no_dist=process_group is None,
        )


def load_shards(
    tensors: Mapping[str, Tensor], reader: ShardReader, process_group: dist.ProcessGroup | None
) -> None:
    """Fill all ranks' tensors in place; collective. Fails on every rank if it fails on one."""
    with _our_errors(process_group):
        state_dict_loader.load(
            dict(tensors),
            storage_reader=reader,
            planner=TensorLoadPlanner(),
            process_group=process_group,
            no_dist=process_group is None,
        )


def gather(value: T, process_group: dist.ProcessGroup | None) -> list[T]:
    """Return every rank's value in rank order; collective."""
    if process_group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(process_group)
    with _our_errors(process_group):
        dist.all_gather_object(values, value, group=process_group)
    return values


@contextmanager
def _our_errors(process_group: dist.ProcessGroup | None) -> Iterator[None]:
    with warnings.catch_warnings():
        # DCP warns that it works without torch.distributed, which is what was asked for.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            raise _first_failure(error, process_group) from error
        except RuntimeError as error:
            # Errors of the ranks' own work arrive as the exception above: this is the exchange.
            if process_group is None:
                raise
            raise PeerLost(
                f"another rank was lost during a checkpoint ({error}): its own error tells why"
            ) from error


def _first_failure(
    error: CheckpointException, process_group: dist.ProcessGroup | None
) -> BaseException:
    rank = min(error.failures)
    cause = error.failures[rank][0]
    if not isinstance(cause, Exception):
        return cause
    text = str(cause) if isinstance(cause, GanglionError) else f"{type(cause).__name__}: {cause}"
    return CheckpointError(text if process_group is None else f"rank {rank}: {text}")
