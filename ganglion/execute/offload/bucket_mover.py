"""Runs bucket programs: reads and writes on threads, updates on the caller's thread.

    read lane      moves the state of bucket b + 1 into its slot     \\
    caller         updates bucket b, once its gradients are summed    > at the same time
    write lane     moves the state of bucket b - 1 back to the tier  /

The thread that finishes a move starts the next ones, so reads go on while the caller waits for
gradients. A failure on a thread is raised by the caller's next wait, with the bucket; every wait
has a deadline.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from ganglion.decide.schedules.buckets import NUM_SLOTS, READ, UPDATE, WRITE, BucketProgram, Move
from ganglion.errors import OffloadError
from ganglion.trace import HOST, Recorder

Work = Callable[[], None]
_JOIN_S = 5.0


class BucketState(Protocol):
    """The state of buckets, each moved to and from the slot that the program assigned to it."""

    def read(self, bucket: int, slot: int) -> int:
        """Read the state of a bucket into a slot; return the bytes moved."""

    def update(self, bucket: int, slot: int) -> None:
        """Update the weights of a bucket, and its state in the slot."""

    def write(self, bucket: int, slot: int) -> int:
        """Write the state of a bucket back; return the bytes moved."""

    def describe(self, bucket: int) -> str:
        """Return the name of a bucket for an error message."""


class BucketMover:
    """Moves the state of one update after the other."""

    def __init__(
        self, state: BucketState, device: torch.device, recorder: Recorder, timeout_s: float
    ) -> None:
        """Move `state`; a wait for a move longer than `timeout_s` is an error."""
        self._state = state
        self._device = device
        self._recorder = recorder
        self._timeout_s = timeout_s
        self._lanes = {kind: Lane(f"offload {kind}", device) for kind in (READ, WRITE)}
        self._changed = threading.Condition()
        # Under the condition's lock:
        self._program: BucketProgram | None = None
        self._updates: deque[Move] = deque()
        self._failure: OffloadError | None = None  # half an update: there is no way to go on
        self._events: dict[int, torch.cuda.Event] = {}

    @property
    def is_begun(self) -> bool:
        """Whether an update has begun, and not ended."""
        return self._program is not None

    def begin(self, chunk_of: Sequence[int]) -> None:
        """Start reading for the next update; see BucketProgram for the chunks."""
        assert self._program is None, "one update after the other"
        with self._changed:
            self._raise_failure()
            self._program = BucketProgram(chunk_of, num_slots=NUM_SLOTS, needs_verdict=True)
            self._chunk_of = tuple(chunk_of)
            self._start_moves()

    def run(self, wait_for_chunk: Callable[[int], None]) -> None:
        """Complete the update; `wait_for_chunk(n)` returns when chunk n is summed."""
        program = self._program
        assert program is not None, "begin first"
        self.check()
        try:
            self._carry(program, wait_for_chunk)
        except BaseException as error:
            ended = OffloadError(f"an update ended half-way: {error}; resume from a checkpoint")
            self._failure = self._failure or ended
            raise
        self._program = None

    def cancel(self) -> None:
        """Discard what was read ahead, because the state changes or has changed elsewhere."""
        program = self._program
        if program is None or self._failure is not None:
            return
        assert not program.is_touched, "an update that has begun must end"
        self._advance(lambda: program.on_verdict(False))
        self._wait_for(lambda: program.done, "the last read")
        self._program = None

    def check(self) -> None:
        """Raise the failure, if any: weights and state are those of half an update."""
        with self._changed:
            self._raise_failure()

    def close(self) -> None:
        """Stop the threads."""
        for lane in self._lanes.values():
            lane.close()

    def _carry(self, program: BucketProgram, wait_for_chunk: Callable[[int], None]) -> None:
        self._advance(lambda: program.on_verdict(True))
        num_reduced = 0
        for bucket in range(program.num_buckets):
            while num_reduced <= self._chunk_of[bucket]:
                wait_for_chunk(num_reduced)
                number = num_reduced
                self._advance(lambda: program.on_reduced(number))  # noqa: B023 - called at once
                num_reduced += 1
            self._update(program)
        self._wait_for(lambda: program.done, f"the write of bucket {program.num_buckets - 1}")

    def _update(self, program: BucketProgram) -> None:
        self._wait_for(lambda: bool(self._updates), "the read of the next bucket")
        move = self._updates.popleft()
        try:
            self._state.update(move.bucket, program.slot_of(move.bucket))
        except BaseException as error:
            self._failure = self._explained(move, error)
            raise
        if self._device.type == "cuda":
            self._events[move.bucket] = torch.cuda.current_stream(self._device).record_event()
        self._advance(lambda: program.on_finish(move))

    def _advance(self, change: Callable[[], None]) -> None:
        """Change the state of the program, and start the moves that this allows."""
        with self._changed:
            change()
            self._start_moves()
            self._changed.notify_all()

    def _start_moves(self) -> None:
        program = self._program
        assert program is not None
        while self._failure is None and (move := program.next()) is not None:
            if move.kind == UPDATE:
                self._updates.append(move)
            else:
                self._lanes[move.kind].start(self._work(program, move))

    def _work(self, program: BucketProgram, move: Move) -> Callable[[], None]:
        def work() -> None:
            try:
                self._make(move, program.slot_of(move.bucket))
                self._advance(lambda: program.on_finish(move))
            except BaseException as error:
                with self._changed:
                    self._failure = self._failure or self._explained(move, error)
                    self._changed.notify_all()

        return work

    def _make(self, move: Move, slot: int) -> None:
        """Make a move, on the thread of its lane."""
        start_s = self._recorder.clock()
        if move.kind == READ:
            num_bytes = self._state.read(move.bucket, slot)
        else:
            event = self._events.pop(move.bucket, None)
            if event is not None:
                event.wait(torch.cuda.current_stream(self._device))
            num_bytes = self._state.write(move.bucket, slot)
        self._lanes[move.kind].finish_copies()
        if num_bytes:
            end_s, step = self._recorder.clock(), self._recorder.step
            self._recorder.add(HOST, move.kind, start_s, end_s, step=step, num_bytes=num_bytes)

    def _wait_for(self, is_there: Callable[[], bool], what: str) -> None:
        with self._changed:
            came = self._changed.wait_for(
                lambda: self._failure is not None or is_there(), self._timeout_s
            )
            if not came:
                self._failure = OffloadError(
                    f"{what} did not end within {self._timeout_s:g} s: the disk of "
                    f"memory.offload_dir does not answer; raise train.timeout_s or choose another"
                )
            self._raise_failure()

    def _explained(self, move: Move, error: BaseException) -> OffloadError:
        where = f"{move.kind} of {self._state.describe(move.bucket)}"
        explained = OffloadError(f"optimizer state, {where}: {error}")
        explained.__cause__ = error
        return explained

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


class Lane:
    """One thread that does its work in order, on a GPU on its own stream; work must not raise."""

    def __init__(self, name: str, device: torch.device) -> None:
        """Start the thread."""
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # A daemon: a disk that never answers must not keep a process alive.
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Work) -> None:
        """Queue `work` after all earlier work."""
        self._queue.put(work)

    def finish_copies(self) -> None:
        """Return when the copies of the current work have arrived; called by the work itself."""
        if self._stream is not None:
            self._stream.synchronize()

    def close(self) -> None:
        """Stop the thread, after the work already queued."""
        self._queue.put(None)
        self._thread.join(timeout=_JOIN_S)

    def _serve(self) -> None:
        with self._on_stream():
            while (work := self._queue.get()) is not None:
                work()

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
