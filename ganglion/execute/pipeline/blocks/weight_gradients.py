"""A backward in two halves: B makes the gradients of inputs at once, W those of weights later.

A layer with a large weight runs inside a node of its own. The node keeps the layer's autograd
graph to itself and walks it twice, each time only towards what is asked for:

    forward    x ---> [ x' -> linear -> y' ] ---> y        x', y' are cut off from the outside
    B          the gradient of y goes back to x'; it is also stashed, with the inner graph
    W          from every stashed gradient back to the weights, which accumulate as usual

Both walks run torch's own formulas on torch's own graph, so memory layouts and kinds of layer need
no care here, and the gradients equal those of a plain backward to the last bit as long as the
microbatches do their W in the order of their B.

Everything that is not such a layer (norms, parameters that a model uses directly) has its
gradients after B. A parameter that is used both ways gets one part in B and the other in W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ganglion.errors import GanglionError

# Layers of one tensor in, one out, whose own weights are all they learn and cost enough to defer.
DEFERRABLE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)


class WeightStore:
    """The deferred weight halves of one microbatch; B fills it, `run` is W.

    W goes through torch's accumulation: `grad` is made if it is None and added to in place
    otherwise, also where it is a view of a flat buffer; hooks of the parameters fire in W.
    """

    def __init__(self) -> None:
        self._edges: list[GradientEdge] = []
        self._gradients: list[Tensor] = []
        self._weights: dict[nn.Parameter, None] = {}
        # Where no input needs a gradient, this leaf makes autograd call the node of a layer in B.
        self.anchor = torch.empty(0, requires_grad=True)

    @property
    def num_deferred(self) -> int:
        """Calls of layers whose weight half waits for `run`."""
        return len(self._edges)

    def stash(self, edge: GradientEdge, gradient: Tensor, weights: Iterable[nn.Parameter]) -> None:
        """Remember one call: the output's place in its graph, its gradient, what it trains."""
        self._edges.append(edge)
        self._gradients.append(gradient)
        self._weights.update(dict.fromkeys(weights))

    def run(self) -> None:
        """Accumulate the gradients of everything stashed, and forget it; W may follow any B."""
        edges, gradients, weights = self._edges, self._gradients, list(self._weights)
        self._edges, self._gradients, self._weights = [], [], {}
        if edges:
            torch.autograd.backward(edges, gradients, inputs=weights)


class Deferral:
    """The layers whose backward can be split; they are plain layers while no store collects.

    One deferral may serve all stages of a rank. While it is open, pickling a whole module fails
    (a state dict does not); a deep copy of a module goes on deferring to the same stores.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = tuple(layers)
        self._store: WeightStore | None = None
        self._forwards = [_patch(layer, self._forward) for layer in self.layers]

    @contextmanager
    def collecting(self, store: WeightStore) -> Iterator[None]:
        """Let the forwards inside leave their weight halves, when B comes, in this store."""
        before, self._store = self._store, store
        try:
            yield
        finally:
            self._store = before

    def parameters(self) -> list[nn.Parameter]:
        """Return, once each, the trained parameters that may get gradients in W; no other does."""
        return list(dict.fromkeys(p for layer in self.layers for p in _trained(layer)))

    def close(self) -> None:
        """Give the layers their own forward back; microbatches in flight can still finish."""
        for layer, forward in zip(self.layers, self._forwards, strict=True):
            # Somebody may have wrapped our forward since: theirs stays, and ours is plain now.
            if layer.__dict__.get("forward") is forward:
                del layer.forward
        self._forwards, self.layers = [], ()

    def _forward(self, layer: nn.Module, input: Tensor) -> Tensor:
        store, weights = self._store, _trained(layer)
        # Weights that are no leaves (functional_call, parametrizations) have a graph of their own
        # behind them, which W would walk more than once.
        splits = store is not None and torch.is_grad_enabled() and weights
        if not splits or not all(weight.is_leaf for weight in weights):
            return _plain(layer, input)
        input = _as_under_autocast(input)
        anchor = None if input.requires_grad or store is None else store.anchor
        arguments = (input, anchor, layer, weights, store)
        output: Tensor = _SplitBackward.apply(*arguments)  # type: ignore[no-untyped-call]
        return output


def defer_weight_gradients(modules: Iterable[nn.Module]) -> Deferral:
    """Prepare the deferrable layers inside the modules, each once, for a backward in two halves.

    Left alone, with their gradients in B: subclasses with a forward of their own, layers whose
    forward was replaced, whose weights are computed (parametrizations, weight norm) or sparse.
    """
    found = dict.fromkeys(layer for module in modules for layer in module.modules())
    return Deferral([layer for layer in found if _is_deferrable(layer)])


class _SplitBackward(torch.autograd.Function):
    """One call of a layer as one node, whose backward does B and stashes what W needs."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        anchor: Tensor | None,
        layer: nn.Module,
        weights: tuple[nn.Parameter, ...],
        store: WeightStore,
    ) -> Tensor:
        weight: Any = layer.weight
        by_product = _is_one_product(layer, input)
        with torch.enable_grad():
            inner = input.detach().requires_grad_(input.requires_grad and not by_product)
            output = _plain(layer, inner)
        ctx.set_materialize_grads(False)
        # Detached, it stays the weight of this forward even if the parameter is pointed elsewhere.
        ctx.save_for_backward(weight.detach() if by_product else None)
        # Of the output only its place in the graph is kept: its memory is the caller's.
        source = inner if inner.requires_grad else None
        ctx.kept = (source, get_gradient_edge(output), weights, store)
        return output.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.kept is None:
            raise GanglionError(
                "a second backward through a forward whose weight gradients are deferred: its "
                "graph went to the WeightStore in the first; run the forward again"
            )
        (source, edge, weights, store), ctx.kept = ctx.kept, None
        if gradient is None:
            return None, None, None, None, None
        input_gradient = None
        if ctx.needs_input_grad[0]:
            input_gradient = _input_half(source, edge, gradient, *ctx.saved_tensors)
        store.stash(edge, gradient, weights)
        return input_gradient, None, None, None, None


def _as_under_autocast(input: Tensor) -> Tensor:
    """Cast as autocast would, but outside of the layer's node: W then keeps no wider copy alive."""
    device = input.device.type
    is_cast = input.is_floating_point() and input.dtype != torch.float64
    if is_cast and torch.is_autocast_enabled(device):
        return input.to(torch.get_autocast_dtype(device))
    return input


def _is_one_product(layer: nn.Module, input: Tensor) -> bool:
    """Whether the input half is gradient x weight, exactly as torch would compute it."""
    is_linear = type(layer).forward is nn.Linear.forward
    return is_linear and input.dim() > 1 and input.is_contiguous()


def _input_half(
    source: Tensor | None, edge: GradientEdge, gradient: Tensor, weight: Tensor | None
) -> Tensor:
    if source is not None:
        (input_gradient,) = torch.autograd.grad(edge, source, gradient, retain_graph=True)
        return input_gradient
    # A walk of the engine costs more than the product of a small layer.
    assert weight is not None
    product = gradient.flatten(0, -2).mm(weight.to(gradient.dtype))
    return product.view(*gradient.shape[:-1], weight.shape[1])


def _patch(layer: nn.Module, forward: Callable[[nn.Module, Tensor], Tensor]) -> MethodType:
    """Put a forward on the layer itself, and return it."""

    def deferring_forward(layer: nn.Module, input: Tensor) -> Tensor:
        return forward(layer, input)

    # A method, not a closure over the layer: a deep copy binds it to the copied layer.
    method = MethodType(deferring_forward, layer)
    layer.forward = method
    return method


def _plain(layer: nn.Module, input: Tensor) -> Tensor:
    output: Tensor = type(layer).forward(layer, input)
    return output


def _trained(layer: nn.Module) -> tuple[nn.Parameter, ...]:
    weights: tuple[Any, ...] = (layer.weight, getattr(layer, "bias", None))
    return tuple(weight for weight in weights if weight is not None and weight.requires_grad)


def _is_deferrable(layer: nn.Module) -> bool:
    """Whether the layer computes what its base class does, from its own leaf weights."""
    own_forward = any(type(layer).forward is base.forward for base in DEFERRABLE)
    if not own_forward or "forward" in layer.__dict__ or getattr(layer, "sparse", False):
        return False
    names = {name for name in ("weight", "bias") if getattr(layer, name, None) is not None}
    return names == {name for name, _ in layer.named_parameters()}
