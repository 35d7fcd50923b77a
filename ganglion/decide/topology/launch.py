"""How this process was started, read from its environment: torchrun, mpiexec, srun or alone.

Environment variables of launchers are read here only, from a mapping that is passed in.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from ganglion.errors import LaunchError

# Rank and number of ranks, in all and on this host. srun may set PMI_RANK too, but not the others.
_MPIEXEC = (
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel
    ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),  # Cray
    (  # Open MPI
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One process of those that were started together."""

    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0
    local_num_ranks: int = 1
    master_addr: str = ""
    master_port: int = 0
    launcher: str = "alone"
    attempt: int = 0  # restarts of all processes so far


def read_launch(environment: Mapping[str, str]) -> Launch:
    """Return how this process was started; raise LaunchError for an incomplete environment."""
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return _torchrun(environment)
    for names in _MPIEXEC:  # before Slurm, whose srun may have started mpiexec's helpers
        if all(name in environment for name in names):
            return _mpiexec(environment, names)
    if "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment:
        # A single task runs alone; inside `srun --pty bash` it may start processes of its own.
        return Launch() if _num_tasks(environment) == 1 else _srun(environment)
    return Launch()


def _torchrun(environment: Mapping[str, str]) -> Launch:
    num_ranks = _number(environment, "WORLD_SIZE")
    return Launch(
        rank=_number(environment, "RANK"),
        num_ranks=num_ranks,
        local_rank=_number(environment, "LOCAL_RANK"),
        local_num_ranks=_number(environment, "LOCAL_WORLD_SIZE", num_ranks),
        master_addr=_text(environment, "MASTER_ADDR"),
        master_port=_number(environment, "MASTER_PORT"),
        launcher="torchrun",
        attempt=_number(environment, "TORCHELASTIC_RESTART_COUNT", 0),
    )


def _mpiexec(environment: Mapping[str, str], names: tuple[str, ...]) -> Launch:
    rank, num_ranks, local_rank, local_num_ranks = (_number(environment, n) for n in names)
    if num_ranks == 1:
        return Launch()
    return Launch(
        rank=rank,
        num_ranks=num_ranks,
        local_rank=local_rank,
        local_num_ranks=local_num_ranks,
        launcher="mpiexec",
    )


def _srun(environment: Mapping[str, str]) -> Launch:
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get(
        "SLURM_TASKS_PER_NODE", "1"
    )
    return Launch(
        rank=_number(environment, "SLURM_PROCID"),
        num_ranks=_num_tasks(environment),
        local_rank=_number(environment, "SLURM_LOCALID"),
        local_num_ranks=_tasks_of_node(tasks, _number(environment, "SLURM_NODEID", 0)),
        master_addr=environment.get("MASTER_ADDR") or first_host(nodes),
        master_port=_number(environment, "MASTER_PORT", _step_port(environment)),
        launcher="srun",
    )


def _num_tasks(environment: Mapping[str, str]) -> int:
    """Return the tasks of this step; in a shell of `salloc`, SLURM_NTASKS is the whole job's."""
    if "SLURM_STEP_NUM_TASKS" in environment:
        return _number(environment, "SLURM_STEP_NUM_TASKS")
    return _number(environment, "SLURM_NTASKS")


def _step_port(environment: Mapping[str, str]) -> int:
    """Return a port that all tasks of a step agree on and other steps on its hosts do not use."""
    step = environment["SLURM_STEP_ID"]
    # Special steps have names, such as "extern"; hash() would differ from process to process.
    number = int(step) if step.isdecimal() else zlib.crc32(step.encode())
    # With a factor, since the second step of a job would else get the port of the first one of the
    # next job; below 32768, from where systems take ports for outgoing connections.
    return 20_000 + (_number(environment, "SLURM_JOB_ID", 0) + 1009 * number) % 12_000


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list: `first_host('gpu[003-007,9],cpu1')` is gpu003."""
    match = re.match(r"([^,\[\]]+)(?:\[([^\]]+)\])?", nodelist)
    if match is None:
        raise LaunchError(
            f"the Slurm node list {nodelist!r} names no host; set MASTER_ADDR to the first node"
        )
    prefix, numbers = match.groups()
    return prefix if numbers is None else prefix + re.split(r"[-,]", numbers)[0]


def _tasks_of_node(tasks: str, node: int) -> int:
    """Return one node's number of tasks from Slurm's run-length form, such as `4(x2),3`."""
    counts: list[int] = []
    for part in tasks.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise LaunchError(f"SLURM_TASKS_PER_NODE = {tasks!r} cannot be read")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[min(node, len(counts) - 1)]


def _text(environment: Mapping[str, str], name: str) -> str:
    if name not in environment and name.startswith("SLURM_"):
        raise LaunchError(
            f"{name} is not set, though SLURM_PROCID and SLURM_STEP_ID are: start with srun, or "
            f"unset SLURM_PROCID to run alone"
        )
    if name not in environment:
        raise LaunchError(
            f"{name} is not set, though RANK or WORLD_SIZE is: start with torchrun or srun, or "
            f"unset RANK and WORLD_SIZE to run alone"
        )
    return environment[name]


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    if name not in environment and default is not None:
        return default
    text = _text(environment, name)
    try:
        return int(text)
    except ValueError as error:
        raise LaunchError(f"{name} = {text!r} is not a number; the launcher must set it") from error
