"""Matmul tuning: any way can win, all ranks take the same, and a cached winner is not timed."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ganglion import Plan
from ganglion.decide.topology import Mesh
from ganglion.errors import ConfigError
from ganglion.execute.comm import SoloGroup, World, run_threads
from ganglion.execute.tensor import TensorSettings
from ganglion.execute.tensor.products import ConvProduct, FlippedProduct, LinearProduct
from ganglion.execute.tensor.tuning import (
    MIN_GAIN,
    NN,
    NT,
    OUTPUT,
    TN,
    VARIANTS,
    TunedProduct,
    Tuner,
    multiply_as,
    natural_variant,
    tuned,
)
from tests.support.serial import assert_same_by_name
from tests.support.training import Case, train_split

SOLO = SoloGroup(0)


class FakeTimer:
    """Says what it was told, one number for each way, and counts."""

    def __init__(self, **seconds: float) -> None:
        self.seconds = seconds
        self.num_calls = 0

    def __call__(self, run: Callable[[], Tensor], device: torch.device) -> float:
        assert bool(torch.isfinite(run()).all())
        self.num_calls += 1
        return self.seconds[VARIANTS[(self.num_calls - 1) % len(VARIANTS)]]


def never(run: Callable[[], Tensor], device: torch.device) -> float:
    raise AssertionError("nothing should be timed")


def favouring(variant: str) -> FakeTimer:
    return FakeTimer(**{each: 1.0 if each == variant else 2.0 for each in VARIANTS})


def matrices(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(5, 5, dtype=dtype, generator=generator) for _ in range(2))  # type: ignore[return-value]


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_way_can_win(variant: str, tmp_path: Path) -> None:
    a, b = matrices()
    timer = favouring(variant)
    tuner = Tuner(tmp_path, SOLO, timer)
    torch.testing.assert_close(tuner.multiply(OUTPUT, a, b), a @ b)
    assert json.loads(only_file(tmp_path).read_text())["winner"] == variant
    tuner.multiply(OUTPUT, a + 1, b)
    assert timer.num_calls == 3, "one timing of each way, and no second one"


@pytest.mark.parametrize("variant", VARIANTS)
def test_operands_are_stored_as_the_way_says(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, bool]] = []
    plain = torch.mm

    def watched(a: Tensor, b: Tensor) -> Tensor:
        seen.append((a.T.is_contiguous(), b.T.is_contiguous()))
        return plain(a, b)

    monkeypatch.setattr(torch, "mm", watched)
    a, b = matrices()
    for left in (a, a.T.contiguous().T):
        for right in (b, b.T.contiguous().T):
            torch.testing.assert_close(multiply_as(variant, left, right), plain(a, b))
    assert set(seen) == {(variant == TN, variant == NT)}


def test_a_small_gain_is_noise(tmp_path: Path) -> None:
    a, b = matrices()
    timer = FakeTimer(NN=1.0, NT=1.0 - MIN_GAIN / 2, TN=2.0)
    Tuner(tmp_path, SOLO, timer).multiply(OUTPUT, a, b)
    assert json.loads(only_file(tmp_path).read_text())["winner"] == NN


def test_the_natural_way_copies_nothing() -> None:
    a, b = matrices()
    assert natural_variant(a, b) == NN
    assert natural_variant(a, b.T) == NT
    assert natural_variant(a.T, b) == TN
    assert natural_variant(a.T, b.T) == NN


def test_a_cached_winner_is_not_timed_again(tmp_path: Path) -> None:
    a, b = matrices()
    Tuner(tmp_path, SOLO, favouring(TN)).multiply(OUTPUT, a, b)
    path = only_file(tmp_path)
    before = path.read_text()
    torch.testing.assert_close(Tuner(tmp_path, SOLO, never).multiply(OUTPUT, a, b), a @ b)
    assert only_file(tmp_path).read_text() == before


@pytest.mark.parametrize(
    "change",
    [
        lambda a, b: ("input_gradient", a, b),
        lambda a, b: (OUTPUT, a.float(), b.float()),
        lambda a, b: (OUTPUT, a[:4], b),
        lambda a, b: (OUTPUT, a, b[:, :4]),
        lambda a, b: (OUTPUT, a[:, :4], b[:4]),
    ],
    ids=["role", "dtype", "m", "n", "k"],
)
def test_another_product_is_timed_itself(
    change: Callable[[Tensor, Tensor], tuple[str, Tensor, Tensor]], tmp_path: Path
) -> None:
    a, b = matrices()
    Tuner(tmp_path, SOLO, favouring(TN)).multiply(OUTPUT, a, b)
    with pytest.raises(AssertionError, match="nothing should be timed"):
        Tuner(tmp_path, SOLO, never).multiply(*change(a, b))


def test_another_torch_is_timed_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = matrices()
    Tuner(tmp_path, SOLO, favouring(TN)).multiply(OUTPUT, a, b)
    monkeypatch.setattr(torch, "__version__", "1.0")
    with pytest.raises(AssertionError, match="nothing should be timed"):
        Tuner(tmp_path, SOLO, never).multiply(OUTPUT, a, b)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: "{}",
        lambda text: text.replace('"TN",', '"TT",'),
        lambda text: text.replace('"m": 5', '"m": 6'),
    ],
    ids=["cut", "empty", "list", "no fields", "unknown way", "other product"],
)
def test_a_damaged_file_is_timed_anew_with_a_warning(
    damage: Callable[[str], str], tmp_path: Path
) -> None:
    a, b = matrices()
    Tuner(tmp_path, SOLO, favouring(TN)).multiply(OUTPUT, a, b)
    path = only_file(tmp_path)
    path.write_text(damage(path.read_text()))
    timer = favouring(NT)
    with pytest.warns(UserWarning, match="holds no winner of matmul tuning"):
        found = Tuner(tmp_path, SOLO, timer).multiply(OUTPUT, a, b)
    torch.testing.assert_close(found, a @ b)
    assert timer.num_calls == 3
    assert json.loads(only_file(tmp_path).read_text())["winner"] == NT


def test_the_first_rank_decides_for_all(tmp_path: Path) -> None:
    """Ranks have timers that disagree, and folders of their own: only the first one's count."""

    def body(world: World) -> tuple[int, list[str]]:
        timer = favouring((NT, TN, NN)[world.rank])
        folder = tmp_path / str(world.rank)
        tuner = Tuner(folder, world.everyone(), timer)
        tuner.multiply(OUTPUT, *matrices())
        tuner.multiply("input_gradient", *matrices())
        return timer.num_calls, [*tuner._known.values()]

    found = run_threads(Mesh(x=3), body)
    assert found == [(6, [NT, NT]), (0, [NT, NT]), (0, [NT, NT])]
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("product", [LinearProduct(), FlippedProduct()], ids=["linear", "flipped"])
def test_a_tuned_product_is_the_product(
    product: LinearProduct | FlippedProduct, variant: str, tmp_path: Path
) -> None:
    made = tuned(product, Tuner(tmp_path, SOLO, favouring(variant)))
    assert isinstance(made, TunedProduct)
    random = partial(torch.randn, dtype=torch.float64)
    x, gradient = random(2, 3, 6), random(2, 3, 4)
    weight = random(4, 6) if isinstance(product, LinearProduct) else random(6, 4)
    torch.testing.assert_close(made.output(x, weight), product.output(x, weight))
    torch.testing.assert_close(
        made.input_gradient(gradient, weight, x), product.input_gradient(gradient, weight, x)
    )
    torch.testing.assert_close(
        made.weight_gradient(gradient, x, weight.shape),
        product.weight_gradient(gradient, x, weight.shape),
    )
    assert len([*tmp_path.iterdir()]) == 3


def test_convolutions_and_runs_without_a_tuner_stay_as_they_are(tmp_path: Path) -> None:
    convolution, linear = ConvProduct((1, 1), (0, 0), (1, 1)), LinearProduct()
    assert tuned(convolution, Tuner(tmp_path, SOLO, never)) is convolution
    assert tuned(linear, None) is linear


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="name a folder that can be written"):
        Tuner(tmp_path / "file" / "folder", SOLO)


@pytest.mark.parametrize("plan", [Plan(x=2, z=2), Plan(y=2, data=2)], ids=["x2-z2", "y2-data2"])
def test_a_tuned_run_trains_like_an_untuned_one(plan: Plan, tmp_path: Path) -> None:
    """The winners are those of a real clock: any of them must do."""
    plan = dataclasses.replace(plan, num_microbatches=8 // plan.num_shares)
    case = Case(model="wide_gpt")
    tuned_case = dataclasses.replace(case, tensor=TensorSettings(tune=str(tmp_path)))
    mine, others = (
        run_threads(plan.mesh(), lambda world, case=case: train_split(world, plan, case))  # type: ignore[misc]
        for case in (tuned_case, case)
    )
    for one, other in zip(mine, others, strict=True):
        assert one.history.losses == pytest.approx(other.history.losses, rel=1e-12)
        assert_same_by_name(one.history.weights, other.history.weights)
    # Some shapes are alike: at least the three roles of qkv, of out and of the head differ.
    assert len([*tmp_path.iterdir()]) >= 9


def test_the_real_timer_times(tmp_path: Path) -> None:
    a, b = matrices()
    Tuner(tmp_path, SOLO).multiply(OUTPUT, a, b)
    record = json.loads(only_file(tmp_path).read_text())
    assert set(record["seconds"]) == set(VARIANTS)
    assert all(0 < s < math.inf for s in record["seconds"].values())
