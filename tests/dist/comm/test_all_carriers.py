"""One program, every carrier: threads, shared memory, Gloo and MPI give what one process computes.

Every bit is compared, with one exception: Gloo adds the floats of more than two ranks in an order
of its own and in their own dtype. There each sum may be off by one rounding for each addition.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import Phase as Stage
from hypothesis import strategies as st

from ganglion.cli.launch.mpi import require_mpiexec
from ganglion.decide.topology import Mesh
from ganglion.execute.comm import MAX, SUM, World, run_threads, torch_world
from tests.dist.comm.carrier_programs import (
    AXES,
    DEADLINE_S,
    GROUP_SIZES,
    KINDS,
    MAILS,
    MESH,
    NUM_RANKS,
    NUMERIC,
    Collective,
    Message,
    Outcome,
    Performer,
    Phase,
    Program,
    expected,
)
from tests.dist.comm.mpi_pool import MpiPool, meeting
from tests.dist.comm.test_comm_gloo import every_collective
from tests.support.harness import RankFailed, RankPool
from tests.support.messages import make_tensor
from tests.support.profiles import examples

pytestmark = pytest.mark.timeout(240)
NUM_PROGRAMS = examples(50)
LOCAL, SHM, TORCH, MPI = "local", "shm", "torch", "mpi"
HANGS_AFTER_S = 50.0  # before the carriers give up by themselves: then all stacks are shown


class Carriers:
    """Everything that can carry a program here; processes are started once, when first needed."""

    def __init__(self) -> None:
        has_mpi = importlib.util.find_spec("mpi4py") is not None
        self.names = (LOCAL, SHM, TORCH, *([MPI] if has_mpi else []))
        self._pools: dict[str, RankPool] = {}

    def run(self, carrier: str, body: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `body(performer, *args)` on every rank."""
        if carrier == LOCAL:
            return run_threads(MESH, lambda world: on_thread(world, body, args))
        kind = MPI if carrier == MPI else TORCH
        if kind not in self._pools:
            mpi = kind == MPI
            self._pools[kind] = (
                MpiPool(NUM_RANKS, require_mpiexec()) if mpi else RankPool(NUM_RANKS)
            )
        try:
            return self._pools[kind].run(on_process, (carrier, body, args), HANGS_AFTER_S)
        except RankFailed:
            self._pools.pop(kind).close()
            raise

    def end_mpi(self) -> tuple[int, str]:
        """Let the ranks of mpiexec go; return its code and all that they printed."""
        self.run(MPI, Performer.close)
        ended = self._pools.pop(MPI)  # what comes after starts others
        assert isinstance(ended, MpiPool)
        return ended.end()

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="module")
def carriers() -> Iterator[Carriers]:
    found = Carriers()
    yield found
    found.close()


def on_thread(world: World, body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    performer = Performer(world)
    try:
        return body(performer, *args)
    finally:
        performer.close()


def on_process(world: World, carrier: str, body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return body(performer_of(carrier, world.rank), *args)


@functools.cache
def performer_of(carrier: str, rank: int) -> Performer:
    """Return what a rank's process keeps open from one program to the next."""
    if carrier == MPI:
        return Performer(meeting().world(MESH))
    return Performer(torch_world(rank, MESH, DEADLINE_S, transport=carrier))


# --- programs ------------------------------------------------------------------------------------


def message(mail: tuple[str, ...], source: int, pick: int, number: int) -> Message:
    ranks = MESH.group_of(source, mail)
    return Message(mail, source, ranks[pick % len(ranks)], number)


def collective(dtype: torch.dtype, kind: str, **options: Any) -> Collective:
    """Return a step; only copies are made of bools."""
    copies = dtype != torch.bool or kind in ("all_gather", "broadcast")
    return Collective(dtype=dtype, kind=kind if copies else "all_gather", **options)


messages = st.builds(
    message,
    mail=st.sampled_from(MAILS),
    source=st.integers(0, NUM_RANKS - 1),
    pick=st.integers(0, NUM_RANKS - 1),
    number=st.integers(0, 10_000),
)
collectives = st.builds(
    collective,
    axes=st.sampled_from(AXES),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from([*NUMERIC, torch.bool]),
    op=st.sampled_from([SUM, MAX]),
    size=st.one_of(st.integers(0, 9), st.sampled_from([31, 1001, 4097, 9001, 70_001])),
    root=st.integers(0, NUM_RANKS - 1),
    rough=st.booleans(),
    shared=st.booleans(),
    seed=st.integers(0, 1000),
)
phases = st.builds(
    Phase,
    steps=st.lists(messages | collectives, min_size=1, max_size=10).map(tuple),
    barriers=st.lists(st.sampled_from(AXES), max_size=2).map(tuple),
)
programs = st.builds(
    Program,
    phases=st.lists(phases, min_size=1, max_size=3).map(tuple),
    seed=st.integers(0, 1000),
)


def everything(size: int, dtypes: tuple[torch.dtype, ...], *, shared: bool) -> Program:
    """Return a program that lacks no kind, dtype and group, with a message after each call."""
    steps: list[Message | Collective] = []
    for axes in AXES:
        for at, dtype in enumerate(dtypes):
            for kind in KINDS:
                options = {"op": SUM, "size": size, "root": at, "rough": True, "shared": shared}
                steps.append(collective(dtype, kind, axes=axes, seed=at, **options))
                steps.append(
                    message(MAILS[at % len(MAILS)], at % NUM_RANKS, len(steps) // 3, len(steps))
                )
    return Program((Phase(tuple(steps), AXES),), seed=size)


# --- the property --------------------------------------------------------------------------------


@settings(
    max_examples=NUM_PROGRAMS,
    # A smaller program says no more than the step that is named, and a hang takes long.
    phases=(Stage.explicit, Stage.reuse, Stage.generate),
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@example(everything(7, (*NUMERIC, torch.bool), shared=False))
@example(everything(0, (torch.bfloat16, torch.bool), shared=False))
@example(everything(70_001, (torch.float32, torch.bfloat16), shared=False))
@example(everything(30_001, NUMERIC, shared=True))
@given(programs)
def test_all_carriers_give_what_one_process_computes(carriers: Carriers, program: Program) -> None:
    wanted = [expected(program, rank) for rank in range(NUM_RANKS)]
    for carrier in carriers.names:
        outcomes = carriers.run(carrier, Performer.perform, program)
        found = [*different_results(carrier, program, outcomes, wanted)]
        found += [*different_letters(outcomes, wanted), *different_flows(program, outcomes)]
        assert not found, "\n".join([f"over {carrier}:", *found])


def different_results(
    carrier: str, program: Program, outcomes: list[Outcome], wanted: list[Outcome]
) -> Iterator[str]:
    steps = program.steps()
    for rank, (outcome, right) in enumerate(zip(outcomes, wanted, strict=True)):
        assert outcome.results.keys() == right.results.keys()
        for position, data in right.results.items():
            step = steps[position]
            assert isinstance(step, Collective)
            mine = outcome.results[position]
            if mine != data and not (carrier == TORCH and is_near(step, rank, mine)):
                yield f"rank {rank}, step {position}: another result of {step}"
            first = outcomes[MESH.group_of(rank, step.axes)[0]].results[position]
            if step.kind == "all_reduce" and mine != first:
                yield f"rank {rank}, step {position}: not what others have after {step}"


def is_near(step: Collective, rank: int, data: bytes) -> bool:
    """Return whether a sum of Gloo's is right but for one rounding at every addition."""
    size = GROUP_SIZES[step.axes]
    if step.kind == "reduce" or not (step.is_rough_sum and size > 2):
        return False
    ranks = MESH.group_of(rank, step.axes)
    parts = torch.stack([step.contribution(other).double() for other in ranks])
    if step.kind == "reduce_scatter":
        parts = parts.chunk(size, dim=1)[ranks.index(rank)]
    found = torch.frombuffer(bytearray(data), dtype=step.dtype).double()
    allowed = (size - 1) * torch.finfo(step.dtype).eps * parts.abs().sum(0)
    return found.shape == allowed.shape and bool(((found - parts.sum(0)).abs() <= allowed).all())


def different_letters(outcomes: list[Outcome], wanted: list[Outcome]) -> Iterator[str]:
    for rank, (outcome, right) in enumerate(zip(outcomes, wanted, strict=True)):
        for key in outcome.letters.keys() | right.letters.keys():
            came, sent = outcome.letters.get(key, []), right.letters.get(key, [])
            if [letter.position for letter in came] != [letter.position for letter in sent]:
                yield f"rank {rank}: other messages or another order from {key}"
            elif came != sent:
                wrong = [a.position for a, b in zip(came, sent, strict=True) if a != b]
                yield f"rank {rank}: messages of steps {wrong} arrived changed from {key}"


def different_flows(program: Program, outcomes: list[Outcome]) -> Iterator[str]:
    """Both traces have one event for each message, with its bytes and the flow of its header."""
    sent: dict[int, tuple[int, int]] = {}
    for outcome in outcomes:
        sent |= outcome.sent
    posted = {p: step for p, step in enumerate(program.steps()) if isinstance(step, Message)}
    sizes = {position: make_tensor(step.number).nbytes for position, step in posted.items()}
    if {position: num_bytes for position, (_, num_bytes) in sent.items()} != sizes:
        yield "senders noted other messages than there are"
    # Transports count for themselves: flows are told apart inside one.
    flows = {(posted[position].mail, flow) for position, (flow, _) in sent.items()}
    if len(flows) < len(sent) or any(flow < 0 for _, flow in flows):
        yield "two messages of a mailbox have one flow, or one has none"
    for rank, outcome in enumerate(outcomes):
        if outcome.noted != {position: sent.get(position) for position in outcome.flows}:
            yield f"rank {rank}: its trace has other events than those of the senders"
        if outcome.flows != {position: flow for position, (flow, _) in outcome.noted.items()}:
            yield f"rank {rank}: headers and trace have different flows"


def refused(performer: Performer, dtype: torch.dtype) -> str:
    """Return how an all-reduce of a dtype ends."""
    tensor = torch.ones(3, dtype=dtype)
    try:
        performer.groups["x",].all_reduce(tensor).wait()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return str(tensor.tolist())


def test_what_gloo_cannot_add_is_refused_by_name(carriers: Carriers) -> None:
    """The one dtype that not all carriers have."""
    for carrier in carriers.names:
        for text in carriers.run(carrier, refused, torch.int16):
            if carrier == TORCH:
                assert text.startswith("ProtocolError: all_reduce of ranks ")
                assert "cannot be carried out for a tensor of torch.int16, (3,)" in text
            else:
                assert text == "[2, 2, 2]"


MESHES = (Mesh(data=2, x=2), Mesh(data=4), Mesh(x=4))


def over_meshes(performer: Performer) -> list[dict[str, list[float]]]:
    """Return the results of all collectives on several meshes of the same MPI ranks."""
    results = []
    for mesh in MESHES:
        world = meeting().world(mesh)
        results.append(every_collective(world))
        world.close()
    return results


def test_mpi_carries_any_mesh_and_ends_without_a_word(carriers: Carriers) -> None:
    """The last test of this file: the ranks of mpiexec are gone afterwards."""
    if MPI not in carriers.names:
        pytest.skip("needs pip install 'ganglion[mpi]'")
    expected = [run_threads(mesh, every_collective) for mesh in MESHES]
    for rank, found in enumerate(carriers.run(MPI, over_meshes)):
        assert found == [by_rank[rank] for by_rank in expected]
    assert carriers.end_mpi() == (0, "")
