"""Message headers: what goes in comes out, and what is no header is refused by name."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ganglion.errors import ProtocolError
from ganglion.execute.comm.message import MAX_DIMS, MAX_FORM_BYTES, Form, Forms, Header, flow_number

DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.int8, torch.complex64, torch.uint64)
KINDS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=15)
SHAPES = st.lists(st.integers(0, 1000), max_size=5).map(tuple)


@given(KINDS, SHAPES, st.sampled_from(DTYPES), st.integers(0, 1))
def test_a_form_survives_the_wire(
    kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: int
) -> None:
    packed = Forms().pack(kind, shape, dtype, device)
    assert len(packed) <= MAX_FORM_BYTES
    num_bytes = math.prod(shape) * dtype.itemsize
    reader = Forms()
    for _ in range(2):  # parsed, then remembered
        assert reader.parse(packed, 3) == Form(kind, shape, dtype, device, num_bytes)


def test_every_dim_that_torch_has_fits() -> None:
    shape = (1,) * MAX_DIMS
    packed = Forms().pack("forward", shape, torch.float32)
    assert len(packed) == MAX_FORM_BYTES
    assert Forms().parse(packed, 0).shape == shape


@pytest.mark.parametrize(
    ("kind", "shape", "dtype"),
    [
        ("", (1,), torch.float32),
        ("x" * 16, (1,), torch.float32),
        ("caf\u00e9", (1,), torch.float32),
        ("a\0b", (1,), torch.float32),
        ("forward", (1,) * (MAX_DIMS + 1), torch.float32),
        ("forward", (1,), torch.quint8),
    ],
)
def test_what_the_wire_cannot_carry_is_refused(
    kind: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    with pytest.raises(ProtocolError, match="a message cannot carry kind"):
        Forms().pack(kind, shape, dtype)


@given(st.binary(max_size=700))
def test_garbage_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="rank 7 sent bytes that are not a message header"):
        Forms().parse(data, 7)


@given(st.data())
def test_a_damaged_form_is_refused_or_still_consistent(data: st.DataObject) -> None:
    """Size and shape must never disagree: memory would be read past its end."""
    packed = bytearray(Forms().pack("forward", (3, 5), torch.float32))
    where = data.draw(st.integers(0, len(packed) - 1))
    packed[where] ^= data.draw(st.integers(1, 255))
    try:
        form = Forms().parse(bytes(packed), 7)
    except ProtocolError:
        return
    assert form.num_bytes == math.prod(form.shape) * form.dtype.itemsize
    assert min(form.shape) >= 0


def test_a_truncated_form_is_refused() -> None:
    packed = Forms().pack("forward", (3, 5), torch.float32)
    for size in range(len(packed)):
        with pytest.raises(ProtocolError):
            Forms().parse(packed[:size], 0)


def test_memory_of_forms_is_bounded() -> None:
    forms = Forms()
    for size in range(5000):
        forms.parse(forms.pack("forward", (size,), torch.float32), 0)
    assert len(forms._packed) <= 1024
    assert len(forms._parsed) <= 1024


def test_a_header_names_itself() -> None:
    header = Header("forward", 3, -1, 1, -1, (2, 4), torch.bfloat16)
    assert str(header) == "forward, step 3, microbatch 1, torch.bfloat16 (2, 4)"


def test_flow_numbers_of_ranks_differ_and_fit_64_bits() -> None:
    numbers = {flow_number(rank, count) for rank in (0, 1, 4095) for count in (1, 2, 1 << 39)}
    assert len(numbers) == 9
    assert max(numbers) < 1 << 63
