"""Initial values: drawn by anybody in any pieces they are the same, and they are random enough."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ganglion.decide.topology import Box, Coordinates, Mesh, Placement, Shard
from ganglion.errors import ConfigError
from ganglion.execute.models import (
    BlockModel,
    Constant,
    Initial,
    InitialWeights,
    Normal,
    Uniform,
    build_model,
    named_blocks,
    named_parameters,
    outline_model,
)
from ganglion.execute.models import initial as initial_module
from ganglion.execute.models.initial import _key, fill
from ganglion.execute.models.small_nets import torch_defaults
from tests.support.training import SHAPES

NAME = "layers.3.mlp.up.weight"
MASK = (1 << 64) - 1


def draw(
    initial: Initial,
    *shape: int,
    seed: int = 0,
    name: str = NAME,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Return a whole tensor."""
    whole = torch.full(shape, math.nan, dtype=dtype)
    fill(whole, initial, seed=seed, name=name, shape=shape, boxes=[Box.whole(shape)])
    return whole


# --- the definition, written out -----------------------------------------------------------------


def philox(counter: int, key: int) -> list[int]:
    """Philox4x64-10 of Salmon et al. (SC 2011), figure 4 and table 2, in whole numbers."""
    x = [(counter >> (64 * i)) & MASK for i in range(4)]
    k = [key & MASK, key >> 64]
    for _ in range(10):
        a, b = x[0] * 0xD2E7470EE14C6C93, x[2] * 0xCA5A826395121157
        x = [(b >> 64) ^ x[1] ^ k[0], b & MASK, (a >> 64) ^ x[3] ^ k[1], a & MASK]
        k = [(k[0] + 0x9E3779B97F4A7C15) & MASK, (k[1] + 0xBB67AE8584CAA73B) & MASK]
    return x


def element(initial: Initial, index: int, seed: int, name: str) -> float:
    """Return one element, by the definition."""
    word = philox(index // 4 + 1, _key(seed, name))[index % 4]  # numpy counts before it draws
    if isinstance(initial, Uniform):
        return initial.bound * ((word >> 11) / 2**52 - 1)
    assert isinstance(initial, Normal)
    radius = math.sqrt(-2 * math.log(((word >> 32) + 1) / 2**32))
    return initial.std * radius * math.cos(2 * math.pi * (word & 0xFFFFFFFF) / 2**32)


@pytest.mark.parametrize("initial", [Normal(0.3), Uniform(2.0)])
@pytest.mark.parametrize("first", [0, 5, 2**33 + 3])
def test_every_element_is_a_function_of_its_place(initial: Initial, first: int) -> None:
    found = torch.empty(11, dtype=torch.float64)
    box = Box((first,), (0,), (11,))
    fill(found, initial, seed=8, name=NAME, shape=(2**40,), boxes=[box])
    wanted = [element(initial, first + i, 8, NAME) for i in range(11)]
    torch.testing.assert_close(found, torch.tensor(wanted).double(), rtol=1e-6, atol=1e-9)
    assert found.tolist() == pytest.approx(wanted, rel=1e-12, abs=1e-15)


# --- any partition is the same whole -------------------------------------------------------------


def cuts_of(size: int, generator: random.Random) -> list[tuple[int, int]]:
    """Return a random partition of range(size) as (start, length)."""
    inner = generator.sample(range(1, size), k=generator.randint(0, size - 1)) if size else []
    edges = [0, *sorted(inner), size]
    return [(low, high - low) for low, high in itertools.pairwise(edges)]


def partition(shape: Sequence[int], generator: random.Random) -> list[Box]:
    dims = [cuts_of(size, generator) for size in shape]
    boxes = []
    for spot in itertools.product(*dims):
        start, size = tuple(s for s, _ in spot), tuple(n for _, n in spot)
        boxes.append(Box(start, (0,) * len(shape), size))
    return boxes


@pytest.mark.parametrize("shape", [(), (0,), (1,), (13,), (6, 7), (4, 3, 5), (3, 4, 2, 5)], ids=str)
@pytest.mark.parametrize("initial", [Normal(0.02), Uniform(0.5), Constant(3.0)])
def test_any_partition_gives_the_same_whole(shape: tuple[int, ...], initial: Initial) -> None:
    wanted = draw(initial, *shape)
    assert not wanted.isnan().any()
    for trial in range(12):
        generator = random.Random(trial)
        boxes = partition(shape, generator)
        generator.shuffle(boxes)  # nor does it matter who draws first
        found = torch.full(shape, math.nan, dtype=torch.float64)
        for box in boxes:
            piece = torch.empty(box.size, dtype=torch.float64)
            fill(piece, initial, seed=0, name=NAME, shape=shape, boxes=[box])
            at = tuple(slice(b, b + n) for b, n in zip(box.start, box.size, strict=True))
            found[at] = piece
        assert torch.equal(found, wanted)


def test_runs_longer_than_what_is_drawn_at_a_time() -> None:
    width = initial_module._MAX_DRAWN * 2 + 5
    wanted = draw(Normal(1.0), 3, width)
    assert len(wanted.unique()) > 0.999 * wanted.numel()
    for first, size in ((0, width // 2), (width // 2, width - width // 2)):
        piece = torch.empty(3, size, dtype=torch.float64)
        boxes = [Box((0, first), (0, 0), (3, size))]
        fill(piece, Normal(1.0), seed=0, name=NAME, shape=(3, width), boxes=boxes)
        assert torch.equal(piece, wanted[:, first : first + size])


@pytest.mark.parametrize("sections", [1, 3])
def test_pieces_of_all_ranks_of_a_mesh(sections: int) -> None:
    shape, mesh = (24, 8), Mesh(x=2, y=2, z=2)
    placement = Placement(shape=shape, shards=(Shard(0, "x", sections), Shard(1, "y")))
    placement = dataclasses.replace(placement, shards=(*placement.shards, Shard(0, "z")))
    wanted = draw(Normal(1.0), *shape)
    found = torch.zeros_like(wanted)
    for rank in range(mesh.num_ranks):
        at: Coordinates = mesh.coordinates(rank)
        piece = torch.empty(placement.local_shape(mesh), dtype=torch.float64)
        boxes = placement.boxes(mesh, at)
        fill(piece, Normal(1.0), seed=0, name=NAME, shape=shape, boxes=boxes)
        for start, local, size in boxes:
            there, here = (
                tuple(slice(b, b + n) for b, n in zip(begin, size, strict=True))
                for begin in (start, local)
            )
            found[there] = piece[here]
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_narrow_dtype_holds_the_same_values_rounded(dtype: torch.dtype) -> None:
    for initial in (Normal(0.02), Uniform(0.1)):
        assert torch.equal(draw(initial, 50, 20, dtype=dtype), draw(initial, 50, 20).to(dtype))


def test_a_piece_whose_runs_are_no_views_is_refused() -> None:
    with pytest.raises(RuntimeError, match="view"):
        fill(
            torch.empty(4, 6).T,
            Normal(1.0),
            seed=0,
            name=NAME,
            shape=(6, 4),
            boxes=[Box.whole((6, 4))],
        )


def test_a_parameter_is_filled_without_a_history() -> None:
    parameter = nn.Parameter(torch.zeros(3, 4))
    fill(parameter, Normal(1.0), seed=0, name=NAME, shape=(3, 4), boxes=[Box.whole((3, 4))])
    assert parameter.is_leaf and parameter.requires_grad and parameter.abs().amin() > 0


# --- memory --------------------------------------------------------------------------------------


def peak_of_filling(piece: Tensor, shape: tuple[int, ...], box: Box) -> int:
    fill(piece, Normal(1.0), seed=0, name=NAME, shape=shape, boxes=[box])  # imports what it needs
    tracemalloc.start()
    try:
        fill(piece, Normal(1.0), seed=0, name=NAME, shape=shape, boxes=[box])
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_small_piece_of_a_huge_whole_costs_little() -> None:
    """numpy tells tracemalloc what it allocates; the whole would be 32 TB."""
    box = Box((2**20, 2**10), (0, 0), (64, 64))
    assert peak_of_filling(torch.empty(64, 64), (2**21, 2**21), box) < 1_000_000


def test_a_large_piece_is_filled_with_little_memory_besides() -> None:
    piece = torch.empty(2**21)
    assert peak_of_filling(piece, (2**21,), Box.whole((2**21,))) < 4_000_000


# --- random enough -------------------------------------------------------------------------------

MANY = 400_000
SIGMA = 1 / math.sqrt(MANY)


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1])


def test_normal_numbers_are_normal() -> None:
    numbers = draw(Normal(0.02), MANY) / 0.02
    assert abs(float(numbers.mean())) < 5 * SIGMA
    assert abs(float(numbers.var()) - 1) < 5 * math.sqrt(2) * SIGMA
    assert abs(float((numbers**3).mean())) < 5 * math.sqrt(15) * SIGMA
    assert abs(float((numbers**4).mean()) - 3) < 5 * math.sqrt(96) * SIGMA
    for bound in (0.1, 0.5, 1.0, 2.0, 3.0):
        inside = math.erf(bound / math.sqrt(2))
        share = float((numbers.abs() < bound).double().mean())
        assert abs(share - inside) < 5 * SIGMA * math.sqrt(inside * (1 - inside))
    assert numbers.abs().amax() < math.sqrt(2 * 32 * math.log(2))


def test_uniform_numbers_fill_their_range_evenly() -> None:
    numbers = draw(Uniform(0.25), MANY)
    counts, _ = np.histogram(numbers.numpy(), bins=50, range=(-0.25, 0.25))
    assert counts.sum() == MANY, "none is outside"
    square = float(((counts - MANY / 50) ** 2 / (MANY / 50)).sum())
    assert square < 100  # chi-square of 49 degrees: mean 49, once in 10^5 beyond 105


@pytest.mark.parametrize("initial", [Normal(1.0), Uniform(1.0)])
def test_neighbours_do_not_know_each_other(initial: Initial) -> None:
    numbers = draw(initial, MANY)
    for distance in (1, 2, 3, 4, 5, 8, 64, 1000):
        assert abs(correlation(numbers[distance:], numbers[:-distance])) < 5 * SIGMA
        size = (numbers.abs() - numbers.abs().mean())[:]
        assert abs(correlation(size[distance:], size[:-distance])) < 5 * SIGMA


@pytest.mark.parametrize(
    "other",
    [{"name": "layers.4.mlp.up.weight"}, {"name": NAME + "x"}, {"seed": 1}, {"seed": 2**62}],
    ids=str,
)
def test_names_and_seeds_do_not_know_each_other(other: dict[str, object]) -> None:
    mine = draw(Normal(1.0), MANY)
    theirs = draw(Normal(1.0), MANY, **other)  # type: ignore[arg-type]
    assert abs(correlation(mine, theirs)) < 5 * SIGMA
    for distance in (1, 4):  # nor is one the other, moved a little
        assert abs(correlation(mine[distance:], theirs[:-distance])) < 5 * SIGMA
        assert abs(correlation(mine[:-distance], theirs[distance:])) < 5 * SIGMA


# --- models --------------------------------------------------------------------------------------

MODELS = ["gpt", "tied", "mlp", "conv"]


def built(model: str, seed: int) -> BlockModel:
    torch.manual_seed(seed)
    return build_model(SHAPES[model])


def tensors_of(model: BlockModel) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in named_parameters(named_blocks(model)).items()}


@pytest.mark.parametrize("model", MODELS)
def test_every_parameter_has_one_initial_value(model: str) -> None:
    made = built(model, 0)
    assert list(made.initial_values()) == list(tensors_of(made))


@pytest.mark.parametrize("model", MODELS)
def test_a_model_without_memory_tells_the_weights_of_the_same_model_with_memory(model: str) -> None:
    whole = tensors_of(built(model, 3))
    torch.manual_seed(3)
    outline, initial = outline_model(SHAPES[model])
    assert all(tensor.is_meta for tensor in outline.state_dict().values())
    assert initial.values.keys() == whole.keys()
    for name, wanted in whole.items():
        found = torch.empty_like(wanted)
        shape = tuple(wanted.shape)
        initial.fill(found, name, shape, [Box.whole(shape)])
        assert torch.equal(found, wanted), name


@pytest.mark.parametrize("model", MODELS)
def test_two_models_built_one_after_the_other_differ(model: str) -> None:
    first, second = built(model, 1), build_model(SHAPES[model])
    again = built(model, 1)
    weights = [tensors_of(made) for made in (first, second, again)]
    assert any(not torch.equal(t, weights[1][name]) for name, t in weights[0].items())
    assert all(torch.equal(t, weights[2][name]) for name, t in weights[0].items())


def test_wide_and_narrow_models_of_a_seed_are_the_same() -> None:
    narrow = tensors_of(built("gpt", 5))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        wide = tensors_of(built("gpt", 5))
    finally:
        torch.set_default_dtype(before)
    for name, tensor in narrow.items():
        assert wide[name].dtype == torch.float64
        assert torch.equal(wide[name].float(), tensor), name


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_torch_defaults_are_those_of_torch(kind: str) -> None:
    """Both fill the same range evenly: what they begin with is the same up to the draw."""
    torch.manual_seed(0)
    layer = nn.Linear(300, 200) if kind == "linear" else nn.Conv2d(12, 200, 5)
    values = torch_defaults({"block": layer})
    for name, parameter in layer.named_parameters():
        initial = values[f"block.{name}"]
        assert isinstance(initial, Uniform)
        drawn = parameter.detach().double() / initial.bound
        assert 0.95 < drawn.abs().amax() <= 1 + 1e-6  # torch rounds the bound
        spread = float(drawn.square().mean().sqrt()) * math.sqrt(3)
        assert spread == pytest.approx(1, abs=0.2 if parameter.ndim == 1 else 0.02)


def test_torch_defaults_of_norms_and_tables_and_shared_weights() -> None:
    table, head = nn.Embedding(7, 4), nn.Linear(4, 7)
    head.weight = table.weight
    blocks: dict[str, nn.Module] = {
        "table": table,
        "norms": nn.Sequential(nn.LayerNorm(4), nn.BatchNorm1d(4), nn.ReLU()),
        "head": head,
    }
    ones, zeros = Constant(1.0), Constant(0.0)
    assert torch_defaults(blocks) == {
        "table.weight": Normal(1.0),
        "norms.0.weight": ones,
        "norms.0.bias": zeros,
        "norms.1.weight": ones,
        "norms.1.bias": zeros,
        "head.bias": Uniform(0.5),
        "norms.1.running_mean": zeros,
        "norms.1.running_var": ones,
        "norms.1.num_batches_tracked": zeros,
    }


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="a is a GRUCell, whose initial values are not known: "):
        torch_defaults({"a": nn.GRUCell(2, 2)})
    with pytest.raises(ConfigError, match="no initial value is known for 'b', one of the model's"):
        InitialWeights({"a": Normal(1.0)}, 0).fill(torch.empty(2), "b", (2,), [Box.whole((2,))])

    class Silent(BlockModel):
        def blocks(self) -> dict[str, nn.Module]:
            return {}

    with pytest.raises(ConfigError, match="a Silent does not tell its initial values"):
        Silent().initial_values()
