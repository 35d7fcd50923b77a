"""The sampler: one-to-one, complete in every epoch, and the same for every layout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ganglion import errors
from ganglion.decide.topology import Mesh
from ganglion.errors import DataError, LayoutError
from ganglion.execute.data.sampler import (
    Sampler,
    mix_seed,
    permute,
    permute_array,
    share_index,
    split_indices,
)

SEEDS = st.integers(min_value=0, max_value=2**64 - 1)


def permutation(size: int, seed: int) -> list[int]:
    return [int(image) for image in permute_array(np.arange(size), size, seed)]


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_permutation_is_one_to_one_for_every_small_size(seed: int) -> None:
    for size in range(1, 300):
        assert sorted(permutation(size, seed)) == list(range(size)), size


@given(size=st.integers(min_value=1, max_value=5000), seed=SEEDS)
def test_permutation_is_one_to_one(size: int, seed: int) -> None:
    assert sorted(permutation(size, seed)) == list(range(size))


@given(size=st.integers(min_value=1, max_value=2**62), seed=SEEDS, data=st.data())
def test_permutation_of_huge_sizes_stays_in_range_and_apart(
    size: int, seed: int, data: st.DataObject
) -> None:
    indices = data.draw(st.lists(st.integers(0, size - 1), unique=True, max_size=20))
    images = permute_array(np.array(indices, dtype=np.int64), size, seed).tolist()
    assert all(0 <= image < size for image in images)
    assert len(set(images)) == len(indices)


@given(size=st.integers(min_value=1, max_value=1000), seed=SEEDS, data=st.data())
def test_single_and_vectorised_forms_agree(size: int, seed: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, size - 1))
    assert permute(index, size, seed) == permutation(size, seed)[index]


def test_permutations_of_different_seeds_differ() -> None:
    assert len({tuple(permutation(100, seed)) for seed in range(200)}) == 200


def test_every_order_of_four_items_comes_up() -> None:
    assert len({tuple(permutation(4, seed)) for seed in range(1000)}) == 24


def test_each_item_reaches_each_place_about_equally_often() -> None:
    counts = np.zeros((10, 10))
    for seed in range(2000):
        counts[np.arange(10), permutation(10, seed)] += 1
    # Mean 200, standard deviation 13.4: five of them away is a fault, not chance.
    assert counts.min() > 133 and counts.max() < 267


def test_permutation_does_not_change_between_versions() -> None:
    # A changed permutation would make resumed runs see other samples.
    assert permutation(8, 0) == [7, 5, 1, 2, 6, 3, 4, 0]
    sampler = Sampler(num_samples=5, global_batch_size=7, seed=3)
    assert sampler.share(2, 0, 1).tolist() == [3, 3, 2, 4, 1, 0, 0]


def test_mixed_seeds_depend_on_parts_and_order() -> None:
    seeds = [mix_seed(), mix_seed(0), mix_seed(0, 0), mix_seed(0, 1), mix_seed(1, 0), mix_seed(-1)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)


@given(
    num_samples=st.integers(1, 60),
    global_batch_size=st.integers(1, 100),
    seed=SEEDS,
    shuffle=st.booleans(),
)
def test_every_epoch_visits_each_sample_once(
    num_samples: int, global_batch_size: int, seed: int, shuffle: bool
) -> None:
    sampler = Sampler(
        num_samples=num_samples, global_batch_size=global_batch_size, seed=seed, shuffle=shuffle
    )
    num_steps = -(-3 * num_samples // global_batch_size)
    stream = np.concatenate([sampler.share(step, 0, 1) for step in range(num_steps)])
    for epoch in range(3):
        visited = stream[epoch * num_samples : (epoch + 1) * num_samples]
        assert sorted(visited.tolist()) == list(range(num_samples))


def test_epochs_have_different_orders() -> None:
    sampler = Sampler(num_samples=50, global_batch_size=50)
    assert sampler.share(0, 0, 1).tolist() != sampler.share(1, 0, 1).tolist()


def test_without_shuffle_samples_come_in_order_and_wrap_around() -> None:
    sampler = Sampler(num_samples=5, global_batch_size=4, shuffle=False)
    assert sampler.share(0, 0, 1).tolist() == [0, 1, 2, 3]
    assert sampler.share(1, 0, 1).tolist() == [4, 0, 1, 2]


def test_a_batch_larger_than_the_data_set_is_fine() -> None:
    indices = Sampler(num_samples=3, global_batch_size=9).share(0, 0, 1)
    assert indices.dtype == np.int64
    assert np.bincount(indices).tolist() == [3, 3, 3]


def test_every_factorization_sees_the_same_global_batches() -> None:
    sampler = Sampler(num_samples=37, global_batch_size=24, seed=9)
    for step in (0, 1, 5):
        whole = sampler.share(step, 0, 1).tolist()
        for num_shares in (1, 2, 3, 4, 6, 8, 12, 24):
            shares = [sampler.share(step, index, num_shares) for index in range(num_shares)]
            assert np.concatenate(shares).tolist() == whole


def test_share_index_numbers_data_and_z_and_ignores_the_other_axes() -> None:
    mesh = Mesh(data=3, pipe=2, x=2, z=2)
    seen: dict[int, int] = {}
    for rank in range(mesh.num_ranks):
        here = mesh.coordinates(rank)
        assert share_index(here, mesh) == here.data * 2 + here.z
        seen[share_index(here, mesh)] = seen.get(share_index(here, mesh), 0) + 1
    assert seen == dict.fromkeys(range(6), 4)


def test_batch_that_cannot_be_dealt_out_is_refused_with_numbers() -> None:
    sampler = Sampler(num_samples=100, global_batch_size=10)
    with pytest.raises(LayoutError, match=r"global_batch_size = 10 .* data \* z = 4 .*multiple"):
        sampler.share(0, 0, 4)
    with pytest.raises(LayoutError, match=r"share 2 is outside 0\.\.1"):
        sampler.share(0, 2, 2)


def test_empty_data_sets_and_batches_are_refused() -> None:
    with pytest.raises(DataError, match=r"has 0 samples.*data\.source"):
        Sampler(num_samples=0, global_batch_size=1)
    with pytest.raises(LayoutError, match=r"train\.global_batch_size is 0"):
        Sampler(num_samples=1, global_batch_size=0)
    with pytest.raises(DataError, match="has 0 samples"):
        split_indices(0, 0.1, 0)


@given(
    num_samples=st.integers(1, 500),
    fraction=st.floats(0, 1, exclude_max=True),
    seed=SEEDS,
)
def test_split_is_disjoint_complete_and_sorted(
    num_samples: int, fraction: float, seed: int
) -> None:
    train, held_out = split_indices(num_samples, fraction, seed)
    assert sorted([*train.tolist(), *held_out.tolist()]) == list(range(num_samples))
    assert train.tolist() == sorted(train) and held_out.tolist() == sorted(held_out)
    assert len(train) >= 1


@pytest.mark.parametrize(
    ("num_samples", "fraction", "num_held_out"),
    [(100, 0.0, 0), (100, 0.02, 2), (10, 0.001, 1), (2, 0.001, 1), (2, 0.99, 1), (1, 0.5, 0)],
)
def test_split_sizes(num_samples: int, fraction: float, num_held_out: int) -> None:
    assert len(split_indices(num_samples, fraction, 0)[1]) == num_held_out


def test_split_depends_on_the_seed_alone() -> None:
    first, again, other = (split_indices(1000, 0.1, seed)[1].tolist() for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert first != list(range(100))


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_split_fraction_outside_its_range_is_refused(fraction: float) -> None:
    with pytest.raises(DataError, match=r"data\.val_fraction"):
        split_indices(10, fraction, 0)


def test_the_package_does_not_import_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import ganglion.execute.data as d; d.Sampler"
    root = Path(errors.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)
