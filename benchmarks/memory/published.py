"""What papers measured, and what the state rules of the memory model say of the same systems.

Their activations are those of fp16 layers whose attention is not fused: 34 s h + 5 a s^2 bytes
(2205.05198, equation 2), kept for one segment or layer, with the inputs of the others. The same
numbers are held by `tests/pure/costs/test_memory.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ganglion.decide.costs import MIXED, TWO_MASTERS, StateRules, moved_to_tier, state_memory
from ganglion.decide.shapes import GPTShape, Parameter, parameters_of
from ganglion.decide.topology import Mesh

GB = 1e9
ONE = Mesh()


@dataclass(frozen=True)
class Published:
    """A number of a paper and ours."""

    name: str
    unit: str
    theirs: float
    ours: float

    @property
    def error(self) -> float:
        return abs(self.ours / self.theirs - 1)


def published() -> list[Published]:
    """Return all that is compared."""
    resident, lowered = _axonn_gb(bucket_size=0), _axonn_gb(bucket_size=16_000_000)
    depths = {1: 0.58, 2: 1.1, 4: 2.0, 8: 4.1}
    return [
        Published("axonn_12b_resident", "GB", 520.0, resident),
        Published("axonn_12b_offloaded", "GB", 130.24, lowered),
        Published("2bw_minus_flush_2.2b", "GB", 1.55, _versions_gb()),
        *(Published(f"largest_gpt_{d}_stages", "B", b, _largest(d)) for d, b in depths.items()),
    ]


def _gpt(num_layers: int, hidden: int, heads: int, *, tied: bool) -> list[tuple[Parameter, ...]]:
    return parameters_of(
        GPTShape(
            vocab_size=50304,
            seq_len=512,
            num_layers=num_layers,
            hidden=hidden,
            num_heads=heads,
            num_kv_heads=heads,
            head_size=hidden // heads,
            mlp_hidden=4 * hidden,
            positions="learned" if tied else "rotary",
            tied_embedding=tied,
            bias=True,
        )
    )


def _state_bytes(blocks: list[tuple[Parameter, ...]], rules: StateRules) -> int:
    return state_memory([p for block in blocks for p in block], ONE, rules).total


def _layer_bytes(hidden: int, heads: int) -> int:
    return 512 * hidden * 34 + 5 * heads * 512**2


def _axonn_gb(bucket_size: int) -> float:
    """12 B parameters on 24 stages and 2 replicas; checkpoints of two layers (spec A.6)."""
    hidden, heads, num_stages, rules = 4512, 24, 24, StateRules(formats=MIXED)
    blocks, edge = _gpt(48, hidden, heads, tied=False), 512 * hidden * 2
    cuts = [0, *(1 + 4 * stage for stage in range(1, num_stages)), len(blocks)]
    total = 0
    for stage in range(num_stages):
        is_first, is_last = stage == 0, stage == num_stages - 1
        alive = 1 if is_last else num_stages
        kept = alive * edge * (2 - is_first - is_last) + 2 * _layer_bytes(hidden, heads)
        mine = [p for block in blocks[cuts[stage] : cuts[stage + 1]] for p in block]
        held = state_memory(mine, ONE, rules)
        if bucket_size:
            held = moved_to_tier(held, mine, ONE, rules, 16 * bucket_size)
        total += held.total + kept
    return 2 * total / GB


def _versions_gb() -> float:
    """What a second version adds on the first of 8 stages of a GPT of 2.2 B (spec G8)."""
    first = _gpt(32, 2304, 32, tied=True)[:9]
    flush = StateRules(formats=TWO_MASTERS)
    two_bw = StateRules(formats=TWO_MASTERS, num_versions=2, num_sets=1)
    return (_state_bytes(first, two_bw) - _state_bytes(first, flush)) / GB


def _largest(depth: int) -> float:
    """The largest GPT of width 1024 under 2BW in 14.2 GB, recomputed by layer (spec G9)."""
    rules = StateRules(formats=TWO_MASTERS, num_versions=2, num_sets=1)
    edge = 512 * 1024 * 2

    def fits(num_layers: int) -> bool:
        mine = _gpt(num_layers, 1024, 16, tied=True)[: 1 + 2 * num_layers // depth]
        kept = depth * edge * (num_layers // depth) + _layer_bytes(1024, 16)
        return _state_bytes(mine, rules) + kept <= 14.2 * GB

    low, high = 1, 512
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * depth) else (low, middle)
    whole = _gpt(low * depth, 1024, 16, tied=True)
    return sum(p.num_stored(ONE) for block in whole for p in block if not p.is_tied) / GB
