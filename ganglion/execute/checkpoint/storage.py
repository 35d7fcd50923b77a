"""Shards on disk: the storage that torch.distributed.checkpoint plans for and we write and read.

Each rank writes the pieces it was assigned to one safetensors file. The file's header has where a
piece begins in the whole tensor (under the keys of torch's Hugging Face storage, so that its tools
read these files too) and the size of the whole. A file holds one piece of a name: a rank with
several, as of fused layers, writes the second ones to a second file. There is no further metadata.

    8 bytes     length of the header, little endian
    header      JSON: name -> dtype, shape, data_offsets; padded with blanks to a multiple of 8
    data        the tensors' bytes, back to back

torch's own Hugging Face storage is not used: it refuses tied and non-contiguous tensors, builds
the file a second time in memory, reads unlisted files and has no place for our commit. The writer
of safetensors is not used either: it needs every tensor on the host, contiguous and unshared,
reports a full disk as text instead of OSError, and needs a second pass for the checksum.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ganglion.errors import CheckpointError
from ganglion.execute.checkpoint.durable import FileRecord, explained, sync_folder, write_durably
from ganglion.execute.checkpoint.pieces import Saveable

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_PIECES = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"
_WHOLE = "whole_shape"

Begin = Callable[[], None]
Commit = Callable[[Mapping[str, FileRecord]], None]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a whole tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, value: Saveable) -> TensorSpec:
        """Return the spec of a tensor; a piece and a DTensor count as the whole they belong to."""
        return cls(tuple(value.shape), value.dtype)


class ShardWriter(StorageWriter):
    """Writes this rank's file; `begin` and `commit` run on the coordinator only.

    Both run inside DCP's own steps, which raise an exception of any rank on all of them, so that no
    rank is left waiting.
    """

    def __init__(self, folder: Path, *, begin: Begin, commit: Commit) -> None:
        """Write below `folder`; `commit` gets the record of every file by name."""
        self._folder = folder
        self._begin = begin
        self._commit = commit

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer serves one save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Call `begin` before any rank plans to write."""
        if is_coordinator:
            self._begin()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Assign each rank the name of its files."""
        return [
            dataclasses.replace(plan, storage_data=f"rank-{rank:05d}")
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the planned pieces; a rank without any writes no file."""
        results: list[WriteResult] = []
        for name, items in _dealt_to_files(plan).items():
            results += self._write(self._folder / name, items, planner)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write(
        self, path: Path, items: Sequence[WriteItem], planner: SavePlanner
    ) -> list[WriteResult]:
        tensors = {item.index.fqn: planner.resolve_data(item) for item in items}
        with explained("write", path):
            record = write_tensors(path, tensors, _header_notes(items))  # type: ignore[arg-type]
        return [WriteResult(item.index, 0, (path.name, record)) for item in items]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Pass the records of all ranks' files to `commit`."""
        records = dict(result.storage_data for written in results for result in written)
        with explained("write", self._folder):
            sync_folder(self._folder)
        self._commit(records)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never offer this storage for an address: it is always built by hand."""
        return False


class ShardReader(StorageReader):
    """Reads pieces of whole tensors from the given files, written in any layout."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Read the headers of `files`; raise CheckpointError where one cannot be read."""
        self._where: dict[MetadataIndex, Path] = {}
        tensors: dict[str, TensorStorageMetadata] = {}
        for path in files:
            with _readable(path), safe_open(path, framework="pt") as file:
                self._note_pieces(path, file, tensors)
        self._metadata = Metadata(tensors, storage_data=self._where)  # type: ignore[arg-type]
        self.specs = {
            name: TensorSpec(tuple(tensor.size), tensor.properties.dtype)
            for name, tensor in tensors.items()
        }

    def _note_pieces(
        self, path: Path, file: Any, tensors: dict[str, TensorStorageMetadata]
    ) -> None:
        notes = json.loads(file.metadata()[_PIECES])
        for name in file.keys():  # noqa: SIM118 - a safe_open handle is no mapping
            piece = file.get_slice(name)
            offsets = torch.Size(notes[name][_OFFSETS])
            whole = TensorStorageMetadata(
                properties=TensorProperties(dtype=DTYPES[piece.get_dtype()]),
                size=torch.Size(notes[name][_WHOLE]),
                chunks=[],
            )
            chunk = ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(piece.get_shape()))
            tensors.setdefault(name, whole).chunks.append(chunk)
            self._where[MetadataIndex(name, offsets)] = path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a reader serves one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the content of the headers."""
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: the headers are known already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy every planned region into its place in the tensors being loaded."""
        by_file: dict[Path, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._where[item.storage_index], []).append(item)
        for path, items in by_file.items():
            with _readable(path), safe_open(path, framework="pt") as file:
                for item in items:
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(_region(file, item))
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never offer this storage for an address: it is always built by hand."""
        return False


def _dealt_to_files(plan: SavePlan) -> dict[str, list[WriteItem]]:
    """Return the items by file: the first pieces of all names, the second ones, and so on."""
    seen: Counter[str] = Counter()
    files: dict[str, list[WriteItem]] = {}
    for item in plan.items:
        nth = seen[item.index.fqn]
        seen[item.index.fqn] += 1
        name = f"{plan.storage_data}-{nth}" if nth else plan.storage_data
        files.setdefault(f"{name}.safetensors", []).append(item)
    return files


def _header_notes(items: Sequence[WriteItem]) -> dict[str, str]:
    pieces: dict[str, dict[str, list[int]]] = {}
    for item in items:
        assert item.tensor_data is not None, "the planner lets only tensors through"
        pieces[item.index.fqn] = {
            _OFFSETS: list(item.tensor_data.chunk.offsets),
            _WHOLE: list(item.tensor_data.size),
        }
    return {"format": "pt", "DCP_VERSION": "1.0", _PIECES: json.dumps(pieces)}


def _region(file: Any, item: ReadItem) -> Tensor:
    """Return the wanted part of a stored piece; a scalar has no dims to slice."""
    name = item.storage_index.fqn
    if not item.lengths:
        scalar: Tensor = file.get_tensor(name)
        return scalar
    spans = zip(item.storage_offsets, item.lengths, strict=True)
    region: Tensor = file.get_slice(name)[tuple(slice(at, at + size) for at, size in spans)]
    return region


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn errors of a broken file into a CheckpointError, which is sent to other ranks as text."""
    try:
        with explained("read", path):
            yield
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error!r}; use another checkpoint"
        ) from error


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> FileRecord:
    """Write local tensors of any device and stride; names that share memory get a copy each."""
    # Wide types first, so that every tensor starts at a multiple of its item size.
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])))
    return write_durably(path, _chunks(ordered, metadata))


def _chunks(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    yield _header(tensors, metadata)
    for tensor in tensors.values():
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        yield flat.view(torch.uint8).numpy().data


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    start = 0
    for name, tensor in tensors.items():
        end = start + tensor.numel() * tensor.itemsize
        entries[name] = {
            "dtype": _code(name, tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _code(name: str, dtype: torch.dtype) -> str:
    if dtype not in _CODES:
        raise CheckpointError(
            f"tensor {name} has dtype {dtype}, which safetensors files cannot hold: convert it to "
            f"one of {', '.join(sorted(DTYPES))}"
        )
    return _CODES[dtype]
