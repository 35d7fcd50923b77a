"""The bucket program: its laws under every order of finishes, and the cut of parameters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ganglion.decide.schedules.buckets.program import READ, UPDATE, WRITE, BucketProgram, Move
from ganglion.decide.schedules.buckets.updates import GRAIN, Slice, cut_update, padded
from ganglion.errors import ConfigError


class Drive:
    """Runs a program in an order that a test draws, and holds it to the laws."""

    def __init__(
        self, chunk_of: list[int], num_slots: int, verdict: bool | None, draw: st.DataObject
    ) -> None:
        self.chunk_of, self.num_slots, self.verdict, self.draw = chunk_of, num_slots, verdict, draw
        self.program = BucketProgram(
            chunk_of, num_slots=num_slots, needs_verdict=verdict is not None
        )
        self.told = verdict is None
        self.num_reduced = 0
        self.under_way: list[Move] = []
        self.begun: list[Move] = []
        self.finished: list[Move] = []

    def run(self) -> None:
        while not self.program.done:
            events = self.possible()
            assert events, f"stuck after {[str(move) for move in self.finished]}"
            self.do(self.draw.draw(st.sampled_from(events)))
            while (move := self.program.next()) is not None:
                self.check_begin(move)
                self.under_way.append(move)
                self.begun.append(move)

    def possible(self) -> list[Move | str]:
        events: list[Move | str] = list(self.under_way)
        if self.num_reduced <= max(self.chunk_of, default=-1):
            events.append("reduced")
        if not self.told:
            events.append("verdict")
        return events or (["begin"] if not self.begun else [])

    def do(self, event: Move | str) -> None:
        if event == "reduced":
            self.program.on_reduced(self.num_reduced)
            self.num_reduced += 1
        elif event == "verdict":
            assert self.verdict is not None
            self.told = True
            self.program.on_verdict(self.verdict)
        elif isinstance(event, Move):
            self.under_way.remove(event)
            self.finished.append(event)
            self.program.on_finish(event)

    def check_begin(self, move: Move) -> None:
        same = [m.bucket for m in self.begun if m.kind == move.kind]
        assert move.bucket == len(same), "moves of a kind begin in order, each once"
        assert not any(m.kind == move.kind for m in self.under_way), "one at a time"
        if move.kind == READ:
            assert not (self.told and self.verdict is False)
            held = {m.bucket for m in self.begun if m.kind == READ}
            held -= {m.bucket for m in self.finished if m.kind == WRITE}
            assert len(held) < self.num_slots
            slots = {self.program.slot_of(bucket) for bucket in held}
            assert self.program.slot_of(move.bucket) not in slots
        if move.kind == UPDATE:
            assert Move(READ, move.bucket) in self.finished
            assert self.chunk_of[move.bucket] < self.num_reduced
            assert self.told and self.verdict is not False
        if move.kind == WRITE:
            assert Move(UPDATE, move.bucket) in self.finished


chunks = st.lists(st.integers(0, 1), max_size=12).map(
    lambda steps: [sum(steps[: i + 1]) for i in range(len(steps))]
)


@given(chunks, st.integers(1, 4), st.sampled_from([None, True]), st.data())
def test_every_order_of_finishes_ends_with_all_written(
    chunk_of: list[int], num_slots: int, verdict: bool | None, draw: st.DataObject
) -> None:
    drive = Drive(chunk_of, num_slots, verdict, draw)
    drive.run()
    for kind in (READ, UPDATE, WRITE):
        assert [m.bucket for m in drive.finished if m.kind == kind] == list(range(len(chunk_of)))


@given(chunks, st.integers(1, 4), st.data())
def test_no_ends_with_nothing_updated(
    chunk_of: list[int], num_slots: int, draw: st.DataObject
) -> None:
    drive = Drive(chunk_of, num_slots, False, draw)
    drive.run()
    assert {move.kind for move in drive.begun} <= {READ}
    assert not drive.under_way and not drive.program.is_touched
    assert drive.program.next() is None


def test_three_are_in_flight_at_once() -> None:
    program = BucketProgram([0, 0, 0, 0])
    program.on_reduced(0)
    assert program.next() == Move(READ, 0)
    assert program.next() is None
    program.on_finish(Move(READ, 0))
    assert program.next() == Move(UPDATE, 0)
    assert program.next() == Move(READ, 1)
    program.on_finish(Move(UPDATE, 0))
    program.on_finish(Move(READ, 1))
    assert [program.next(), program.next(), program.next(), program.next()] == [
        Move(WRITE, 0),
        Move(UPDATE, 1),
        Move(READ, 2),
        None,
    ]


def test_reads_go_ahead_of_the_verdict_as_far_as_slots_reach() -> None:
    program = BucketProgram([0] * 5, needs_verdict=True)
    program.on_reduced(0)
    for bucket in range(3):
        assert program.next() == Move(READ, bucket)
        program.on_finish(Move(READ, bucket))
    assert program.next() is None
    program.on_verdict(True)
    assert program.next() == Move(UPDATE, 0)


def test_what_is_not_under_way_cannot_finish() -> None:
    program = BucketProgram([0])
    with pytest.raises(AssertionError, match="read 0 is not under way"):
        program.on_finish(Move(READ, 0))
    with pytest.raises(AssertionError, match="chunk 1 after 0 chunks"):
        program.on_reduced(1)


parameters = st.lists(
    st.tuples(st.integers(1, 6 * GRAIN), st.booleans(), st.sampled_from("ab")), max_size=12
)


@given(parameters, st.integers(GRAIN, 5 * GRAIN))
def test_pieces_cover_every_parameter_once_and_in_order(
    named: list[tuple[int, bool, str]], bucket_size: int
) -> None:
    sizes, divisible, kinds = ([each[i] for each in named] for i in range(3))
    buckets = cut_update(sizes, divisible, kinds, bucket_size)
    pieces = [piece for bucket in buckets for piece in bucket.slices]
    for member, size in enumerate(sizes):
        own = [piece for piece in pieces if piece.member == member]
        assert [p.start for p in own] == [0, *(p.stop for p in own[:-1])]
        assert own[-1].stop == size
        assert all(p.start % GRAIN == 0 for p in own)
        assert divisible[member] or len(own) == 1
    assert [p.member for p in pieces] == sorted(p.member for p in pieces)
    for bucket in buckets:
        ends = [
            o + padded(p.stop - p.start) for o, p in zip(bucket.offsets, bucket.slices, strict=True)
        ]
        assert list(bucket.offsets) == [0, *ends[:-1]] and bucket.num_elements == ends[-1]
        assert bucket.num_elements <= bucket_size or len(bucket.slices) == 1
        assert len({kinds[p.member] for p in bucket.slices}) == 1


def test_a_large_parameter_fills_the_bucket_that_another_began() -> None:
    buckets = cut_update([100, 3 * GRAIN], [True, True], "aa", 2 * GRAIN)
    assert [bucket.slices for bucket in buckets] == [
        (Slice(0, 0, 100), Slice(1, 0, GRAIN)),
        (Slice(1, GRAIN, 3 * GRAIN),),
    ]


def test_nothing_joins_a_parameter_that_is_larger_than_a_bucket() -> None:
    buckets = cut_update([3 * GRAIN, 100, 100], [False, True, False], "aaa", 2 * GRAIN)
    assert [bucket.slices for bucket in buckets] == [
        (Slice(0, 0, 3 * GRAIN),),
        (Slice(1, 0, 100), Slice(2, 0, 100)),
    ]


def test_buckets_smaller_than_a_grain_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"memory.bucket_size = 100 elements .* 2048 or more"):
        cut_update([1], [True], "a", 100)
