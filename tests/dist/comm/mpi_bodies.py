"""Bodies of the ranks of the MPI tests.

    mpiexec -n N python -m tests.dist.comm.mpi_bodies FOLDER NAMES

Each body gets the meeting and returns something JSON can hold; rank R leaves its results in
FOLDER/rankR.json after each of them, and its stacks in FOLDER/stackPID when it is sent SIGUSR1.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from ganglion.cli.overrides import split_overrides
from ganglion.decide.config import Override, RunFile, load_run_file, resolve
from ganglion.decide.config.files import QUICKSTART, recipe
from ganglion.decide.topology import Mesh
from ganglion.errors import CommError
from ganglion.execute.comm import MAX, SUM, torch_world
from ganglion.execute.comm.mpi.group import EAGER_BYTES
from ganglion.execute.comm.mpi.world import MpiGroupFactory, mpi_launch
from ganglion.execute.comm.reduce_order import combine, combine_by_tree
from tests.dist.comm.test_comm_gloo import every_collective
from tests.support.command import TINY, metrics_of

TIMEOUT_S = 60.0
FOUR_STEPS = ["--train.steps", "4"]
DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)
SIZES = (0, 1, 7, 1001, EAGER_BYTES + 3, 100_003)
SHAPES = ((), (0,), (1,), (3, 0, 2), (5, 7, 3), (1, 1, 1, 1, 2), (700, 501))


def open_mail(meeting: MpiGroupFactory) -> Any:
    return meeting.world(Mesh(data=meeting.num_ranks)).open_transport("data")


def numbers(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a rank's data, which every rank can make."""
    generator = torch.Generator().manual_seed(1000 * rank + size)
    values = torch.randn(size, generator=generator, dtype=torch.float64) * 10
    return values.to(dtype)


def meshes(meeting: MpiGroupFactory) -> list[dict[str, list[float]]]:
    results = []
    for mesh in (Mesh(data=meeting.num_ranks), Mesh(x=meeting.num_ranks)):
        world = meeting.world(mesh)
        results.append(every_collective(world))
        world.close()
    return results


def exact(meeting: MpiGroupFactory) -> list[str]:
    """Return the cases in which some bit differs from a combination in order of rank."""
    world = meeting.world(Mesh(data=meeting.num_ranks))
    group, size, wrong = world.group("data"), meeting.num_ranks, []
    for dtype in DTYPES:
        for count in SIZES:
            wrong += [f"{dtype} {count} {case}" for case in _differences(group, size, dtype, count)]
    world.close()
    return wrong


def _differences(group: Any, size: int, dtype: torch.dtype, count: int) -> list[str]:
    all_parts = [numbers(rank, count * size, dtype) for rank in range(size)]
    mine = all_parts[group.index]
    results, expected = {}, {}
    for op in (SUM, MAX):
        total = torch.empty_like(mine)
        combine(all_parts, total, op)
        if op == SUM and dtype.is_floating_point:
            plain = torch.stack(all_parts).double().sum(0)
            limits = {"rtol": torch.finfo(dtype).eps, "atol": 1e-5}
            assert torch.allclose(total.double(), plain, **limits), (dtype, count)
        results[f"all_reduce {op}"], expected[f"all_reduce {op}"] = mine.clone(), total
        results[f"scatter {op}"] = torch.empty(count, dtype=dtype)
        expected[f"scatter {op}"] = total[group.index * count : (group.index + 1) * count]
        handles = [group.all_reduce(results[f"all_reduce {op}"], op)]
        handles += [group.reduce_scatter(results[f"scatter {op}"], mine.clone(), op)]
        for root in range(size):
            tree = torch.empty_like(mine)
            combine_by_tree(all_parts, root, tree, op)
            name = f"reduce {op} {root}"
            results[name], expected[name] = mine.clone(), tree if group.index == root else mine
            handles.append(group.reduce(results[name], root, op))
        for handle in handles:
            handle.wait()
    results["gather"] = torch.empty(count * size * size, dtype=dtype)
    expected["gather"] = torch.cat(all_parts)
    results["root"], expected["root"] = mine.clone(), all_parts[-1]
    last = [group.broadcast(results["root"], size - 1), group.all_gather(results["gather"], mine)]
    for handle in reversed(last):  # in any order
        handle.wait()
    return [name for name in results if not torch.equal(results[name], expected[name])]


def in_place(meeting: MpiGroupFactory) -> list[bool]:
    """Input and output may be the same memory."""
    world = meeting.world(Mesh(data=meeting.num_ranks))
    group, same = world.group("data"), []
    for count in (4, 30_000):
        parts = [numbers(rank, count * group.size, torch.float32) for rank in range(group.size)]
        whole, total = parts[group.index].clone(), torch.empty_like(parts[0])
        combine(parts, total, SUM)
        mine = whole.view(group.size, -1)[group.index]
        group.reduce_scatter(mine, whole).wait()
        group.all_gather(whole, mine).wait()
        same.append(torch.equal(whole, total))
    world.close()
    return same


def interleaved(meeting: MpiGroupFactory) -> list[bool]:
    """Ranks may start collectives of different groups in different orders."""
    worlds = [meeting.world(Mesh(data=meeting.num_ranks)) for _ in range(3)]
    groups = [world.group("data") for world in worlds]
    turned = groups[meeting.rank :] + groups[: meeting.rank]
    right = []
    for count in (3, 50_001):
        tensors = {g: [torch.full((count,), i + n) for n in range(2)] for i, g in enumerate(groups)}
        handles = [group.all_reduce(tensor) for group in turned for tensor in tensors[group]]
        for handle in reversed(handles):
            handle.wait()
        for i, group in enumerate(groups):
            sums = [torch.full((count,), (i + n) * meeting.num_ranks) for n in range(2)]
            right += [torch.equal(*pair) for pair in zip(tensors[group], sums, strict=True)]
    for world in worlds:
        world.close()
    return right


def by_itself(meeting: MpiGroupFactory) -> list[bool]:
    """A started collective ends while this rank does not call MPI."""
    world = meeting.world(Mesh(data=meeting.num_ranks))
    group, ended = world.group("data"), []
    for count in (3, 2_000_003):
        start_s = time.perf_counter()
        handle = group.all_reduce(torch.ones(count))
        while handle.finished_s is None and time.perf_counter() < start_s + 30:
            time.sleep(0.001)
        ended.append(start_s <= (handle.finished_s or 0.0) <= time.perf_counter())
        handle.wait()
    world.close()
    return ended


def disagreeing(meeting: MpiGroupFactory) -> list[str]:
    calls: list[Callable[[Any], Any]] = [
        lambda g: g.all_reduce(torch.zeros(5 + meeting.rank)),
        lambda g: g.all_reduce(torch.zeros(99_000 * (1 + meeting.rank))),
        lambda g: g.broadcast(torch.zeros(5)) if meeting.rank else g.all_reduce(torch.zeros(5)),
        lambda g: g.all_reduce(torch.zeros(3, dtype=torch.bool)),
        lambda g: g.all_reduce(torch.zeros(2, 3).t()),
        lambda g: g.all_gather(torch.zeros(5), torch.zeros(2)),
        lambda g: g.broadcast(torch.zeros(2), root=9),
    ]
    return [_error_of(meeting, call) for call in calls]


def _error_of(meeting: MpiGroupFactory, call: Callable[[Any], Any]) -> str:
    world = meeting.world(Mesh(data=meeting.num_ranks))
    try:
        call(world.group("data")).wait()
    except CommError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        world.close()
    return "no error"


def stalled(meeting: MpiGroupFactory) -> list[str]:
    """The last rank stays away from a collective, until the others have given up."""
    world, mail, last = meeting.world(Mesh(data=meeting.num_ranks)), open_mail(meeting), []
    group: Any = world.group("data")
    if meeting.rank == meeting.num_ranks - 1:
        for _ in mail.peers:
            last.append(mail.receive(TIMEOUT_S).header.kind)
    else:
        group._timeout_s = 0.3
        for _ in range(2):  # what failed stays failed
            try:
                group.all_reduce(torch.zeros(10)).wait()
            except CommError as error:
                last.append(f"{type(error).__name__}: {error}")
        mail.post(meeting.num_ranks - 1, "gave_up", torch.zeros(1))
    mail.flush(TIMEOUT_S)
    mail.close()
    world.close()
    return last


def messages(meeting: MpiGroupFactory) -> list[str]:
    """Post messages of all shapes and dtypes to everybody; return what arrived wrongly."""
    mail, wrong, count = open_mail(meeting), [], 0
    kinds = [(shape, dtype) for shape in SHAPES for dtype in (*DTYPES, torch.bool, torch.complex64)]
    for number, (shape, dtype) in enumerate(kinds):
        for target in range(meeting.num_ranks):
            tensor = _content(meeting.rank, number, shape, dtype)
            mail.post(target, "all", tensor, step=number, microbatch=target, version=3)
            tensor.fill_(0)  # the caller may use it again at once
    nexts = [0] * meeting.num_ranks
    while count < len(kinds) * meeting.num_ranks:
        source, header, tensor = mail.receive(TIMEOUT_S)
        shape, dtype = kinds[header.step]
        right = torch.equal(tensor, _content(source, header.step, shape, dtype))
        fits = (header.shape, header.dtype, header.microbatch) == (shape, dtype, meeting.rank)
        if not (right and fits and tensor.shape == shape and header.step == nexts[source]):
            wrong.append(f"{source}: {header}")
        nexts[source] += 1
        count += 1
    mail.flush(TIMEOUT_S)
    assert mail.poll() is None
    mail.close()
    return wrong


def _content(rank: int, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.full(shape, (rank + number) % 2 if dtype == torch.bool else rank + number % 50)
    return (tensor.transpose(0, -1) if tensor.dim() == 3 else tensor).to(dtype).reshape(shape)


def strided(meeting: MpiGroupFactory) -> list[bool]:
    """Both sides post much at once; what is not contiguous arrives as it looks."""
    mail, seen = open_mail(meeting), []
    for target in mail.peers:
        for size in (1500, 2000):
            mail.post(target, "big", (torch.arange(size * size) + meeting.rank).view(size, -1).t())
    for _ in range(2 * len(mail.peers)):
        source, _, tensor = mail.receive(TIMEOUT_S)
        size = tensor.shape[0]
        seen.append(torch.equal(tensor, (torch.arange(size * size) + source).view(size, -1).t()))
    mail.flush(TIMEOUT_S)
    mail.close()
    return seen


def troubled_mail(meeting: MpiGroupFactory) -> list[str]:
    mail: Any = open_mail(meeting)
    errors = [_complaint(lambda: mail.receive(0.1, awaiting="a gradient"))]
    errors.append(_complaint(lambda: mail.post(99, "forward", torch.zeros(1))))
    meeting.world(Mesh(data=meeting.num_ranks)).barrier()
    if meeting.rank:
        mail._comm.Send([b"garbage" * 20, MPI.BYTE], 0, 2)
    else:
        errors.append(_complaint(lambda: mail.receive(TIMEOUT_S, awaiting="a gradient")))
    mail.close()
    other = open_mail(meeting)
    if meeting.rank:
        other.post(0, "last", torch.ones(1))
        other.close()
    else:
        errors.append(str([other.receive(TIMEOUT_S).header.kind for _ in other.peers]))
        errors.append(_complaint(lambda: other.receive(TIMEOUT_S, awaiting="a gradient")))
        errors.append(_complaint(lambda: other.post(1, "more", torch.ones(1))))
        other.close()
        errors.append(_complaint(lambda: other.post(1, "more", torch.ones(1))))
    return errors


def _complaint(call: Callable[[], Any]) -> str:
    try:
        return f"no error, {call()}"
    except CommError as error:
        return f"{type(error).__name__}: {error}"


def again_and_again(meeting: MpiGroupFactory) -> list[list[int]]:
    """Return the descriptors and threads before and after making a hundred groups."""
    counts = []
    for rounds in (3, 100):
        for _ in range(rounds):
            world, mail = meeting.world(Mesh(data=meeting.num_ranks)), open_mail(meeting)
            world.group("data").all_reduce(torch.ones(10)).wait()
            world.close()
            mail.close()
        counts.append([len(list(Path("/proc/self/fd").iterdir())), threading.active_count()])
    return counts


def torch_too(meeting: MpiGroupFactory) -> list[Any]:
    """Checkpoints need torch's own group."""
    ranks: list[Any] = [None] * meeting.num_ranks
    dist.all_gather_object(ranks, meeting.rank)
    return [dist.get_backend(), ranks]


def trained_over_gloo(meeting: MpiGroupFactory) -> list[float]:
    """Return the losses of a training in these processes, which Gloo carries."""
    from ganglion.cli.folder import prepare_folder
    from ganglion.cli.launch.rank_main import train_in_folder

    file = tiny_run_file(Path(sys.argv[1]) / "run")
    plan = resolve(file, meeting.num_ranks)
    launch = mpi_launch()
    world = torch_world(launch.rank, plan.mesh(), TIMEOUT_S, transport="torch")
    if launch.rank == 0:
        prepare_folder(file, plan, "run", resume=False)
    world.barrier()
    with warnings.catch_warnings(action="default"), contextlib.redirect_stdout(io.StringIO()):
        assert train_in_folder(Path(file.output.dir), launch, resume=False, world=world) == 0
    return [record["loss"] for record in metrics_of(Path(file.output.dir))]


def tiny_run_file(folder: Path) -> RunFile:
    """Return what `ganglion train` would make of TINY and four steps."""
    keys = [*TINY, *FOUR_STEPS, "--output.dir", str(folder)]
    overrides = [Override(*pair) for pair in split_overrides(["train", *keys])[1]]
    return load_run_file(recipe(QUICKSTART), overrides, QUICKSTART)


def dying(meeting: MpiGroupFactory) -> None:
    group = meeting.world(Mesh(data=meeting.num_ranks)).group("data")
    group.barrier()
    if meeting.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    group.all_reduce(torch.zeros(100_000)).wait()


def raising(meeting: MpiGroupFactory) -> None:
    group = meeting.world(Mesh(data=meeting.num_ranks)).group("data")
    group.barrier()
    if meeting.rank == 1:
        raise ValueError("something nobody catches")
    group.all_reduce(torch.zeros(100_000)).wait()


def main() -> None:
    """Run the named bodies one after the other."""
    folder = Path(sys.argv[1])
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    with (folder / f"stack{os.getpid()}").open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
        meeting = MpiGroupFactory(TIMEOUT_S)
        results = {}
        for name in sys.argv[2:]:  # the last may be the end of the process
            results[name] = globals()[name](meeting)
            (folder / f"rank{meeting.rank}.json").write_text(json.dumps(results))
        faulthandler.unregister(signal.SIGUSR1)


if __name__ == "__main__":
    main()
