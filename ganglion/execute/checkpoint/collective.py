"""Calls of torch.distributed.checkpoint (DCP): tensors only, without its warnings, with our errors.

DCP gathers the exception of any rank and raises it on all of them, so every rank leaves a failed
call at the same point. Its exception is a BaseException around pickled ones; ours is one sentence.
"""

from __future__ import annotations

import io
import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ganglion.errors import CheckpointError, GanglionError, PeerLost
from ganglion.execute.checkpoint.pieces import Piece, Saveable
from ganglion.execute.checkpoint.storage import ShardReader, ShardWriter

T = TypeVar("T")


class TensorSavePlanner(DefaultSavePlanner):
    """Assigns tensors and boxes of pieces to ranks, each once; refuses values DCP would pickle."""

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
            if not isinstance(value, Tensor | Piece):
                raise CheckpointError(
                    f"{name} is a {type(value).__name__}, not a tensor: put it into the extra "
                    f"state, which is saved as JSON"
                )
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        """Plan to write everything this rank holds."""
        whole, pieces = _apart(self.state_dict)
        items = list(create_default_local_save_plan(whole, self.is_coordinator).items)
        for name, piece in pieces.items():
            items += _write_items(name, piece)
        self.plan = SavePlan(items)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Let one rank write what several hold; refuse a tensor that the ranks hold in part."""
        _check_complete(all_plans)
        return super().create_global_plan(all_plans)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the tensor, or the region of a piece, that an item is about."""
        value = self.state_dict[index.fqn]
        if isinstance(value, Piece):
            return value.part_at(index.offset)
        return super().lookup_object(index)

    def transform_object(self, write_item: WriteItem, object: Any) -> Tensor:
        """Return the tensor itself; the base class would pickle anything else."""
        assert isinstance(object, Tensor), write_item.index
        return object


class TensorLoadPlanner(DefaultLoadPlanner):
    """Plans reads into tensors and boxes of pieces; refuses values DCP would unpickle."""

    def __init__(self) -> None:
        """Plan over a flat mapping of names."""
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the mapping as it is; the base class would replace pieces by None."""
        self.original_state_dict = self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Plan to read this rank's tensors, from any layout they were saved in."""
        assert self.metadata is not None
        whole, pieces = _apart(self.state_dict)
        items = list(create_default_local_load_plan(whole, self.metadata).items)
        for name, piece in pieces.items():
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata), name
            items += create_read_items_for_chunk_list(name, saved, _chunks(piece))
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the tensor, or the region of a piece, that an item is about."""
        value = self.state_dict[index.fqn]
        if isinstance(value, Piece):
            return value.part_at(index.offset)
        return super().lookup_tensor(index)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refuse, because our files hold no pickled bytes."""
        raise CheckpointError(f"{read_item.dest_index.fqn} is not stored as a tensor")


def save_shards(
    tensors: Mapping[str, Saveable], writer: ShardWriter, process_group: dist.ProcessGroup | None
) -> None:
    """Write the tensors of all ranks; collective. Fail on every rank if one fails."""
    with _our_errors(process_group):
        state_dict_saver.save(
            dict(tensors),
            storage_writer=writer,
            planner=TensorSavePlanner(),
            process_group=process_group,
            no_dist=process_group is None,
        )


def load_shards(
    tensors: Mapping[str, Saveable], reader: ShardReader, process_group: dist.ProcessGroup | None
) -> None:
    """Fill the tensors of all ranks in place; collective. Fail on every rank if one fails."""
    with _our_errors(process_group):
        state_dict_loader.load(
            dict(tensors),
            storage_reader=reader,
            planner=TensorLoadPlanner(),
            process_group=process_group,
            no_dist=process_group is None,
        )


def gather(value: T, process_group: dist.ProcessGroup | None) -> list[T]:
    """Return the values of all ranks in rank order; collective."""
    if process_group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(process_group)
    with _our_errors(process_group):
        dist.all_gather_object(values, value, group=process_group)
    return values


def _apart(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Piece]]:
    """Return the values that DCP can plan itself, and the pieces."""
    pieces = {name: value for name, value in values.items() if isinstance(value, Piece)}
    return {name: value for name, value in values.items() if name not in pieces}, pieces


def _chunks(piece: Piece) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size(b.start), torch.Size(b.size)) for b in piece.boxes]


def _write_items(name: str, piece: Piece) -> list[WriteItem]:
    properties = TensorProperties.create_from_tensor(piece.tensor)
    whole = torch.Size(piece.shape)
    return [
        WriteItem(
            index=MetadataIndex(name, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=whole),
        )
        for chunk in _chunks(piece)
    ]


def _check_complete(plans: Sequence[SavePlan]) -> None:
    """Refuse a tensor with holes, which DCP accepts if one rank saves alone."""
    held: Counter[str] = Counter()
    wanted: dict[str, int] = {}
    for item in {item.index: item for plan in plans for item in plan.items}.values():
        assert item.tensor_data is not None, "the planner lets only tensors through"
        held[item.index.fqn] += math.prod(item.tensor_data.chunk.sizes)
        wanted[item.index.fqn] = math.prod(item.tensor_data.size)
    for name, num_elements in wanted.items():
        if held[name] != num_elements:
            raise CheckpointError(
                f"the ranks together hold {held[name]} of the {num_elements} elements of {name}: "
                f"all ranks of a run must save together"
            )


@contextmanager
def _our_errors(process_group: dist.ProcessGroup | None) -> Iterator[None]:
    with warnings.catch_warnings():
        # DCP warns that it works without torch.distributed, which is intended.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            raise _first_failure(error, process_group) from error
        except RuntimeError as error:
            # Errors of the ranks' own work arrive as the exception above.
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
