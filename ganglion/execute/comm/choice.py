"""Which way ranks talk: decided from where they sit, without measuring anything at start-up.

| ranks of a group | auto                                  | torch                | shm     |
|------------------|---------------------------------------|----------------------|---------|
| with GPUs        | torch.distributed (NCCL)              | the same             | refused |
| on one host      | shared memory                         | torch.distributed    | as auto |
| on several hosts | shared memory inside, torch between   | torch.distributed    | refused |
"""

from __future__ import annotations

from ganglion.errors import ConfigError
from ganglion.execute.comm.hosts import HostMap

AUTO, SHM, TORCH, MPI = "auto", "shm", "torch", "mpi"
TRANSPORTS = (AUTO, SHM, TORCH, MPI)


def choose_way(wanted: str, hosts: HostMap, *, has_gpu: bool) -> str:
    """Return `shm` where ranks of one host shall share memory, else `torch`."""
    if wanted not in TRANSPORTS:
        raise ConfigError(f"parallel.transport = {wanted!r} is not one of {list(TRANSPORTS)}")
    if wanted == SHM and has_gpu:
        raise ConfigError(
            'parallel.transport = "shm" carries host tensors only, but this machine trains on '
            'GPUs: set parallel.transport = "auto"'
        )
    if wanted == SHM and hosts.num_hosts > 1:
        raise ConfigError(
            f'parallel.transport = "shm", but the ranks sit on {hosts.num_hosts} hosts, which '
            f'share no memory: set parallel.transport = "auto"'
        )
    reachable = all(hosts.names)  # a host without a name offers no shared memory
    near = reachable and not has_gpu and hosts.num_hosts < len(hosts.names)
    return SHM if wanted == SHM or (wanted == AUTO and near) else TORCH
