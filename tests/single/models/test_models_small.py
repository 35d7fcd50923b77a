"""MLP and ConvNet: their blocks, their arithmetic, their refusals, and that they learn."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ganglion.decide.shapes import ConvShape, MLPShape
from ganglion.errors import LayoutError
from ganglion.execute.models import MLP, BlockModel, ConvNet, cross_entropy, mse, named_blocks

MLP_SHAPE = MLPShape(num_inputs=16, num_outputs=3, num_layers=3, hidden=32)
CONV_SHAPE = ConvShape(image_size=28, num_channels=1, num_outputs=10)


def losses_of_training(model: BlockModel, x: Tensor, target: Tensor, steps: int) -> list[float]:
    loss_fn = cross_entropy if target.dtype == torch.int64 else mse
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        loss = loss_fn(model(x), target)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_mlp_blocks_equal_the_written_out_layers() -> None:
    torch.manual_seed(0)
    model = MLP(MLP_SHAPE)
    weights = model.state_dict()
    x = torch.randn(5, 4, 4)
    expected = x.reshape(5, 16)
    for i in range(3):
        layer = f"layers.{i}.linear"
        expected = expected @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"]
        expected = F.gelu(expected) if i < 2 else expected
    torch.testing.assert_close(model(x), expected)
    assert list(model.blocks()) == ["layers.0", "layers.1", "layers.2"]
    assert len(model.blocks()) == MLP_SHAPE.num_blocks


@pytest.mark.parametrize("bias", [True, False])
def test_mlp_of_one_layer_is_linear(bias: bool) -> None:
    shape = MLPShape(num_inputs=6, num_outputs=2, num_layers=1, hidden=99, bias=bias)
    model = MLP(shape)
    x = torch.randn(4, 2, 3)
    weight = model.state_dict()["layers.0.linear.weight"]
    added = model.state_dict().get("layers.0.linear.bias", torch.zeros(2))
    assert ("layers.0.linear.bias" in model.state_dict()) == bias
    torch.testing.assert_close(model(x), x.flatten(1) @ weight.T + added)


def test_mlp_refuses_samples_of_another_size() -> None:
    text = r"samples of shape \(5, 5\) have 25 numbers, but the layer takes 16: build the model"
    with pytest.raises(LayoutError, match=text):
        MLP(MLP_SHAPE)(torch.zeros(1, 5, 5))


def test_convnet_has_five_blocks_and_the_sizes_of_lenet() -> None:
    model = ConvNet(CONV_SHAPE)
    assert list(model.blocks()) == ["conv1", "conv2", "linear1", "linear2", "linear3"]
    assert len(model.blocks()) == CONV_SHAPE.num_blocks
    # LeNet-5 with full connections: 156 + 2416 + 48120 + 10164 + 850.
    assert sum(parameter.numel() for parameter in model.parameters()) == 61706
    x = torch.zeros(2, 1, 28, 28)
    shapes = []
    for block in model.blocks().values():
        x = block(x)
        shapes.append(tuple(x.shape))
    assert shapes == [(2, 6, 14, 14), (2, 16, 5, 5), (2, 120), (2, 84), (2, 10)]


def test_convnet_equals_the_written_out_layers() -> None:
    torch.manual_seed(0)
    model = ConvNet(ConvShape(image_size=17, num_channels=3, num_outputs=4))
    w = model.state_dict()
    x = torch.randn(2, 3, 17, 17)
    one = F.conv2d(F.pad(x, (2, 2, 2, 2)), w["conv1.conv.weight"], w["conv1.conv.bias"])
    one = F.max_pool2d(one.clamp(min=0), 2)
    two = F.conv2d(one, w["conv2.conv.weight"], w["conv2.conv.bias"])
    row = F.max_pool2d(two.clamp(min=0), 2).reshape(2, -1)
    for i in (1, 2):
        row = row @ w[f"linear{i}.linear.weight"].T + w[f"linear{i}.linear.bias"]
        row = row.clamp(min=0)
    expected = row @ w["linear3.linear.weight"].T + w["linear3.linear.bias"]
    torch.testing.assert_close(model(x), expected)


def test_convnet_takes_the_smallest_image_and_refuses_a_smaller_one() -> None:
    assert ConvNet(ConvShape(image_size=12, num_channels=1, num_outputs=2))(
        torch.zeros(1, 1, 12, 12)
    ).shape == (1, 2)
    text = r'images of 11x11 pixels are too small for model.kind = "conv".*at least 12x12; use lar'
    with pytest.raises(LayoutError, match=text):
        ConvNet(ConvShape(image_size=11, num_channels=1, num_outputs=2))


def test_convnet_refuses_images_of_another_size() -> None:
    with pytest.raises(LayoutError, match=r"samples of shape \(16, 6, 6\) have 576 .* takes 400"):
        ConvNet(CONV_SHAPE)(torch.zeros(1, 1, 32, 32))


@pytest.mark.parametrize("model", [MLP(MLP_SHAPE), ConvNet(CONV_SHAPE)], ids=["mlp", "conv"])
def test_block_and_parameter_names_are_the_state_dict_names(model: BlockModel) -> None:
    blocks = named_blocks(model)
    joined = [f"{name}.{key}" for name, block in blocks.items() for key in block.state_dict()]
    assert joined == list(model.state_dict())


def test_mlp_halves_its_loss() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 4, 4)
    target = (x.flatten(1) @ torch.randn(16, 3)).argmax(-1)
    losses = losses_of_training(MLP(MLP_SHAPE), x, target, steps=40)
    assert losses[-1] < losses[0] / 2


def test_mlp_halves_its_loss_on_a_regression() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 16)
    losses = losses_of_training(MLP(MLP_SHAPE), x, x[:, :3] * 2, steps=40)
    assert losses[-1] < losses[0] / 2


def test_convnet_halves_its_loss() -> None:
    torch.manual_seed(0)
    target = torch.arange(20) % 4
    x = torch.randn(20, 1, 16, 16) * 0.1
    for row, label in enumerate(target.tolist()):
        x[row, 0, 4 * label : 4 * label + 3, 2:14] += 1.0  # one bright bar, its height the class
    model = ConvNet(ConvShape(image_size=16, num_channels=1, num_outputs=4))
    losses = losses_of_training(model, x, target, steps=40)
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("kind", ["mlp", "conv"])
def test_initial_weights_follow_the_seed(kind: str) -> None:
    def draw(seed: int) -> Tensor:
        torch.manual_seed(seed)
        model: BlockModel = MLP(MLP_SHAPE) if kind == "mlp" else ConvNet(CONV_SHAPE)
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
