"""The hosts of all ranks, and the transport that follows from them without any measurement.

| ranks of a group | auto                                  | torch                | shm     |
|------------------|---------------------------------------|----------------------|---------|
| with GPUs        | torch.distributed (NCCL)              | the same             | refused |
| on one host      | shared memory                         | torch.distributed    | as auto |
| on several hosts | shared memory inside, torch between   | torch.distributed    | refused |

Two ranks are on one host if they run under the same kernel and in the same network namespace: a
Unix socket may not reach another container on the same machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ganglion.errors import ConfigError

AUTO, SHM, TORCH, MPI = "auto", "shm", "torch", "mpi"
TRANSPORTS = (AUTO, SHM, TORCH, MPI)


@dataclass(frozen=True, slots=True)
class HostMap:
    """The host of every rank, by a name that no two hosts share."""

    names: tuple[str, ...]

    def parts(self, ranks: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the members of a group host by host, in order of their first ranks."""
        found: dict[str, list[int]] = {}
        for rank in ranks:
            found.setdefault(self.names[rank], []).append(rank)
        return [tuple(part) for part in found.values()]

    @property
    def num_hosts(self) -> int:
        """The number of hosts."""
        return len(set(self.names))


def this_host() -> str:
    """Return a name for the host of this process, or "" if it cannot share memory."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        network = Path("/proc/self/ns/net").stat().st_ino
    except OSError:  # not Linux: no memfd and no abstract sockets either
        return ""
    return f"{kernel}:{network}"


def choose_transport(wanted: str, hosts: HostMap, *, has_gpu: bool) -> str:
    """Return `shm` if ranks of one host share memory, else `torch`; raise ConfigError."""
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
    can_share = all(hosts.names) and not has_gpu and hosts.num_hosts < len(hosts.names)
    return SHM if wanted == SHM or (wanted == AUTO and can_share) else TORCH
