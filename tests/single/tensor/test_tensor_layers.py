"""Split layers one by one: each gives its piece of what the whole layer gives, both ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ganglion.decide.topology import (
    BATCH,
    GROUP,
    NORMAL,
    RMS,
    TRANSPOSED,
    Cut,
    DropoutCut,
    EmbeddingCut,
    LinearCut,
    Mesh,
    ModelCuts,
    NormCut,
    Placement,
    Shard,
    WidthCut,
)
from ganglion.errors import ConfigError, DataError, LayoutError
from ganglion.execute.comm import DoneHandle, Group, Handle, SoloGroup, World, run_threads
from ganglion.execute.models import build_model, named_blocks, tensor_cuts
from ganglion.execute.tensor import (
    TensorParallel,
    TensorSettings,
    apply_tensor_parallel,
    cut,
    gather,
    split_cross_entropy,
)
from ganglion.execute.tensor.layers import SplitDropout
from ganglion.execute.tensor.multiply import Layer, multiply
from ganglion.execute.tensor.norms import SplitGroupNorm
from ganglion.execute.tensor.products import LinearProduct, Sizes, form_of
from tests.support.tensors import WIDE


def piece(whole: Tensor, world: World, axis: str, dim: int) -> Tensor:
    return whole.chunk(world.mesh.size(axis), dim)[world.coordinates.along(axis)]


def fresh(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a module in double whose parameters are neither ones nor zeros."""
    module, generator = make().double(), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


def images(*shape: int, shift: float = 0.0) -> Tensor:
    return (
        torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4)) + shift
    )


def split_alone(world: World, module: nn.Module, cut_of: Cut) -> TensorParallel:
    return apply_tensor_parallel({"it": module}, world, {"it": cut_of})


# --- norms ---------------------------------------------------------------------------------------


def check_norm(
    pieces: int, make: Callable[[], nn.Module], cut: NormCut, x: Tensor, dim: int
) -> list[TensorParallel]:
    """Compare a norm over split features with the whole one: output, gradients and buffers."""
    weights, whole = images(*x.shape), fresh(make)
    wanted_input = x.clone().requires_grad_()
    wanted = whole(wanted_input)
    (wanted * weights).sum().backward()
    assert wanted_input.grad is not None
    of_input = wanted_input.grad

    def body(world: World) -> TensorParallel:
        split = split_alone(world, fresh(make), cut)
        mine = piece(x, world, "y", dim).clone().requires_grad_()
        output = split.blocks["it"](mine)
        (output * piece(weights, world, "y", dim)).sum().backward()
        torch.testing.assert_close(output, piece(wanted, world, "y", dim))
        torch.testing.assert_close(mine.grad, piece(of_input, world, "y", dim))
        for name, parameter in split.blocks["it"].named_parameters():
            of_whole = whole.get_parameter(name).grad
            assert of_whole is not None
            torch.testing.assert_close(parameter.grad, piece(of_whole, world, "y", 0))
        for name, buffer in split.blocks["it"].named_buffers():
            if buffer.dim():
                torch.testing.assert_close(buffer, piece(whole.get_buffer(name), world, "y", 0))
        return split

    return run_threads(Mesh(y=pieces), body)


@pytest.mark.parametrize("pieces", [2, 3, 4, 6])
@pytest.mark.parametrize("num_groups", [1, 2, 3, 4, 6, 12])
def test_group_norm_over_split_channels(pieces: int, num_groups: int) -> None:
    split = check_norm(
        pieces, lambda: nn.GroupNorm(num_groups, 12), NormCut("y", GROUP), images(2, 12, 3, 2), 1
    )
    travels = isinstance(split[0].blocks["it"], SplitGroupNorm)
    assert travels == (num_groups % pieces != 0), "whole groups need no exchange"


@pytest.mark.parametrize("shape", [(2, 12), (2, 12, 5), (1, 12, 2, 2, 2)])
def test_group_norm_of_any_number_of_places(shape: tuple[int, ...]) -> None:
    check_norm(2, lambda: nn.GroupNorm(3, 12), NormCut("y", GROUP), images(*shape), 1)


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_of_a_piece_of_the_channels(affine: bool) -> None:
    check_norm(
        2, lambda: nn.BatchNorm2d(6, affine=affine), NormCut("y", BATCH), images(3, 6, 2, 2), 1
    )


def test_batch_norm_without_running_means() -> None:
    def make() -> nn.Module:
        return nn.BatchNorm1d(6, track_running_stats=False)

    check_norm(3, make, NormCut("y", BATCH), images(5, 6), 1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("pieces", [2, 4])
def test_layer_norm_over_split_features(pieces: int, bias: bool) -> None:
    check_norm(pieces, lambda: nn.LayerNorm(8, bias=bias), NormCut("y"), images(3, 2, 8), -1)


@pytest.mark.parametrize("eps", [1e-3, None])
def test_rms_norm_over_split_features(eps: float | None) -> None:
    check_norm(2, lambda: nn.RMSNorm(8, eps=eps), NormCut("y", RMS), images(3, 8), -1)


@pytest.mark.parametrize(
    ("make", "cut", "dim"),
    [
        (lambda: nn.LayerNorm(6, elementwise_affine=False), NormCut("y"), -1),
        (lambda: nn.GroupNorm(1, 6, affine=False), NormCut("y", GROUP), 1),
    ],
)
def test_norms_stay_exact_far_from_zero(make: Any, cut: NormCut, dim: int) -> None:
    """A difference of two large sums would lose ten digits here."""
    check_norm(2, make, cut, images(2, 6, shift=1e5), dim)


def test_the_report_knows_where_parameters_and_buffers_are() -> None:
    def body(world: World) -> dict[str, Placement]:
        blocks = {"a": nn.BatchNorm2d(6), "b": nn.BatchNorm2d(4)}
        return apply_tensor_parallel(blocks, world, {"a": NormCut("y", BATCH)}).report.placements

    (found, *_) = run_threads(Mesh(y=2, z=2), body)
    both = ("z", "data")
    for part in ("weight", "bias", "running_mean", "running_var"):
        shards = (Shard(0, "y"),)
        assert found[f"a.{part}"] == Placement(shape=(6,), shards=shards, replicated=both)
        assert found[f"b.{part}"] == Placement(shape=(4,), replicated=both)
    assert found["a.num_batches_tracked"] == Placement(shape=(), replicated=both)


# --- activations, loss, embedding, dropout -------------------------------------------------------


def test_cut_and_gather_are_each_others_backward() -> None:
    whole, weights = images(2, 6, 3), images(2, 6, 3)

    def body(world: World) -> None:
        group = world.group("x")
        x = whole.clone().requires_grad_()
        mine = cut(x, group, 1)
        assert torch.equal(mine, piece(whole, world, "x", 1))
        again = gather(mine, group, 1)
        assert torch.equal(again, whole)
        (again * weights).sum().backward()
        assert torch.equal(x.grad, weights)
        with pytest.raises(LayoutError, match="3 entries in dim -1, which 2 ranks do not divide"):
            cut(x, group)

    run_threads(Mesh(x=2), body)


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_cross_entropy_of_split_classes(scale: float) -> None:
    logits = images(2, 5, 6) * scale
    target = torch.tensor([[0, 5, 2, -100, 3], [1, -100, 4, 4, 0]])
    wanted_logits = logits.clone().requires_grad_()
    wanted = F.cross_entropy(wanted_logits.flatten(0, 1), target.flatten())
    (3 * wanted).backward()
    assert wanted_logits.grad is not None
    of_logits = wanted_logits.grad

    def body(world: World) -> None:
        mine = piece(logits, world, "x", -1).clone().requires_grad_()
        loss = split_cross_entropy(mine, target, world.group("x"))
        (3 * loss).backward()
        torch.testing.assert_close(loss, wanted)
        torch.testing.assert_close(mine.grad, piece(of_logits, world, "x", -1))

    run_threads(Mesh(x=3), body)


@pytest.mark.parametrize(
    ("target", "text"), [(6, "class 6 is outside 0 .. 5"), (-1, "class -1 is outside 0 .. 5")]
)
def test_classes_that_do_not_exist_are_refused(target: int, text: str) -> None:
    def body(world: World) -> None:
        split_cross_entropy(torch.zeros(1, 3), torch.tensor([target]), world.group("x"))

    with pytest.raises(DataError, match=text):
        run_threads(Mesh(x=2), body)


def test_a_loss_of_other_shapes_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"must be \(2,\), one class number for each row"):
        split_cross_entropy(torch.zeros(2, 3), torch.zeros(3).long(), SoloGroup(0))


@pytest.mark.parametrize("cut_of", [EmbeddingCut("x", "y"), EmbeddingCut(None, "y")])
def test_ids_that_do_not_exist_are_refused(cut_of: EmbeddingCut) -> None:
    def body(world: World) -> None:
        table = split_alone(world, nn.Embedding(4, 2), cut_of).blocks["it"]
        table(torch.tensor([0, 4]))

    with pytest.raises(DataError, match=r"id 4 is outside 0 \.\. 3"):
        run_threads(Mesh(x=2), body)


class FakeGroup(SoloGroup):
    """A member of a group without the others: for what does not talk, and to see what does."""

    def __init__(self, size: int = 2, index: int = 0) -> None:
        super().__init__(0)
        self.size, self.index = size, index
        self.log: list[str] = []

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Handle:
        number = sum(entry.startswith("start") for entry in self.log)
        self.log.append(f"start {number}")
        log = self.log

        class Logged(DoneHandle):
            def wait(self) -> None:
                if f"wait {number}" not in log:
                    log.append(f"wait {number}")

        return Logged()


@pytest.mark.parametrize("dim", [-1, 1])
def test_dropout_draws_the_mask_of_the_whole_layer(dim: int) -> None:
    x = images(3, 4, 8)
    torch.manual_seed(5)
    wanted = nn.Dropout(0.4)(x)
    parts = []
    for index in range(4):
        torch.manual_seed(5)
        layer = SplitDropout(0.4, FakeGroup(size=4, index=index), dim)
        parts.append(layer(x.chunk(4, dim)[index]))
    assert torch.equal(torch.cat(parts, dim), wanted)
    assert (wanted == 0).any()
    assert torch.equal(layer.eval()(x), x)


# --- halves --------------------------------------------------------------------------------------


class LoggedProduct(LinearProduct):
    """A product that tells when it computes, and on how many rows."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        self.log.append(f"output {len(x)}")
        return super().output(x, weight)

    def input_gradient(self, gradient: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        self.log.append(f"input gradient {len(gradient)}")
        return super().input_gradient(gradient, weight, x)

    def weight_gradient(self, gradient: Tensor, x: Tensor, shape: Sizes) -> Tensor:
        self.log.append(f"weight gradient {len(x)}")
        return super().weight_gradient(gradient, x, shape)


class PlainWeight:
    """A weight that is not stored in pieces."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.shape = tuple(parameter.shape)

    def block(self, phase: str) -> Tensor:
        return self.parameter.detach()

    def gradient(self, of_block: Tensor) -> Tensor:
        return of_block


def logged_pass(num_rows: int, *, overlap: bool, halves: bool) -> tuple[list[str], list[str]]:
    """Return what happened in the forward and in the backward of a layer."""
    group = FakeGroup()
    layer = Layer(
        LoggedProduct(group.log),
        PlainWeight(nn.Parameter(images(3, 2))),  # type: ignore[arg-type]
        *(group, group),
        overlap=overlap,
        halves=halves,
    )
    x = images(num_rows, 2).requires_grad_()
    output = multiply(x, layer)
    forward = list(group.log)
    group.log.clear()
    output.backward(torch.ones_like(output))
    torch.testing.assert_close(x.grad, torch.ones_like(output) @ layer.weight.parameter)
    return forward, list(group.log)


def test_a_half_is_summed_while_the_other_is_multiplied() -> None:
    forward, backward = logged_pass(4, overlap=True, halves=True)
    assert forward == ["output 2", "start 0", "output 2", "start 1", "wait 0", "wait 1"]
    assert backward == [
        *("input gradient 2", "start 0", "input gradient 2", "start 1"),
        *("weight gradient 4", "wait 0", "wait 1"),
    ]


def test_halves_with_waits_compute_the_same_parts() -> None:
    forward, backward = logged_pass(4, overlap=False, halves=True)
    assert forward == ["output 2", "start 0", "wait 0", "output 2", "start 1", "wait 1"]
    assert backward[-1] == "weight gradient 4"
    assert backward[:3] == ["input gradient 2", "start 0", "wait 0"]


def test_without_halves_the_input_gradient_is_summed_under_the_weight_gradient() -> None:
    forward, backward = logged_pass(4, overlap=True, halves=False)
    assert forward == ["output 4", "start 0", "wait 0"]
    assert backward == ["input gradient 4", "start 0", "weight gradient 4", "wait 0"]


@pytest.mark.parametrize(("num_rows", "parts"), [(5, [3, 2]), (1, [1])])
def test_an_odd_row_belongs_to_the_first_half(num_rows: int, parts: list[int]) -> None:
    forward, _ = logged_pass(num_rows, overlap=True, halves=True)
    assert [entry for entry in forward if "output" in entry] == [f"output {n}" for n in parts]


# --- gathers --------------------------------------------------------------------------------------


class LoggedGroup:
    """A group that tells of its gathers, and how many rows each gives."""

    def __init__(self, inner: Group, log: list[str]) -> None:
        self._inner = inner
        self._log = log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def all_gather(self, output: Tensor, tensor: Tensor) -> Handle:
        self._log.append(f"gather {len(output)}")
        return self._inner.all_gather(output, tensor)


def logged_steps(
    settings: TensorSettings, num_steps: int, *, of_input: bool = True
) -> list[list[str]]:
    """Train layers of 4, 8 and 16 rows over z; return what each step gathered, and when."""

    def body(world: World) -> list[list[str]]:
        log: list[str] = []
        logged = World(
            world.rank, world.mesh, lambda axes: cast(Group, LoggedGroup(world.group(*axes), log))
        )
        blocks = {str(rows): nn.Linear(rows // 2, rows) for rows in (4, 8, 16)}
        split = apply_tensor_parallel(blocks, logged, dict.fromkeys(blocks, NORMAL), settings)
        for name, block in split.blocks.items():
            block.register_forward_pre_hook(lambda *_, name=name: log.append(f"use {name}"))
        steps = []
        for _ in range(num_steps):
            x = torch.ones(1, 2, requires_grad=of_input)
            for block in split.blocks.values():
                x = block(x)
            log.append("backward")
            x.sum().backward()
            split.weights.finish_gradients(
                p for block in split.blocks.values() for p in block.parameters()
            )
            split.weights.on_change()
            steps.append(list(log))
            log.clear()
        return steps

    return run_threads(Mesh(z=2), body)[0]


FIRST = [
    *("use 4", "gather 4", "use 8", "gather 8", "use 16", "gather 16"),
    *("backward", "gather 16", "gather 8", "gather 4"),
]


def test_the_next_weight_is_gathered_before_it_is_used() -> None:
    first, *later = logged_steps(TensorSettings(), 3)
    assert first == FIRST
    assert later == 2 * [
        [
            *("use 4", "gather 4", "gather 8", "use 8", "gather 16", "use 16"),
            *("backward", "gather 16", "gather 8", "gather 4"),
        ]
    ]


def test_without_overlap_weights_are_gathered_when_they_are_used() -> None:
    settings = TensorSettings(overlap_all_gather=False)
    assert logged_steps(settings, 2) == [FIRST, FIRST]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_layer_whose_input_needs_no_gradient_is_gathered_forward_only(overlap: bool) -> None:
    settings = TensorSettings(overlap_all_gather=overlap)
    first, *later = logged_steps(settings, 3, of_input=False)
    assert first == FIRST[:-1]
    assert all(sorted(step) == sorted(FIRST[:-1]) for step in later)


@pytest.mark.parametrize(
    "module", [nn.Linear(4, 6), nn.Conv2d(4, 6, 3), nn.ConvTranspose2d(4, 6, 3, stride=2)], ids=str
)
def test_the_gradient_of_a_weight_needs_no_numbers_of_it(module: nn.Module) -> None:
    form = form_of(module)
    assert form is not None
    x = images(2, 4, *[5] * (module.weight.dim() - 2))
    weight = module.weight.detach().double()
    gradient = torch.randn_like(form.product.output(x, weight))
    found = form.product.weight_gradient(gradient, x, tuple(weight.shape))
    leaf = weight.clone().requires_grad_()
    form.product.output(x, leaf).backward(gradient)
    torch.testing.assert_close(found, leaf.grad, rtol=0, atol=0)


def test_kept_weights_are_gathered_once_a_step() -> None:
    once = FIRST[: FIRST.index("backward") + 1]
    first, second = logged_steps(TensorSettings(keep_gathered=True), 2)
    assert first == once
    assert sorted(second) == sorted(once)


def test_some_weights_are_kept_by_name() -> None:
    _, second = logged_steps(TensorSettings(keep_names=("8",)), 2)
    assert sorted(second) == sorted([*FIRST[:7], "gather 16", "gather 4"])


def test_some_weights_are_kept_by_their_size() -> None:
    # Layers of 4 x 2, 8 x 4 and 16 x 8 numbers in 4 bytes: the first, then no more.
    _, second = logged_steps(TensorSettings(keep_bytes=4 * 4 * 2 + 4 * 8 * 4 - 1), 2)
    assert sorted(second) == sorted([*FIRST[:7], "gather 16", "gather 8"])


def test_what_is_kept_is_told() -> None:
    def body(world: World) -> str:
        blocks: dict[str, nn.Module] = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}
        settings = TensorSettings(keep_bytes=64)
        return str(apply_tensor_parallel(blocks, world, {}, settings).report)

    report = run_threads(Mesh(z=2), body)[0]
    assert "kept   a.weight: gathered once, until it changes" in report
    assert "kept   b.weight" not in report


def test_a_name_to_keep_that_is_not_there_is_refused() -> None:
    def body(world: World) -> None:
        blocks: dict[str, nn.Module] = {"a": nn.Linear(4, 4)}
        apply_tensor_parallel(blocks, world, {}, TensorSettings(keep_names=("b",)))

    with pytest.raises(ConfigError, match=r"keep_names has 'b', .* name some of a.weight"):
        run_threads(Mesh(z=2), body)


def test_two_ways_to_say_what_is_kept_are_refused() -> None:
    with pytest.raises(ConfigError, match="keep_bytes = 5 each say what is kept"):
        TensorSettings(keep_gathered=True, keep_bytes=5)


# --- precision ------------------------------------------------------------------------------------


def test_autocast_computes_in_bf16_and_leaves_doubles_alone() -> None:
    def body(world: World) -> None:
        up = split_alone(world, nn.Linear(4, 4), NORMAL).blocks["it"]
        conv = split_alone(world, nn.Conv1d(4, 4, 1), NORMAL).blocks["it"]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = torch.ones(2, 2, requires_grad=True)
            output = up(x)
            assert output.dtype == conv(torch.ones(1, 2, 3)).dtype == torch.bfloat16
            assert up(torch.ones(2, 2).double()).dtype == torch.float64
        output.sum().backward()
        assert x.grad is not None and x.grad.dtype == torch.float32
        assert up.weight.grad.dtype == torch.float32

    run_threads(Mesh(y=2), body)


# --- the general path, and the report ------------------------------------------------------------


class Residual(nn.Module):
    """A module nobody has heard of; its layer goes by two names."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.again = self.linear
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.scale * self.again(F.relu(self.linear(x)))
        return result


def report_of(blocks: dict[str, nn.Module], cuts: dict[str, Cut], **sizes: int) -> str:
    def body(world: World) -> str:
        return str(apply_tensor_parallel(blocks, world, cuts).report)

    # One rank is enough: nothing is sent.
    return run_threads_on_one(Mesh(**sizes), body)


def run_threads_on_one(mesh: Mesh, body: Callable[[World], str]) -> str:
    return body(World(0, mesh, lambda axes: FakeGroup(len(mesh.group_of(0, axes)))))


def test_the_report_tells_what_was_split_and_what_not() -> None:
    blocks: dict[str, nn.Module] = {
        "embedding": nn.Embedding(6, 4),
        "body": nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8), Residual(8)),
        "conv": nn.Conv2d(4, 8, 3, groups=2),
        "circular": nn.Conv1d(4, 8, 3, padding_mode="circular"),
        "even": nn.Conv1d(4, 8, 2, padding="same"),
        "head": nn.Linear(8, 6, bias=False),
    }
    assert report_of(blocks, {"head": LinearCut("y", None)}, x=2, y=2, z=4).splitlines() == [
        "split  body.0 (Linear): inputs over y=2, cut from whole ones; outputs over x=2, gathered; "
        "stored over z=4",
        "split  body.3.linear (Linear): inputs over y=2, cut from whole ones; outputs over x=2, "
        "gathered; stored over z=4",
        "split  head (Linear): inputs over y=2; outputs whole; stored whole along z=4, which does "
        "not divide its 6 rows",
        "whole  embedding (Embedding): no cut is known for it; every rank holds its weight",
        "whole  body.2 (LayerNorm): no cut is known for it; every rank holds its weight, bias",
        "whole  body.3 (Residual): no cut is known for it; every rank holds its scale",
        "whole  conv (Conv2d): its 2 groups of channels do not mix, which no split product knows; "
        "every rank holds its weight, bias",
        "whole  circular (Conv1d): padding_mode='circular' pads with more than zeros; every rank "
        "holds its weight, bias",
        'whole  even (Conv1d): padding="same" with an even kernel pads its two sides differently; '
        "every rank holds its weight, bias",
    ]


def test_the_report_tells_of_cuts() -> None:
    blocks: dict[str, nn.Module] = {
        "tokens": nn.Embedding(8, 4),
        "norm": nn.LayerNorm(4),
        "drop": nn.Dropout(0.1),
        "up": nn.Linear(4, 8),
    }
    cuts: dict[str, Cut] = {
        "tokens": EmbeddingCut("x", "y"),
        "norm": NormCut("y"),
        "drop": DropoutCut("y"),
        "up": NORMAL,
    }
    assert report_of(blocks, cuts, x=2, y=2).splitlines() == [
        "split  tokens (Embedding): rows over x=2; features over y=2; stored over z=1",
        "split  norm (LayerNorm): features over y=2",
        "split  drop (Dropout): features over y=2",
        "split  up (Linear): inputs over y=2; outputs over x=2; stored over z=1",
    ]


def test_a_module_of_two_names_is_split_once() -> None:
    blocks = {"it": Residual(4)}
    report_of(blocks, {}, x=2)
    assert blocks["it"].linear is blocks["it"].again
    assert blocks["it"].linear.weight.shape == (2, 4)


# --- refusals ------------------------------------------------------------------------------------


def tied() -> dict[str, nn.Module]:
    one, other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    other.weight = one.weight
    return {"one": one, "other": other}


@pytest.mark.parametrize(
    ("make", "cuts", "text"),
    [
        (
            lambda: {"up": nn.Linear(4, 7)},
            {},
            r"up\.weight: dim 0 of a parameter of shape \(7, 4\) has 7 entries, which x=2 does not "
            r"divide: choose a size that is a multiple of 2, .*LinearCut\(None, None\)",
        ),
        (
            lambda: {"up": nn.Linear(5, 4)},
            {"up": NORMAL},
            r"up\.weight: dim 1 .* has 5 entries, which y=2 does not divide",
        ),
        (
            lambda: {"norm": nn.LayerNorm(5)},
            {"norm": NormCut("y")},
            r"norm\.weight: dim 0 .* has 5 entries, which y=2",
        ),
        (
            lambda: {"conv": nn.Conv2d(4, 4, 3, groups=2)},
            {"conv": NORMAL},
            "conv is a Conv2d, which cannot be split as .*: its 2 groups of channels",
        ),
        (
            lambda: {"act": nn.ReLU()},
            {"act": NORMAL},
            "act is a ReLU, .* only linear layers and convolutions can",
        ),
        (
            lambda: {"it": nn.Linear(2, 2)},
            {"it": EmbeddingCut("x", "y")},
            "it is a Linear, .* only embeddings can",
        ),
        (lambda: {"it": nn.Dropout2d()}, {"it": DropoutCut("y")}, "only nn.Dropout can"),
        (lambda: {"it": nn.GroupNorm(2, 4)}, {"it": NormCut("y")}, "it is no layer norm"),
        (lambda: {"it": nn.LayerNorm((2, 4))}, {"it": NormCut("y")}, "norm over one dim"),
        (lambda: {"it": nn.LayerNorm(4)}, {"it": NormCut("y", BATCH)}, "it is no batch norm"),
        (lambda: {"it": nn.LayerNorm(4)}, {"it": NormCut("y", GROUP)}, "it is no group norm"),
        (
            lambda: {"it": nn.Embedding(4, 4, padding_idx=0)},
            {"it": EmbeddingCut("x", "y")},
            "it is an embedding with padding_idx, .* build it without",
        ),
        (
            lambda: {"it": nn.Embedding(4, 4, max_norm=1.0, scale_grad_by_freq=True)},
            {"it": EmbeddingCut("x", "y")},
            "with max_norm, scale_grad_by_freq,",
        ),
        (
            lambda: {"it": nn.Embedding(4, 4, sparse=True)},
            {"it": EmbeddingCut("x", "y")},
            "with sparse,",
        ),
        (
            tied,
            {"one": NORMAL, "other": TRANSPOSED},
            r"other\.weight is the same parameter as one\.weight, .* \(dim 0 over y, dim 1 over x "
            r"and dim 0 over x, dim 1 over y\): give both modules cuts that agree",
        ),
        (
            lambda: {"it": nn.Linear(4, 4)},
            {"it": WidthCut("x", refusal="it hurts: stop")},
            "it cannot be split over x = 2: it hurts: stop, or parallel.x = 1",
        ),
        (
            lambda: {"it": nn.Linear(4, 4)},
            {"it": WidthCut("x", counts=(("heads", 3),))},
            "it: heads = 3 cannot be split over x = 2: choose a multiple of 2",
        ),
    ],
)
def test_what_cannot_be_split_is_refused(
    make: Callable[[], dict[str, nn.Module]], cuts: dict[str, Cut], text: str
) -> None:
    with pytest.raises(LayoutError, match=text):
        report_of(make(), cuts, x=2, y=2)


def test_groups_of_heads_stay_whole() -> None:
    """Also where the features of one group would divide."""
    blocks = named_blocks(build_model(replace(WIDE["wide_gpt"], num_kv_heads=1)))
    refusal = r"model\.kv_heads = 1 cannot be split over x = 2"
    with pytest.raises(LayoutError, match=refusal):
        report_of(blocks, dict(tensor_cuts(blocks).modules), x=2)


def test_a_cut_of_an_unknown_module_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a cut is given for 'up\.linaer', which is no"):
        report_of({"up": nn.Sequential(nn.Linear(2, 2))}, {"up.linaer": NORMAL}, x=2)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: LinearCut("z", "x"), "'z' splits no features: use 'x', 'y' or None"),
        (lambda: EmbeddingCut("x", "x"), "one axis cannot split both sides"),
        (lambda: NormCut("data"), "'data' splits no features"),
        (lambda: NormCut("y", "instance"), r"kind is one of \['layer', 'rms', 'batch', 'group'\]"),
        (lambda: LinearCut("y", "x", sections=3, gives_whole=True), "as one section"),
        (lambda: LinearCut("y", "x", in_sections=2, takes_whole=True), "as one section"),
        (lambda: ModelCuts({}, output_axis="z"), "'z' splits no features"),
    ],
)
def test_impossible_cuts_are_refused(make: Callable[[], object], text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        make()


def test_activations_that_do_not_fit_are_refused() -> None:
    def body(world: World) -> None:
        blocks = {"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)}
        split = apply_tensor_parallel(blocks, world, {"up": LinearCut(None, "x")}).blocks
        split["down"](split["up"](torch.zeros(1, 4)))

    with pytest.raises(LayoutError, match=r"down takes 8 features in dim -1, but got .* \(1, 4\)"):
        run_threads(Mesh(x=2), body)


def test_settings_have_halves_off() -> None:
    assert TensorSettings().halves is False
