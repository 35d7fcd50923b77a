"""Trees over a transport give the bits of the fixed order, whatever arrives first."""

from __future__ import annotations

import pytest
import torch

from ganglion.decide.topology import Mesh
from ganglion.errors import CommError, PeerLost, ProtocolError
from ganglion.execute.averaging.methods.tree import TreeGroup
from ganglion.execute.comm import MAX, Faults, World, run_threads
from ganglion.execute.comm.reduce_order import combine_by_tree
from tests.support.averages import assert_same_bits, train_threads


def tree_of(world: World, timeout_s: float = 10.0) -> TreeGroup:
    ranks = world.group("data").ranks
    return TreeGroup(lambda: world.open_transport("data"), ranks, timeout_s)


def values_of(rank: int, numel: int = 33) -> torch.Tensor:
    draw = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=draw) * 10.0 ** (3 * rank)


def expected(num_ranks: int, root: int, op: str = "sum") -> torch.Tensor:
    total = torch.empty(33)
    combine_by_tree([values_of(rank) for rank in range(num_ranks)], root, total, op)
    return total


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("faults", [None, Faults(delay_s=0.004, seed=3)])
def test_every_collective(num_ranks: int, faults: Faults | None) -> None:
    root = num_ranks - 1

    def body(world: World) -> dict[str, torch.Tensor]:
        tree = tree_of(world)
        mine = {name: values_of(world.rank) for name in ("sum", "max", "root", "sent")}
        gathered, part = torch.empty(33 * num_ranks), torch.empty(11)
        parts = values_of(world.rank, 11 * num_ranks)
        handles = [
            tree.all_reduce(mine["sum"]),
            tree.all_reduce(mine["max"], MAX),
            tree.reduce(mine["root"], root),
            tree.broadcast(mine["sent"], root),
            tree.all_gather(gathered, values_of(world.rank)),
            tree.reduce_scatter(part, parts),
        ]
        for handle in handles:
            handle.wait()
        tree.barrier()
        tree.close()
        return {**mine, "gathered": gathered, "part": part}

    results = run_threads(Mesh(data=num_ranks), body, faults=faults)
    for rank, result in enumerate(results):
        assert torch.equal(result["sum"], expected(num_ranks, 0))
        assert torch.equal(result["max"], expected(num_ranks, 0, "max"))
        assert torch.equal(
            result["root"], expected(num_ranks, root) if rank == root else values_of(rank)
        )
        assert torch.equal(result["sent"], values_of(root))
        assert torch.equal(result["gathered"], torch.cat([values_of(r) for r in range(num_ranks)]))
    total = torch.empty(11 * num_ranks)
    combine_by_tree([values_of(r, 11 * num_ranks) for r in range(num_ranks)], 0, total, "sum")
    assert torch.equal(torch.cat([result["part"] for result in results]), total)


def test_a_silent_member_is_named() -> None:
    def body(world: World) -> None:
        tree = tree_of(world, timeout_s=0.3)
        if world.rank == 0:
            with pytest.raises(PeerLost, match="tree_up 0 of rank 1"):
                tree.all_reduce(torch.zeros(4)).wait()

    run_threads(Mesh(data=2), body)


def test_members_with_other_sizes_are_told() -> None:
    def body(world: World) -> None:
        tree = tree_of(world, timeout_s=1.0)
        tree.all_reduce(torch.zeros(4 + world.rank)).wait()

    with pytest.raises((ProtocolError, CommError), match=r"rank 1 sent .*\(5,\).*\(4,\) was due"):
        run_threads(Mesh(data=2), body)


@pytest.mark.parametrize("wishes", [
    {"beta": 0.9}, {"beta": 0.9, "center": "root"}, {"beta": 0.9, "compress": "int8"},
])  # fmt: skip
def test_deterministic_averaging_repeats_and_overlaps_bit_by_bit(wishes: dict[str, object]) -> None:
    runs = [
        train_threads(3, 6, tau=2, deterministic=True, dtype=torch.float32, overlap=o, **wishes)
        for o in (True, True, False)
    ]
    for first, second, waiting in zip(*runs, strict=True):
        for other in (second, waiting):
            assert_same_bits(other.weights, first.weights)
            assert_same_bits(other.center, first.center)
