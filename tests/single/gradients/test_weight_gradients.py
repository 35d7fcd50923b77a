"""A backward in two halves gives the gradients of a plain one, whenever the second half runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrizations
from torch.utils.flop_counter import FlopCounterMode

from ganglion.decide.shapes import ConvShape, GPTShape, MLPShape
from ganglion.errors import GanglionError
from ganglion.execute.models import GPT, MLP, ConvNet
from ganglion.execute.pipeline.blocks.weight_gradients import WeightStore, defer_weight_gradients

NUM_MICROBATCHES = 4
Order = Sequence[tuple[str, int]]
Forward = Callable[[Tensor], Tensor]


def gpt(*, tied: bool, bias: bool, positions: str) -> GPT:
    shape = GPTShape(
        vocab_size=19, seq_len=6, num_layers=2, hidden=8, num_heads=4, num_kv_heads=2, head_size=4,
        mlp_hidden=12, positions=positions, tied_embedding=tied, bias=bias,
    )  # fmt: skip
    return GPT(shape)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: MLP(MLPShape(num_inputs=6, num_outputs=5, num_layers=3, hidden=7)),
    "conv": lambda: ConvNet(ConvShape(image_size=12, num_channels=2, num_outputs=5)),
    "gpt": lambda: gpt(tied=False, bias=True, positions="rotary"),
    "gpt_tied": lambda: gpt(tied=True, bias=False, positions="learned"),
}


def microbatches(name: str, dtype: torch.dtype) -> list[Tensor]:
    if name.startswith("gpt"):
        return [torch.randint(19, (2, 6)) for _ in range(NUM_MICROBATCHES)]
    sizes = (3, 6) if name == "mlp" else (3, 2, 12, 12)
    return [torch.randn(sizes, dtype=dtype) for _ in range(NUM_MICROBATCHES)]


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


def assert_same(one: dict[str, Tensor | None], other: dict[str, Tensor | None]) -> None:
    """Compare by name and to the last bit."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        expected = other[name]
        assert (value is None) == (expected is None), name
        assert value is None or expected is None or torch.equal(value, expected), name


def plain(model: nn.Module, inputs: Sequence[Tensor]) -> list[Tensor]:
    outputs = [model(x) for x in inputs]
    for y in outputs:
        y.float().square().mean().backward()
    return outputs


def split(model: nn.Module, inputs: Sequence[Tensor], order: Order) -> list[Tensor]:
    """Run the model in the order given: F, B or W and the microbatch."""
    deferral = defer_weight_gradients([model])
    stores = [WeightStore() for _ in inputs]
    outputs: dict[int, Tensor] = {}
    for kind, k in order:
        if kind == "F":
            with deferral.collecting(stores[k]):
                outputs[k] = model(inputs[k])
        elif kind == "B":
            outputs[k].float().square().mean().backward()
            assert stores[k].num_deferred > 0
        else:
            stores[k].run()
            assert stores[k].num_deferred == 0
    deferral.close()
    return [outputs[k] for k in range(len(inputs))]


def steps(text: str) -> Order:
    return [(step[0], int(step[1:])) for step in text.split()]


W_IN_ORDER = {
    "at_once": steps("F0 F1 F2 F3 B0 W0 B1 W1 B2 W2 B3 W3"),
    "at_the_end": steps("F0 F1 F2 F3 B0 B1 B2 B3 W0 W1 W2 W3"),
    "zero_bubble": steps("F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3"),
}
W_IN_ANY_ORDER = {
    "last_first": steps("F0 F1 F2 F3 B0 B1 B2 B3 W3 W2 W1 W0"),
    "mixed": steps("F0 F1 B1 F2 W1 B0 F3 B3 B2 W2 W0 W3"),
}


@pytest.mark.parametrize("order", W_IN_ORDER)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_bitwise_those_of_a_plain_backward(name: str, order: str) -> None:
    model, inputs = MODELS[name](), microbatches(name, torch.float32)
    twin = copy.deepcopy(model)
    expected = plain(twin, inputs)
    outputs = split(model, inputs, W_IN_ORDER[order])
    assert all(torch.equal(y, e) for y, e in zip(outputs, expected, strict=True))
    assert_same(gradients(model), gradients(twin))


@pytest.mark.parametrize("order", W_IN_ANY_ORDER)
@pytest.mark.parametrize("name", MODELS)
def test_the_order_of_microbatches_only_moves_rounding(name: str, order: str) -> None:
    model, inputs = MODELS[name]().double(), microbatches(name, torch.float64)
    twin = copy.deepcopy(model)
    plain(twin, inputs)
    split(model, inputs, W_IN_ANY_ORDER[order])
    for parameter, (key, expected) in zip(model.parameters(), gradients(twin).items(), strict=True):
        assert expected is not None and expected.any(), key
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("shared", [False, True], ids=["context_each", "one_context"])
@pytest.mark.parametrize("name", MODELS)
def test_autocast_is_bitwise_that_of_a_plain_backward(name: str, shared: bool) -> None:
    model, inputs = MODELS[name](), microbatches(name, torch.float32)
    twin = copy.deepcopy(model)

    def autocast(enabled: bool) -> AbstractContextManager[object]:
        return torch.autocast("cpu", torch.bfloat16) if enabled else nullcontext()

    def inside(model: nn.Module) -> nn.Module:
        block = nn.Module()
        block.model = model
        block.forward = lambda x: _within(autocast(not shared), model, x)  # type: ignore[method-assign]
        return block

    with autocast(shared):
        expected = plain(inside(twin), inputs)
        outputs = split(inside(model), inputs, W_IN_ORDER["zero_bubble"])
    assert expected[0].dtype == torch.bfloat16
    assert all(torch.equal(y, e) for y, e in zip(outputs, expected, strict=True))
    assert_same(gradients(model), gradients(twin))


def _within(context: AbstractContextManager[object], model: nn.Module, x: Tensor) -> Tensor:
    with context:
        output: Tensor = model(x)
        return output


def test_b_alone_gives_inputs_and_everything_that_is_no_deferred_layer() -> None:
    model = gpt(tied=True, bias=True, positions="learned")
    twin, ids = copy.deepcopy(model), torch.randint(19, (2, 6))
    plain(twin, [ids])
    deferral, store = defer_weight_gradients([model]), WeightStore()
    with deferral.collecting(store):
        output = model(ids)
    assert store.num_deferred == 0
    output.square().mean().backward()
    # qkv, out, up, down of two layers, the head, the tokens and the positions
    assert store.num_deferred == 11
    for name, p in model.named_parameters():
        in_b = ".norm." in name
        assert_same({name: p.grad}, {name: twin.get_parameter(name).grad if in_b else None})
    store.run()
    assert_same(gradients(model), gradients(twin))


class Direct(nn.Module):
    """Uses the weight of an embedding without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table.weight[0]


def test_a_weight_that_is_used_directly_belongs_to_b() -> None:
    model = Direct()
    deferral, store = defer_weight_gradients([model]), WeightStore()
    with deferral.collecting(store):
        output = model(torch.ones(2, 3))
    output.sum().backward()
    assert store.num_deferred == 0
    gradient = model.table.weight.grad
    assert gradient is not None and gradient[0].tolist() == [2, 2, 2]


def test_each_half_does_half_of_the_work() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Conv2d(3, 4, 3, padding=1), nn.Linear(8, 5))
    x = torch.randn(2, 3, 7, 6, requires_grad=True)
    gradient = torch.randn(2, 4, 7, 5)

    def flops(work: Callable[[], object]) -> int:
        with FlopCounterMode(display=False) as counter:
            work()
        return int(counter.get_total_flops())

    output = model(x)
    whole = flops(lambda: output.backward(gradient))
    deferral, store = defer_weight_gradients([model]), WeightStore()
    with deferral.collecting(store):
        deferred_output = model(x)
    assert flops(lambda: deferred_output.backward(gradient)) == whole // 2
    assert flops(store.run) == whole // 2


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear_1d": (lambda: nn.Linear(4, 3), lambda: torch.randn(4)),
    "linear_2d": (lambda: nn.Linear(4, 3), lambda: torch.randn(5, 4)),
    "linear_3d": (lambda: nn.Linear(4, 3), lambda: torch.randn(2, 5, 4)),
    "linear_4d": (lambda: nn.Linear(4, 3), lambda: torch.randn(2, 3, 5, 4)),
    "no_bias_2d": (lambda: nn.Linear(4, 3, bias=False), lambda: torch.randn(5, 4)),
    "no_bias_3d": (lambda: nn.Linear(4, 3, bias=False), lambda: torch.randn(2, 5, 4)),
    "no_bias_4d": (lambda: nn.Linear(4, 3, bias=False), lambda: torch.randn(2, 3, 5, 4)),
    "linear_transposed": (lambda: nn.Linear(40, 30), lambda: torch.randn(40, 50).t()),
    "linear_strided": (lambda: nn.Linear(4, 3), lambda: torch.randn(5, 2, 4).transpose(0, 1)),
    "linear_no_rows": (lambda: nn.Linear(4, 3), lambda: torch.randn(0, 4)),
    "linear_no_tokens": (lambda: nn.Linear(4, 3), lambda: torch.randn(2, 0, 4)),
    "linear_doubles": (lambda: nn.Linear(4, 3).double(), lambda: torch.randn(5, 4).double()),
    "linear_bf16": (lambda: nn.Linear(4, 3).bfloat16(), lambda: torch.randn(5, 4).bfloat16()),
    "conv1d": (lambda: nn.Conv1d(2, 4, 3), lambda: torch.randn(3, 2, 9)),
    "conv_same": (lambda: nn.Conv2d(2, 4, 3, padding="same"), lambda: torch.randn(3, 2, 7, 7)),
    "conv_circular": (
        lambda: nn.Conv2d(2, 4, 3, stride=2, padding=1, padding_mode="circular", bias=False),
        lambda: torch.randn(3, 2, 7, 7),
    ),
    "conv_groups": (lambda: nn.Conv2d(4, 4, 3, groups=2, dilation=2), lambda: torch.randn(4, 9, 9)),
    "conv_no_images": (lambda: nn.Conv2d(2, 4, 3), lambda: torch.randn(0, 2, 7, 7)),
    "embedding": (lambda: nn.Embedding(9, 4, padding_idx=2), lambda: torch.randint(9, (3, 8))),
    "embedding_by_count": (
        lambda: nn.Embedding(9, 4, scale_grad_by_freq=True), lambda: torch.randint(9, (3, 8)),
    ),
    "embedding_no_ids": (lambda: nn.Embedding(9, 4), lambda: torch.randint(9, (0, 8))),
}  # fmt: skip


@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_and_inputs_of_every_shape(name: str, needs_gradient: bool) -> None:
    make_layer, make_input = LAYERS[name]
    layer, given = make_layer(), make_input()
    twin = copy.deepcopy(layer)
    needs_gradient &= given.is_floating_point()
    x, y = (given.detach().requires_grad_(needs_gradient) for _ in range(2))
    gradient = torch.randn_like(twin(given))
    twin(y).backward(gradient)
    deferral, store = defer_weight_gradients([layer]), WeightStore()
    with deferral.collecting(store):
        output = layer(x)
    output.backward(gradient)
    assert store.num_deferred == 1
    assert all(grad is None for grad in gradients(layer).values())
    store.run()
    assert_same(gradients(layer), gradients(twin))
    assert_same({"input": x.grad}, {"input": y.grad})


@pytest.mark.parametrize("frozen", [("weight",), ("bias",), ("weight", "bias")])
@pytest.mark.parametrize("make_layer", [lambda: nn.Linear(4, 3), lambda: nn.Conv2d(4, 3, 1)])
def test_frozen_parameters(frozen: Sequence[str], make_layer: Callable[[], nn.Module]) -> None:
    layer = make_layer()
    for name in frozen:
        layer.get_parameter(name).requires_grad_(False)
    twin = copy.deepcopy(layer)
    x = torch.randn(4, 4, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(twin(x).sum(), x, retain_graph=True)
    twin(x.detach().requires_grad_()).sum().backward()
    deferral, store = defer_weight_gradients([layer]), WeightStore()
    with deferral.collecting(store):
        layer(x).sum().backward()
    assert store.num_deferred == (len(frozen) < 2)
    assert len(deferral.parameters()) == 2 - len(frozen)
    store.run()
    assert x.grad is not None and torch.equal(x.grad, expected)
    assert_same(gradients(layer), gradients(twin))


def test_gradients_that_are_views_of_a_flat_buffer_stay_so() -> None:
    model = MODELS["mlp"]()
    twin, inputs = copy.deepcopy(model), microbatches("mlp", torch.float32)
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    views = flat.split([p.numel() for p in model.parameters()])
    for p, view in zip(model.parameters(), views, strict=True):
        p.grad = view.view_as(p)
    plain(twin, inputs)
    split(model, inputs, W_IN_ORDER["at_the_end"])
    expected = torch.cat([p.grad.flatten() for p in twin.parameters() if p.grad is not None])
    assert torch.equal(flat, expected)


def test_hooks_of_parameters_fire_in_w() -> None:
    layer, fired = nn.Linear(4, 3), list[str]()
    layer.weight.register_post_accumulate_grad_hook(lambda p: fired.append("weight"))
    deferral, store = defer_weight_gradients([layer]), WeightStore()
    with deferral.collecting(store):
        layer(torch.randn(5, 4)).sum().backward()
    assert fired == []
    store.run()
    assert fired == ["weight"]


def test_one_layer_called_twice_and_a_weight_shared_by_two() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.one(F.gelu(self.two(F.gelu(self.one(x)))))
            return result

    model = Twice()
    twin, inputs = copy.deepcopy(model), [torch.randn(5, 4) for _ in range(NUM_MICROBATCHES)]
    plain(twin, inputs)
    split(model, inputs, W_IN_ORDER["zero_bubble"])
    assert_same(gradients(model), gradients(twin))


def test_a_weight_also_used_directly_gets_one_part_in_b_and_one_in_w() -> None:
    layer = nn.Linear(4, 4).double()
    twin, x = copy.deepcopy(layer), torch.randn(5, 4).double()
    twin(x @ twin.weight).square().sum().backward()
    deferral, store = defer_weight_gradients([layer]), WeightStore()
    with deferral.collecting(store):
        layer(x @ layer.weight).square().sum().backward()
    assert layer.weight.grad is not None and not torch.equal(layer.weight.grad, twin.weight.grad)
    store.run()
    torch.testing.assert_close(layer.weight.grad, twin.weight.grad, rtol=1e-12, atol=0)


def test_without_a_store_or_without_gradients_layers_are_plain() -> None:
    layer, x = nn.Linear(4, 3), torch.randn(5, 4, requires_grad=True)
    expected, name = layer(x), layer(x).grad_fn.name()
    deferral, store = defer_weight_gradients([layer]), WeightStore()
    assert layer(x).grad_fn.name() == name == "AddmmBackward0"
    with deferral.collecting(store):
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                assert torch.equal(layer(x), expected) and layer(x).grad_fn is None
        layer.eval()
        layer(x).sum().backward()
    assert store.num_deferred == 1
    layer(x).sum().backward()
    assert store.num_deferred == 1 and layer.weight.grad is not None


def test_names_hooks_and_copies_survive_and_closing_restores() -> None:
    model, x, seen = MODELS["mlp"](), torch.randn(3, 6), list[str]()
    names = list(model.state_dict())
    layer = model.get_submodule("layers.1.linear")
    layer.register_forward_hook(lambda *_: seen.append("forward"))
    layer.register_full_backward_hook(lambda *_: seen.append("backward"))
    deferral, store = defer_weight_gradients([model, model]), WeightStore()
    assert list(model.state_dict()) == names == [n for n, _ in model.named_parameters()]
    with deferral.collecting(store):
        model(x).sum().backward()
    assert seen == ["forward", "backward"] and store.num_deferred == 3
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    assert not other(x).any() and model(x).any()
    deferral.close()
    deferral.close()
    assert not any("forward" in module.__dict__ for module in model.modules())
    with deferral.collecting(late := WeightStore()):
        model(x).sum().backward()
    assert late.num_deferred == 0
    store.run()  # what was in flight still finishes


def test_layers_that_are_not_what_they_seem_are_left_alone() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    class Renamed(nn.Linear):
        pass

    replaced = nn.Linear(4, 4, bias=False)
    replaced.forward = lambda input: input * replaced.weight  # type: ignore[method-assign]
    computed = parametrizations.weight_norm(nn.Linear(4, 4))
    sparse = nn.Embedding(4, 4, sparse=True)
    alone = [Doubled(4, 4), replaced, computed, sparse, nn.LayerNorm(4)]
    renamed = Renamed(4, 4)
    deferral, store = defer_weight_gradients([*alone, renamed]), WeightStore()
    assert deferral.layers == (renamed,)
    with deferral.collecting(store):
        for module in alone:
            x = torch.arange(4) if module is sparse else torch.eye(4)
            module(x).sum().backward()
            assert all(
                p.grad is not None for p in (module.weight, *module.parameters()) if p.is_leaf
            )


def test_weights_that_become_computed_later_are_left_alone() -> None:
    layer, twin = nn.Linear(4, 3), nn.Linear(4, 3)
    deferral, store = defer_weight_gradients([layer]), WeightStore()
    half = {name: p / 2 for name, p in twin.named_parameters()}
    with deferral.collecting(store):
        output = torch.func.functional_call(layer, half, torch.randn(5, 4))
    output.sum().backward()
    assert store.num_deferred == 0 and twin.weight.grad is not None and layer.weight.grad is None


def test_outputs_may_be_changed_in_place_and_weights_may_not() -> None:
    for shape in ((5, 4), (2, 5, 4)):
        layer, x = nn.Linear(4, 3), torch.randn(shape, requires_grad=True)
        twin, store = copy.deepcopy(layer), WeightStore()
        F.relu(twin(x)).sum().backward()
        deferral = defer_weight_gradients([layer])
        with deferral.collecting(store):
            F.relu_(layer(x)).sum().backward()
            stale = layer(x)
        store.run()
        assert_same(gradients(layer), gradients(twin))
        with torch.no_grad():
            layer.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            stale.sum().backward()


class NoGradient(torch.autograd.Function):
    """Pass a tensor on, and no gradient back."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> None:
        return None


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_an_output_without_a_gradient_defers_nothing(needs_gradient: bool) -> None:
    layer, x = nn.Linear(4, 3), torch.randn(5, 4, requires_grad=needs_gradient)
    deferral, store = defer_weight_gradients([layer]), WeightStore()
    with deferral.collecting(store):
        NoGradient.apply(layer(x)).sum().backward()
    store.run()
    assert layer.weight.grad is None and x.grad is None


def test_a_derivative_of_a_derivative_is_refused() -> None:
    layer, x = nn.Linear(4, 3), torch.randn(5, 4, requires_grad=True)
    deferral, store = defer_weight_gradients([layer]), WeightStore()
    with deferral.collecting(store):
        loss = layer(x).square().sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_a_second_backward_is_refused() -> None:
    layer = nn.Linear(4, 3)
    deferral, store = defer_weight_gradients([layer]), WeightStore()
    with deferral.collecting(store):
        loss = layer(torch.randn(5, 4)).square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(GanglionError, match="second backward"):
        loss.backward()
    assert store.num_deferred == 1


def test_an_output_is_released_after_b_and_an_input_after_w() -> None:
    layer, store = nn.Linear(4, 3), WeightStore()
    deferral = defer_weight_gradients([layer])
    x = torch.randn(5, 4)
    with deferral.collecting(store):
        y = layer(x)
    loss = y.sum()
    loss.backward()
    memory_of_x, memory_of_y = (StorageWeakRef(t.untyped_storage()) for t in (x, y))
    del x, y
    assert memory_of_y.expired() and not memory_of_x.expired()
    store.run()
    assert memory_of_x.expired() and loss.grad_fn is not None


@pytest.mark.parametrize("layer", [nn.Linear(4, 3), nn.Conv1d(5, 3, 1)])
def test_w_keeps_only_the_narrow_input_under_autocast(layer: nn.Module) -> None:
    deferral, store = defer_weight_gradients([layer]), WeightStore()
    x = torch.randn(5, 4, requires_grad=True) * 2
    with torch.autocast("cpu", torch.bfloat16), deferral.collecting(store):
        layer(x).sum().backward()
    memory = StorageWeakRef(x.untyped_storage())
    del x
    assert memory.expired() and store.num_deferred == 1
    store.run()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())
