"""The parts of a profile at toy size, on ranks that are threads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ganglion.decide.costs import BUCKET, FLOP, fit_times
from ganglion.decide.shapes import GPTShape, MLPShape
from ganglion.decide.topology import Mesh
from ganglion.execute.comm import SoloGroup, World, run_threads
from ganglion.execute.measure import (
    ModelCase,
    Pairs,
    ProfileSizes,
    Watch,
    profile_sizes,
    time_messages,
    time_products,
    time_rings,
    time_tiers,
    undisturbed,
)
from ganglion.execute.train import time_models

SIZES = (1024, 4096, 65536)
CPU = torch.device("cpu")


def watch() -> Watch:
    return Watch(CPU, budget_s=0.001)


def alone() -> World:
    return World(0, Mesh(), lambda axes: SoloGroup(0))


def toy_sizes(*models: ModelCase) -> ProfileSizes:
    return ProfileSizes(
        products=((8, 8, 8), (16, 8, 32)),
        half_products=((8, 8, 8),),
        models=models,
        num_microbatches=2,
        num_steps=2,
        message_bytes=SIZES,
        ring_bytes=SIZES,
        tier_bytes=8192,
        budget_s=0.001,
    )


def test_waits_for_a_core_are_taken_off() -> None:
    taken = [(1.0, 0.0), (3.0, 2.0), (1.2, 0.0), (9.0, 1.0)]
    assert undisturbed(taken) == pytest.approx(1.1)
    assert undisturbed([(3.0, 2.0)]) == 1.0


def test_products_have_their_amounts() -> None:
    found = time_products(alone(), watch(), ((8, 16, 32),), precision="fp32", num_threads=1)
    (one,) = found
    assert one.seconds > 0 and one.flops == 2 * 8 * 16 * 32 / one.seconds
    timing = one.timing()
    assert timing.terms["flop"] == 2 * 8 * 16 * 32
    assert timing.terms["memory_byte"] == 4 * (8 * 16 + 16 * 32 + 8 * 32)


def test_the_number_of_threads_is_put_back() -> None:
    before = torch.get_num_threads()
    time_products(alone(), watch(), ((8, 8, 8),), precision="bf16", num_threads=before + 1)
    assert torch.get_num_threads() == before


def test_messages_and_collectives_of_every_size() -> None:
    def body(world: World) -> tuple[list[object], list[object]]:
        pairs = Pairs("intra", ((0, 1), (2, 3)))
        messages = time_messages(world, watch(), pairs, SIZES, 0.001)
        rings = time_rings(world, watch(), world.group("data"), "intra", SIZES, 0.001)
        return list(messages), list(rings)

    results = run_threads(Mesh(data=4), body)
    assert all(result == results[0] for result in results)  # all ranks know the same times
    messages, rings = results[0]
    assert [(one.kind, one.terms["byte"]) for one in messages] == [
        (kind, size) for size in SIZES for kind in ("message", "messages at once")
    ]
    assert rings  # small ones may be lost in the noise of the product before them
    for one in rings:
        steps = {"all-reduce": 6, BUCKET: 6, "all-gather": 3, "reduce-scatter": 3}[one.kind]
        assert one.terms["call"] == 1 and one.terms["step"] == steps
        assert one.terms["ring_byte"] in [steps / 4 * size for size in SIZES]
    fit_times([one for one in messages if one.kind == "message"], "messages")


def test_both_tiers_are_moved_to_and_from(tmp_path: Path) -> None:
    found = {one.name: one for one in time_tiers(alone(), watch(), tmp_path, 8192)}
    assert set(found) == {"host", "disk"}
    assert all(one.read_bytes_per_s > 0 and one.write_bytes_per_s > 0 for one in found.values())
    assert list(tmp_path.iterdir()) == []


def test_models_are_trained_and_their_parts_have_terms() -> None:
    shape = GPTShape(
        vocab_size=32, seq_len=8, num_layers=1, hidden=16, num_heads=2, num_kv_heads=2,
        head_size=8, mlp_hidden=32,
    )  # fmt: skip
    mlp = MLPShape(num_inputs=8, num_outputs=4, num_layers=2, hidden=16)
    sizes = toy_sizes(
        ModelCase(shape=shape, microbatch_size=2), ModelCase(shape=mlp, microbatch_size=4)
    )
    found = time_models(alone(), watch(), sizes)
    assert [one.kind for one in found] == ["forward", "backward", "update"] * 2
    assert all(one.seconds > 0 for one in found)
    forward, backward, update = found[:3]
    # Two blocks of a layer, embedding and head: their calls, and one of the engine.
    assert forward.terms["block"] == 4 and forward.terms["action"] == 1
    assert backward.terms[FLOP] == pytest.approx(2 * forward.terms[FLOP])
    assert set(update.terms) == {"update", "update_byte"}
    assert found[0].label == "gpt 1 x 16, vocab 32, 2 x 8 tokens"
    assert found[3].label == "mlp 2 x 16, 4 samples"


def test_devices_get_longer_sizes() -> None:
    host, device = (profile_sizes(quick=True, has_device=there) for there in (False, True))
    assert device.products[0] == tuple(8 * size for size in host.products[0])
    assert device.message_bytes[0] == 8 * host.message_bytes[0]
    first, larger = host.models[0].shape, device.models[0].shape
    assert isinstance(first, GPTShape) and isinstance(larger, GPTShape)
    assert larger.hidden == 8 * first.hidden and larger.num_layers == first.num_layers
    assert larger.head_size * larger.num_heads == larger.hidden
