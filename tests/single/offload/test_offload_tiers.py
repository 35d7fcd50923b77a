"""Tiers keep bytes, say clearly when they are full, and failures of threads reach the caller."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ganglion.errors import CommError, ConfigError, OffloadError
from ganglion.execute.offload import DiskTier, HostTier, Region, Tier, open_tier, tiers
from ganglion.execute.offload.tiers import PAGE_BYTES, page_buffer
from tests.support.offloading import (
    FACTORIES,
    Offloaded,
    Part,
    fill_gradients,
    make_parameters,
    train,
)

pytestmark = pytest.mark.timeout(60)
CPU = torch.device("cpu")
KINDS = ["direct", "buffered", "host"]


def make_tier(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Tier:
    if kind == "host":
        return HostTier(CPU)
    if kind == "buffered":
        monkeypatch.setattr(tiers, "_open_direct", lambda path: None)
    return DiskTier(folder, CPU)


def pages(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    buffer = page_buffer(count * PAGE_BYTES, CPU)
    return buffer.copy_(torch.randint(256, (count * PAGE_BYTES,), generator=generator))


def read(region: Region, start: int, num_bytes: int) -> torch.Tensor:
    out = page_buffer(num_bytes, CPU)
    region.read_into(start, out)
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_written_is_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier(kind, tmp_path, monkeypatch)
    first, second = tier.reserve(8 * PAGE_BYTES), tier.reserve(4 * PAGE_BYTES)
    one, other = pages(8), pages(4, seed=1)
    first.write_from(0, one)
    second.write_from(0, other)
    first.write_from(2 * PAGE_BYTES, other[: 2 * PAGE_BYTES])
    one[2 * PAGE_BYTES : 4 * PAGE_BYTES] = other[: 2 * PAGE_BYTES]
    assert torch.equal(read(first, 0, 8 * PAGE_BYTES), one)
    assert torch.equal(read(second, PAGE_BYTES, PAGE_BYTES), other[PAGE_BYTES : 2 * PAGE_BYTES])
    assert tier.num_bytes == 12 * PAGE_BYTES
    tier.close()


@pytest.mark.parametrize("kind", KINDS)
def test_moves_and_the_tensor_are_the_same_bytes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier(kind, tmp_path, monkeypatch)
    region = tier.reserve(6 * PAGE_BYTES)
    tensor = region.tensor()
    for seed in range(5):
        data = pages(6, seed)
        region.write_from(0, data)
        assert torch.equal(tensor, data)
        tensor.copy_(pages(6, seed + 100))
        region.release()
        assert torch.equal(read(region, 0, 6 * PAGE_BYTES), pages(6, seed + 100))
        assert torch.equal(tensor, pages(6, seed + 100))
    tier.close()


def test_the_file_has_room_and_no_name(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "made" / "on the way", CPU)
    tier.reserve(1 << 20)
    assert os.fstat(tier.file).st_blocks * 512 >= 1 << 20
    assert not list((tmp_path / "made" / "on the way").iterdir())
    assert str(tmp_path) in tier.describe()
    tier.close()
    tier.close()


def test_a_full_disk_is_told_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    text = rf"memory.offload_dir = '{tmp_path}': 0.\d MiB more were needed beside 0.0 MiB, \d+"
    with pytest.raises(OffloadError, match=text):
        Offloaded(tmp_path).plain(make_parameters(), FACTORIES["adamw"])


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OffloadError, match=r"memory.offload_dir = .*file.* failed: .*; choose a"):
        DiskTier(tmp_path / "file", CPU)


def test_the_host_tier_says_when_it_frees_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        open_tier("host", Path(), CPU)
    assert "frees nothing here" in caplog.text
    with pytest.raises(ConfigError, match="'tape' is no tier"):
        open_tier("tape", Path(), CPU)


def made(folder: Path, timeout_s: float = 20.0) -> Part:
    return Offloaded(folder, timeout_s=timeout_s).plain(make_parameters(), FACTORIES["adamw"])


class Failing:
    """A system call that fails from its nth use on."""

    def __init__(self, call: Any, nth: int, number: int) -> None:
        self._call, self._left, self._number = call, nth, number

    def __call__(self, *arguments: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise OSError(self._number, os.strerror(self._number))
        return self._call(*arguments)


@pytest.mark.parametrize("nth", [0, 3])
def test_a_disk_that_fills_up_ends_the_update(
    nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = made(tmp_path)
    train(part, range(2))
    monkeypatch.setattr(os, "pwritev", Failing(os.pwritev, nth, errno.ENOSPC))
    with pytest.raises(OffloadError, match=r"write of bucket \d of \d+ \(.*no room.*larger disk"):
        train(part, range(2, 3))
    with pytest.raises(OffloadError, match=r"write of bucket"):  # half an update: never again
        train(part, range(3, 4))
    part.update.close()


def test_a_read_that_fails_names_its_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = made(tmp_path)
    train(part, range(1))
    monkeypatch.setattr(os, "preadv", Failing(os.preadv, 2, errno.EIO))
    with pytest.raises(OffloadError, match=r"read of bucket 1 of \d+ \(.*Input/output error"):
        train(part, range(1, 2))
    part.update.close()


def test_a_disk_that_does_not_answer_is_not_waited_for_forever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, answer = made(tmp_path, timeout_s=0.2), threading.Event()
    train(part, range(1))
    preadv = os.preadv

    def hang(*arguments: Any) -> int:
        answer.wait(30)
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", hang)
    with pytest.raises(OffloadError, match=r"did not end within 0.2 s: .*train.timeout_s"):
        train(part, range(1, 2))
    answer.set()
    part.update.close()


def test_gradients_that_never_come_end_the_update(tmp_path: Path) -> None:
    part = made(tmp_path)

    def wait(number: int) -> None:
        if number > 0:
            raise CommError("a rank is gone")

    fill_gradients(part.parameters, 0)
    with pytest.raises(CommError, match="a rank is gone"):
        part.update.step(part.buckets.buffers(0), None, wait)
    with pytest.raises(OffloadError, match=r"ended half-way: a rank is gone; resume"):
        part.update.weights()
    part.update.close()


def test_an_optimizer_that_fails_raises_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = made(tmp_path)

    def step(self: object, closure: object = None) -> None:
        raise ZeroDivisionError("not today")

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    with pytest.raises(ZeroDivisionError, match="not today"):
        train(part, range(1))
    part.update.close()
