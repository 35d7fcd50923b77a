"""How a process finds out who started it, from the variables that torchrun and srun really set."""

from __future__ import annotations

import pytest

from ganglion.decide.topology import Launch, read_launch
from ganglion.decide.topology.launch import first_host
from ganglion.errors import LaunchError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_NODELIST": "gpu[003-004],cpu9",
    "SLURM_STEP_TASKS_PER_NODE": "4,2,1",
}


def test_alone() -> None:
    assert read_launch({}) == Launch()


def test_torchrun() -> None:
    assert read_launch(TORCHRUN) == Launch(
        rank=3,
        num_ranks=4,
        local_rank=1,
        local_num_ranks=2,
        master_addr="localhost",
        master_port=29500,
        launcher="torchrun",
    )


def test_srun() -> None:
    launch = read_launch(SRUN)
    assert (launch.rank, launch.num_ranks, launch.local_rank) == (5, 7, 1)
    assert launch.local_num_ranks == 2
    assert launch.master_addr == "gpu003"
    assert launch.master_port == 20_000 + 123456 % 12_000


def test_an_allocation_without_srun_is_alone() -> None:
    """Inside `salloc`, variables of the job are set but this process is no task of a step."""
    assert read_launch({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0"}) == Launch()


def test_a_step_of_one_task_is_alone() -> None:
    """Inside `srun --pty bash` a user may start processes with --nproc."""
    assert read_launch({**SRUN, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) == Launch()


def test_steps_and_jobs_have_ports_of_their_own() -> None:
    ports = {
        read_launch({**SRUN, "SLURM_JOB_ID": job, "SLURM_STEP_ID": step}).master_port
        for job in ("7", "8", "9")
        for step in ("0", "1", "2", "extern", "4294967291")
    }
    assert len(ports) == 15
    assert all(20_000 <= port < 40_000 for port in ports)


def test_the_shell_of_salloc_is_alone() -> None:
    """With use_interactive_step the shell is a step of one task, in a job of several."""
    shell = {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290", "SLURM_NTASKS": "7"}
    assert read_launch({**shell, "SLURM_STEP_NUM_TASKS": "1"}) == Launch()
    assert read_launch({**SRUN, "SLURM_STEP_NUM_TASKS": "7"}).num_ranks == 7


def test_master_variables_win_under_srun() -> None:
    launch = read_launch({**SRUN, "MASTER_ADDR": "head", "MASTER_PORT": "1234"})
    assert (launch.master_addr, launch.master_port) == ("head", 1234)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("a", "a"), ("a,b", "a"), ("n[01-03]", "n01"), ("n[7,9]", "n7"), ("rack1-n[2]", "rack1-n2")],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({**TORCHRUN, "RANK": "one"}, "RANK = 'one' is not a number"),
        ({**SRUN, "SLURM_STEP_NODELIST": ""}, "names no host"),
        (
            {name: value for name, value in SRUN.items() if name != "SLURM_LOCALID"},
            "SLURM_LOCALID is not set, though SLURM_PROCID and SLURM_STEP_ID are: start with srun",
        ),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "x"}, "cannot be read"),
    ],
)
def test_half_set_environments_are_refused(environment: dict[str, str], text: str) -> None:
    with pytest.raises(LaunchError, match=text):
        read_launch(environment)
