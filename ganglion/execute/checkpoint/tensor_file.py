"""One safetensors file, streamed tensor by tensor.

    8 bytes     length of the header, little endian
    header      JSON: name -> dtype, shape, data_offsets; padded with blanks to a multiple of 8
    data        the tensors' bytes, back to back

The library's own writer wants every tensor on the host, contiguous and unshared, reports a full
disk as text instead of OSError, and needs a second pass for the checksum. Reading is left to it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ganglion.errors import CheckpointError
from ganglion.execute.checkpoint.durable import FileRecord, write_durably

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
