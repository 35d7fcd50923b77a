"""Descriptions measured under fake tensors: equal to closed forms, for any module, and refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ganglion.decide.shapes import (
    ConvShape,
    DescribedModel,
    Flops,
    GPTShape,
    Layout,
    MLPShape,
    activations_of,
    describe_shape,
    description_from_json,
    description_to_json,
    named_model,
)
from ganglion.decide.shapes.models import BuiltShape
from ganglion.decide.topology import Mesh
from ganglion.errors import ConfigError
from ganglion.execute.measure import SampleOutline, describe_model
from ganglion.execute.models import hugging_face_blocks, mse, outline_model

GPT = GPTShape(
    vocab_size=96,
    seq_len=32,
    num_layers=2,
    hidden=64,
    num_heads=8,
    num_kv_heads=8,
    head_size=8,
    mlp_hidden=256,
)
GROUPED = GPTShape(
    vocab_size=96,
    seq_len=32,
    num_layers=2,
    hidden=64,
    num_heads=8,
    num_kv_heads=2,
    head_size=6,
    mlp_hidden=96,
    positions="learned",
    tied_embedding=True,
    bias=True,
)
TOKENS = SampleOutline(shape=(32,))
CLOSED_FORMS: list[tuple[BuiltShape, SampleOutline]] = [
    (GPT, TOKENS),
    (GROUPED, TOKENS),
    (
        MLPShape(num_inputs=48, num_outputs=10, num_layers=3, hidden=64),
        SampleOutline(shape=(48,), dtype=torch.float32),
    ),
    (
        ConvShape(image_size=28, num_channels=1, num_outputs=10),
        SampleOutline(shape=(1, 28, 28), dtype=torch.float32),
    ),
]
PRECISIONS = ("fp32", "bf16", "bf16_master")


def assert_alike(measured: DescribedModel, closed: DescribedModel) -> None:
    """Flop and parameters are equal, kept bytes within 2 %, layer by layer."""
    assert (measured.num_parameters, measured.tokens) == (closed.num_parameters, closed.tokens)
    assert measured.sample_bytes == closed.sample_bytes
    for mine, other in zip(measured.blocks, closed.blocks, strict=True):
        assert (mine.flops, mine.fixed_flops) == (other.flops, Flops())
        assert mine.tied_parameters == other.tied_parameters
        assert mine.output_elements == other.output_elements
        sizes = [(p.shape, p.role, p.is_tied) for p in mine.parameters]
        assert sorted(sizes) == sorted((p.shape, p.role, p.is_tied) for p in other.parameters)
    for precision in PRECISIONS:
        for size in (1, 4):
            layout = Layout(microbatch_size=size, mesh=Mesh(), precision=precision)
            pairs = zip(
                activations_of(measured, layout), activations_of(closed, layout), strict=True
            )
            for held, expected in pairs:
                assert held.kept_bytes == pytest.approx(expected.kept_bytes, rel=0.02)
                assert held.saved_bytes == pytest.approx(expected.saved_bytes, rel=0.02)
                assert held.input_bytes == expected.input_bytes
                assert held.output_bytes == expected.output_bytes
                ends = (held.keeps_input, held.keeps_output)
                assert ends == (expected.keeps_input, expected.keeps_output)


@pytest.mark.parametrize(("shape", "sample"), CLOSED_FORMS, ids=["gpt", "grouped", "mlp", "conv"])
def test_a_built_in_model_is_measured_as_its_closed_form(
    shape: BuiltShape, sample: SampleOutline
) -> None:
    model, _ = outline_model(shape)
    assert_alike(describe_model(model, sample), describe_shape(shape))


def test_llama_is_measured_as_its_closed_form() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    with torch.device("meta"):
        blocks = hugging_face_blocks(config)
    sizes = "layers=2,hidden=64,heads=8,kv_heads=2,mlp_hidden=160,vocab=96,seq=32"
    assert_alike(describe_model(blocks, TOKENS), named_model(f"llama:{sizes}"))


def test_gpt2_has_the_parameters_and_flop_of_its_closed_form() -> None:
    """Its GELU is written out in many operations, which keep more than one."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=96, n_embd=64, n_layer=1, n_head=8, n_positions=32)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    measured = describe_model(model, TOKENS)
    closed = named_model("gpt:layers=1,hidden=64,heads=8,vocab=96,seq=32")
    assert measured.num_parameters == closed.num_parameters
    assert [b.flops for b in measured.blocks] == [b.flops for b in closed.blocks]
    for mine, other in zip(measured.blocks, closed.blocks, strict=True):
        assert [p.shape for p in mine.parameters] == [p.shape for p in other.parameters]


def test_equal_blocks_share_a_kind_and_no_memory_is_needed() -> None:
    shape = GPTShape(**{f: getattr(GPT, f) for f in GPT.__slots__} | {"hidden": 2**20})
    measured = describe_model(outline_model(shape)[0], TOKENS)  # terabytes of weights
    assert len({id(block) for block in measured.blocks}) == 4
    assert [block.name for block in measured.blocks[:3]] == [
        "embedding",
        "attention",
        "feed_forward",
    ]
    assert description_from_json(description_to_json(measured), "model.json") == measured


# --- modules of one's own ------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.down(torch.relu(self.up(x)))
        return x + change


class Net(nn.Module):
    """A stem, a list of layers and a head: it can be cut at its list."""

    def __init__(self, *, skips: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(12, 16)
        self.layers = nn.ModuleList(Residual(16) for _ in range(3))
        self.head = nn.Linear(16, 5)
        self.skips = skips

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in list(self.layers)[: 1 if self.skips else None]:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


NUMBERS = SampleOutline(shape=(12,), dtype=torch.float32)


def test_a_module_is_cut_at_its_longest_list() -> None:
    measured = describe_model(Net(), NUMBERS)
    stem, layer, *_, head = measured.blocks
    assert [b.name for b in measured.blocks] == ["linear", *["residual"] * 3, "linear.2"]
    products = 2 * 12 * 16
    assert stem.flops == Flops(forward=products, input=0, weight=products)
    assert layer.flops == Flops(forward=4096, input=4096, weight=4096)
    assert head.output_elements == 5
    # The relu's result, once for itself and for the layer behind it; its input is not kept.
    layout = Layout(microbatch_size=3, mesh=Mesh())
    assert layer.activations[0].on(layout).kept_bytes == 3 * 64 * 4


def test_backward_of_a_first_block_with_layers_inside_is_divided() -> None:
    """Gradients of inner activations are needed, that of the data is not."""
    blocks = [nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8)), nn.Linear(8, 5)]
    first, _ = describe_model(blocks, NUMBERS).blocks
    assert first.flops == Flops(
        forward=2 * (12 * 16 + 16 * 8), input=2 * 16 * 8, weight=2 * (12 * 16 + 16 * 8)
    )


def test_convolutions_in_groups_are_counted_as_they_are_computed() -> None:
    image = SampleOutline(shape=(8, 6, 6), dtype=torch.float32)
    model = nn.Sequential(
        nn.Conv2d(8, 8, 1), nn.Conv2d(8, 16, 3, groups=4), nn.Flatten(), nn.Linear(256, 5)
    )
    _, grouped, flat, _ = describe_model(model, image).blocks
    products = 2 * 16 * 2 * 9 * 16
    assert grouped.flops == Flops(forward=products, input=products, weight=products)
    assert (grouped.layers[0].input_rows, grouped.layers[0].output_rows) == (36, 16)
    assert flat.flops == Flops()


def test_what_does_not_grow_with_the_batch_is_fixed() -> None:
    class Product(nn.Module):
        """Its weight is a product of two smaller ones."""

        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = (nn.Parameter(torch.empty(n)) for n in ((12, 3), (3, 5)))

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.left @ self.right)

    (block,) = describe_model([Product()], NUMBERS).blocks
    assert (block.flops.forward, block.fixed_flops.forward) == (2 * 12 * 5, 2 * 12 * 3 * 5)
    assert block.cost(7).forward_flops == 7 * 120 + 360
    kept = block.activations[0].on(Layout(microbatch_size=7, mesh=Mesh())).kept_bytes
    weight_bytes = 0  # the gradient of the data is not needed, and so not the whole weight
    assert kept == weight_bytes + 7 * (5 * 4 + 8) + 4


def test_a_loss_of_numbers_needs_targets_like_the_output() -> None:
    blocks = [nn.Linear(12, 16), nn.Linear(16, 5)]
    described = describe_model(blocks, NUMBERS, loss_fn=mse, target_of=torch.empty_like)
    assert described.num_blocks == 2


class Bare(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Tuple(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Reads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(x.sum())


SHARED = nn.Linear(12, 12)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Bare(), "a Bare has no list of modules to cut it at: give the class a `blocks()` method"),
        (Net(skips=True), "parts one after another take"),
        ([nn.Linear(3, 4)], "block '0' (Linear) does not run on an input of shape [2, 12]"),
        ([Tuple()], "it returns tuple, not one tensor"),
        ([nn.Linear(12, 4), Reads()], "block '1' (Reads) does not run"),
        ([nn.Linear(12, 12), SHARED, SHARED], "blocks '1' and '2' share a parameter"),
    ],
    ids=["bare", "skips", "shape", "tuple", "reads", "shared"],
)
def test_what_cannot_be_described_is_refused(
    model: nn.Module | list[nn.Module], text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        describe_model(model, NUMBERS)
    assert text in str(refused.value)
    assert "Traceback" not in capfd.readouterr().err
