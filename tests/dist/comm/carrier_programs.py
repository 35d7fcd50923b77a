"""Programs for all carriers: what four ranks do, what should come of it, and doing it.

A program is phases of steps: messages, and collectives of groups along one axis or both. In a phase
every rank starts its steps in an order of its own, in which only those of one group and those of
one mailbox keep theirs, looks for arrivals in between, and then waits for some of what it started;
the rest goes on into the next phase. Barriers come at the end of a phase. Nobody waits for a step
before all have started it, so a program cannot hang by itself.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ganglion.decide.topology import Mesh
from ganglion.execute.comm import SUM, Arrival, Handle, World
from ganglion.trace import Recorder
from tests.single.comm.test_shm_group_parts import plain, plain_tree
from tests.support.messages import contents, make_tensor

MESH = Mesh(data=2, x=2)
NUM_RANKS = MESH.num_ranks
AXES: tuple[tuple[str, ...], ...] = (("data", "x"), ("data",), ("x",))
MAILS = AXES
GROUP_SIZES = {axes: len(MESH.group_of(0, axes)) for axes in AXES}
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")
NUMERIC = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.uint8, torch.int8, torch.int32, torch.int64),
)
DEADLINE_S = 60.0
_SPARE_BYTES = 8 << 20  # memory from `allocate`, for the collectives that want it
_ALIGN_BYTES = 64


@dataclass(frozen=True)
class Message:
    """One rank posts `make_tensor(number)`."""

    mail: tuple[str, ...]
    source: int
    target: int
    number: int


@dataclass(frozen=True)
class Collective:
    """All groups along `axes` do the same, with data that follow from the seed.

    Sums of `rough` floats depend on their order; those of others are exact. With `shared` the data
    lie in memory that the group allocated.
    """

    axes: tuple[str, ...]
    kind: str
    dtype: torch.dtype
    op: str
    size: int
    root: int
    rough: bool
    shared: bool
    seed: int

    @property
    def is_rough_sum(self) -> bool:
        adds = self.op == SUM and self.kind in ("all_reduce", "reduce_scatter", "reduce")
        return adds and self.rough and self.dtype.is_floating_point

    def contribution(self, rank: int) -> Tensor:
        """Return what a rank brings along."""
        count = self.size * (GROUP_SIZES[self.axes] if self.kind == "reduce_scatter" else 1)
        generator = torch.Generator().manual_seed(1000 * self.seed + rank)
        if self.rough and self.dtype.is_floating_point:
            values = torch.randn(count, generator=generator, dtype=torch.float64) * 100
        else:
            values = torch.randint(0, 9, (count,), generator=generator)
        return values % 2 == 0 if self.dtype == torch.bool else values.to(self.dtype)


Step = Message | Collective


@dataclass(frozen=True)
class Phase:
    """Steps that are started in any order, and the groups that have a barrier after them."""

    steps: tuple[Step, ...]
    barriers: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Program:
    """What all ranks do; the seed decides about the order on each."""

    phases: tuple[Phase, ...]
    seed: int

    def steps(self) -> list[Step]:
        return [step for phase in self.phases for step in phase.steps]


@dataclass(frozen=True)
class Letter:
    """What a rank can tell about a message that came, or about one that was meant for it."""

    position: int
    numbers: tuple[int, ...]
    kind: str
    content: bytes


@dataclass
class Outcome:
    """What came of a program on one rank.

    `results` are the bytes of what the collectives left behind, by position of the step; `letters`
    are the arrivals by mailbox and source, in order. `flows` are those of all messages by the
    position of their step, as the sender's trace has them, the receiver's trace, and the headers.
    """

    results: dict[int, bytes] = field(default_factory=dict)
    letters: dict[tuple[tuple[str, ...], int], list[Letter]] = field(default_factory=dict)
    sent: dict[int, tuple[int, int]] = field(default_factory=dict)
    noted: dict[int, tuple[int, int]] = field(default_factory=dict)
    flows: dict[int, int] = field(default_factory=dict)


# --- what should come of it, in one process and without any of the code that is tested -----------


def expected(program: Program, rank: int) -> Outcome:
    """Return what a rank should have in the end; nothing is said about traces."""
    outcome = Outcome()
    for position, step in enumerate(program.steps()):
        if isinstance(step, Collective):
            outcome.results[position] = raw(expected_result(step, rank))
        elif step.target == rank:
            letter = Letter(position, numbers_of(step, position), "forward", _content(step))
            outcome.letters.setdefault((step.mail, step.source), []).append(letter)
    return outcome


def expected_result(step: Collective, rank: int) -> Tensor:
    """Return a collective's result, sums taken in order of rank or along the tree."""
    ranks = MESH.group_of(rank, step.axes)
    parts = [step.contribution(other) for other in ranks]
    index, root = ranks.index(rank), root_of(step)
    if step.kind == "all_reduce":
        return plain(parts, step.op)
    if step.kind == "all_gather":
        return torch.cat(parts)
    if step.kind == "reduce_scatter":
        return plain(parts, step.op)[index * step.size : (index + 1) * step.size]
    if step.kind == "broadcast":
        return parts[root]
    if step.kind == "reduce" and index == root:
        return plain_tree(parts, root, step.op)
    return parts[index]


def root_of(step: Collective) -> int:
    return step.root % GROUP_SIZES[step.axes]


def numbers_of(step: Message, position: int) -> tuple[int, int, int, int]:
    """Return the step, stage, microbatch and version that a message is posted with."""
    return step.number, position % 3 - 1, position, step.number % 5 - 1


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _content(step: Message) -> bytes:
    return contents(make_tensor(step.number))


# --- doing it -------------------------------------------------------------------------------------


class Performer:
    """One rank's groups and mailboxes on one carrier, for one program after the other."""

    def __init__(self, world: World) -> None:
        self.rank = world.rank
        self.groups = {axes: world.group(*axes) for axes in AXES}
        self.spare = {
            axes: group.allocate(_SPARE_BYTES, torch.uint8) for axes, group in self.groups.items()
        }
        self.trace = Recorder(world.rank)
        self.mails = {axes: world.open_transport(*axes, trace=self.trace) for axes in MAILS}

    def perform(self, program: Program) -> Outcome:
        """Do this rank's part of a program."""
        return _Performance(self, program).run()

    def close(self) -> None:
        for mail in self.mails.values():
            mail.close()


class _Performance:
    """One rank's part of one program."""

    def __init__(self, performer: Performer, program: Program) -> None:
        self._performer = performer
        self._program = program
        self._draw = random.Random(f"{program.seed} {performer.rank}")
        self._started: list[tuple[int, Handle, Tensor]] = []
        self._used = dict.fromkeys(AXES, 0)
        self._outcome = Outcome()

    def run(self) -> Outcome:
        num_events, first = len(self._performer.trace), 0
        for phase in self._program.phases:
            for position, step in self._interleaved(phase.steps, first):
                self._start(position, step)
                self._look()
            for axes in phase.barriers:
                self._performer.groups[axes].barrier()
            first += len(phase.steps)
            self._settle(self._draw.randrange(len(self._started) + 1))
        self._settle(len(self._started))
        self._receive_the_rest()
        self._note_events(num_events)
        return self._outcome

    def _interleaved(self, steps: tuple[Step, ...], first: int) -> Iterator[tuple[int, Step]]:
        """Yield this rank's steps; those of one group or mailbox stay in order."""
        lanes: dict[tuple[str, tuple[str, ...]], list[tuple[int, Step]]] = {}
        for position, step in enumerate(steps, first):
            if isinstance(step, Collective):
                lanes.setdefault(("group", step.axes), []).append((position, step))
            elif step.source == self._performer.rank:
                lanes.setdefault(("mail", step.mail), []).append((position, step))
        while lanes:
            lane = self._draw.choice(sorted(lanes))
            yield lanes[lane].pop(0)
            if not lanes[lane]:
                del lanes[lane]

    def _start(self, position: int, step: Step) -> None:
        if isinstance(step, Message):
            self._post(position, step)
            return
        group, mine = self._performer.groups[step.axes], self._placed(step)
        output = mine
        if step.kind == "all_reduce":
            handle = group.all_reduce(mine, step.op)
        elif step.kind == "all_gather":
            output = torch.empty(step.size * group.size, dtype=step.dtype)
            handle = group.all_gather(output, mine)
        elif step.kind == "reduce_scatter":
            output = torch.empty(step.size, dtype=step.dtype)
            handle = group.reduce_scatter(output, mine, step.op)
        elif step.kind == "broadcast":
            handle = group.broadcast(mine, root_of(step))
        else:
            handle = group.reduce(mine, root_of(step), step.op)
        self._started.append((position, handle, output))

    def _placed(self, step: Collective) -> Tensor:
        """Return this rank's contribution, in memory of the group if that is wanted."""
        mine = step.contribution(self._performer.rank)
        start = self._used[step.axes]
        if not step.shared or not 0 < mine.nbytes <= _SPARE_BYTES - start:
            return mine
        self._used[step.axes] = start + -(-mine.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        room = self._performer.spare[step.axes][start : start + mine.nbytes]
        return room.view(step.dtype).copy_(mine)

    def _post(self, position: int, message: Message) -> None:
        tensor = make_tensor(message.number)
        step, stage, microbatch, version = numbers_of(message, position)
        places = {"step": step, "stage": stage, "microbatch": microbatch, "version": version}
        self._performer.mails[message.mail].post(message.target, "forward", tensor, **places)
        if tensor.is_contiguous():
            tensor.zero_()  # it is the caller's own again

    def _look(self) -> None:
        """Take what has arrived, now and then."""
        mail = self._draw.choice(MAILS)
        arrival = self._performer.mails[mail].poll() if self._draw.random() < 0.5 else None
        if arrival is not None:
            self._keep(mail, arrival)

    def _keep(self, mail: tuple[str, ...], arrival: Arrival) -> None:
        source, header, tensor = arrival
        numbers = (header.step, header.stage, header.microbatch, header.version)
        letter = Letter(header.microbatch, numbers, header.kind, contents(tensor))
        self._outcome.letters.setdefault((mail, source), []).append(letter)
        self._outcome.flows[header.microbatch] = header.flow

    def _settle(self, count: int) -> None:
        """Wait for some of what was started, in any order."""
        self._draw.shuffle(self._started)
        for position, handle, output in self._started[:count]:
            handle.wait()
            assert handle.is_done()
            self._outcome.results[position] = raw(output)
        del self._started[:count]

    def _receive_the_rest(self) -> None:
        due = [
            step.mail
            for step in self._program.steps()
            if isinstance(step, Message) and step.target == self._performer.rank
        ]
        for (mail, _), letters in self._outcome.letters.items():
            for _ in letters:
                due.remove(mail)
        self._draw.shuffle(due)
        for mail in due:
            self._keep(mail, self._performer.mails[mail].receive(DEADLINE_S, f"a letter of {mail}"))
        for transport in self._performer.mails.values():
            transport.flush(DEADLINE_S)
            assert transport.poll() is None, "more came than was sent"

    def _note_events(self, num_known: int) -> None:
        for event in self._performer.trace.events()[num_known:]:
            found = {"send_forward": self._outcome.sent, "receive_forward": self._outcome.noted}
            found[event.kind][event.microbatch] = (event.flow, event.bytes)
