"""The host map: which ranks can share memory.

Two ranks are on one host if they run under the same kernel and in the same network namespace: a
container on the same machine may still be out of reach of a Unix socket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


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

    def together(self, ranks: Sequence[int]) -> bool:
        """Say whether all members sit on one host."""
        return len(self.parts(ranks)) == 1

    @property
    def num_hosts(self) -> int:
        """How many hosts there are."""
        return len(set(self.names))


def this_host() -> str:
    """Return a name for where this process runs."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        network = Path("/proc/self/ns/net").stat().st_ino
    except OSError:  # not Linux: no memfd and no abstract sockets either, so nobody is near
        return ""
    return f"{kernel}:{network}"
