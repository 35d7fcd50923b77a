"""Storage for activations until their backward: host memory, or a scratch file.

A tier stores flat tensors of bytes and reads them back into others. Both are moves: they are
started, and waited for later, while the device computes. A freed slot of the file is used again for
the same size, so the file grows to the most that is in flight and no further.
"""

from __future__ import annotations

import os
import queue
import tempfile
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ganglion.errors import ConfigError, OffloadError
from ganglion.units import MIB

_PAGE_BYTES = 4096
_JOIN_S = 5.0
_Work = Callable[[], None]
_Queue = queue.SimpleQueue[tuple[Future[None], _Work] | None]


class Move(Protocol):
    """A copy that was started."""

    def wait(self) -> None:
        """Return when it is complete; raise OffloadError if it fails."""


class Stored(Protocol):
    """A range of bytes on a tier."""

    def begin_write(self, source: Tensor) -> Move:
        """Start to copy `source`, which must not change until that is done."""

    def begin_read(self, target: Tensor) -> Move:
        """Start to fill `target`."""

    def give_back(self) -> None:
        """Free the bytes for another use."""


class ActivationTier(Protocol):
    """Storage for ranges of bytes."""

    def room(self, num_bytes: int) -> Stored:
        """Reserve a range of bytes."""

    def close(self) -> None:
        """Free everything."""


def open_activation_tier(
    name: str, folder: Path, device: torch.device, timeout_s: float
) -> ActivationTier:
    """Return the tier called `name` in a plan; its file goes into `folder`."""
    if name == "disk":
        return ScratchFile(folder, device, timeout_s)
    if name == "host":
        return HostCopies(device)
    raise ConfigError(
        f'memory.offload_activations = {name!r} is no tier: choose "none", "host" or "disk"'
    )


# --- host memory ---------------------------------------------------------------------------------


class HostCopies:
    """Host memory; pinned, and copied on a stream of its own, if the device is a GPU."""

    def __init__(self, device: torch.device) -> None:
        """Store activations of `device`."""
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def room(self, num_bytes: int) -> Stored:
        """Allocate host memory."""
        pinned = self.stream is not None
        return _HostRoom(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned), self.stream)

    def close(self) -> None:
        """Do nothing: memory is freed with its tensors."""


class _HostRoom:
    def __init__(self, host: Tensor, stream: torch.cuda.Stream | None) -> None:
        self._host = host
        self._stream = stream

    def begin_write(self, source: Tensor) -> Move:
        return self._copy(self._host, source, source)

    def begin_read(self, target: Tensor) -> Move:
        return self._copy(target, self._host, target)

    def give_back(self) -> None:
        pass

    def _copy(self, target: Tensor, source: Tensor, on_device: Tensor) -> Move:
        if self._stream is None:
            target.copy_(source)
            return _Arrived()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        on_device.record_stream(self._stream)
        return _OnStream(self._stream.record_event())


class _Arrived:
    def wait(self) -> None:
        pass


class _OnStream:
    """A copy on a side stream; the stream that computes waits for it, the host does not."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


# --- a file --------------------------------------------------------------------------------------


class ScratchFile:
    """An unlinked file, written and read by one thread in the order of the calls.

    It disappears with the process, however that ends.
    """

    def __init__(self, folder: Path, device: torch.device, timeout_s: float) -> None:
        """Open the file inside `folder`, which is created if missing; moves have a deadline."""
        self._folder = folder
        self._timeout_s = timeout_s
        self._is_host = device.type == "cpu"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file, path = tempfile.mkstemp(prefix="activations-", dir=folder)
            Path(path).unlink()
        except OSError as error:
            raise OffloadError(
                f"memory.offload_dir = {str(folder)!r} cannot hold a file: {error}; name a folder "
                f"that can be written"
            ) from error
        self._file = file
        self._end = 0
        # By size. Any thread that frees a graph gives slots back; no lock, since these are single
        # operations of lists.
        self._free: dict[int, list[int]] = {}
        self._queue: _Queue = queue.SimpleQueue()
        # A daemon: a disk that never answers must not keep a process alive.
        thread = threading.Thread(
            target=_serve, args=(self._queue,), name="activations", daemon=True
        )
        thread.start()
        self._close = weakref.finalize(self, _close, self._queue, thread, file)
        self._close.atexit = False

    def room(self, num_bytes: int) -> Stored:
        """Return a slot, a freed one if there is one."""
        size = -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
        try:
            start = self._free[size].pop()
        except (KeyError, IndexError):
            start, self._end = self._end, self._end + size
        return _Slot(self, start, size)

    def give_back(self, start: int, size: int) -> None:
        """Free a slot; moves of its last use come before those of the next."""
        self._free.setdefault(size, []).append(start)

    def begin(self, tensor: Tensor, start: int, *, writes: bool) -> Move:
        """Start to move bytes between a tensor and the file."""
        ready = None if self._is_host else torch.cuda.current_stream().record_event()
        work = self._write if writes else self._read
        moving: Future[None] = Future()
        self._queue.put((moving, lambda: self._explained(work, tensor, start, ready)))
        return _OnThread(moving, self._timeout_s, str(self._folder))

    @property
    def num_bytes(self) -> int:
        """The size of the file."""
        return self._end

    def close(self) -> None:
        """Finish all moves, stop the thread and close the file."""
        self._close()

    def _explained(
        self,
        work: Callable[[Tensor, int], None],
        tensor: Tensor,
        start: int,
        ready: torch.cuda.Event | None,
    ) -> None:
        if ready is not None:
            ready.synchronize()
        try:
            work(tensor, start)
        except OSError as error:
            raise OffloadError(
                f"activations of {tensor.numel() / MIB:.1f} MiB could not be moved to or from "
                f"memory.offload_dir = {str(self._folder)!r}, where {self._end / MIB:.1f} MiB are "
                f"in use: {error}; name a folder on a larger disk, or set "
                f'memory.offload_activations = "none"'
            ) from error

    def _write(self, tensor: Tensor, start: int) -> None:
        rest = _view(tensor.cpu())
        while rest:
            done = os.pwrite(self._file, rest, start)
            rest, start = rest[done:], start + done

    def _read(self, tensor: Tensor, start: int) -> None:
        host = tensor if self._is_host else torch.empty_like(tensor, device="cpu")
        rest = _view(host)
        while rest:
            done = os.preadv(self._file, [rest], start)
            if done == 0:
                raise OSError("the scratch file ends before what was written to it")
            rest, start = rest[done:], start + done
        if not self._is_host:
            tensor.copy_(host)
            torch.cuda.current_stream().synchronize()


def _view(flat: Tensor) -> memoryview:
    """Return the memory of a flat tensor of bytes."""
    memory: Any = flat.numpy()
    return memoryview(memory)


class _Slot:
    def __init__(self, file: ScratchFile, start: int, size: int) -> None:
        self._file = file
        self._start = start
        self._size = size

    def begin_write(self, source: Tensor) -> Move:
        return self._file.begin(source, self._start, writes=True)

    def begin_read(self, target: Tensor) -> Move:
        return self._file.begin(target, self._start, writes=False)

    def give_back(self) -> None:
        self._file.give_back(self._start, self._size)


class _OnThread:
    def __init__(self, moving: Future[None], timeout_s: float, place: str) -> None:
        self._moving = moving
        self._timeout_s = timeout_s
        self._place = place

    def wait(self) -> None:
        try:
            self._moving.result(timeout=self._timeout_s)
        except Late as error:
            raise OffloadError(
                f"memory.offload_dir = {self._place!r} has not moved activations within "
                f"train.timeout_s = {self._timeout_s} s: use a disk that answers, or raise it"
            ) from error


def _serve(work: _Queue) -> None:
    """Do the queued work in order; a failure is raised by the wait for it."""
    while (item := work.get()) is not None:
        moving, do = item
        failure: BaseException | None = None
        try:
            do()
        except BaseException as error:
            failure = error
        # Before the result is set, so that no reference here keeps a tensor alive after it.
        del item, do
        if failure is None:
            moving.set_result(None)
        else:
            moving.set_exception(failure)
        del moving, failure


def _close(work: _Queue, thread: threading.Thread, file: int) -> None:
    """Stop the thread, then close its file."""
    work.put(None)
    if thread is not threading.current_thread():  # which may hold the last reference to the file
        thread.join(timeout=_JOIN_S)
    if not thread.is_alive() or thread is threading.current_thread():
        os.close(file)
