"""Recomputation: a segment keeps its input alone, and its inside is computed again in backward.

A segment, one block or several, is one node of the outer autograd graph. Its inside has a graph
only while the backward of the node runs, so the activations of one segment are alive at a time:

    forward    x ---> [ segment, without a graph ] ---> y    x is all that is kept
    backward   x' -> segment -> y'                           the same numbers, now with a graph
               gradient of y ---> x' and parameters          handed to the outer graph

Parameters are inputs of the node, so autograd itself sums and accumulates their gradients: equal to
those without recomputation to the last bit, also of a parameter that several segments share, and
hooks of parameters fire once. The caller of backward has selected the weights of the
forward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ganglion.errors import ConfigError

Place = tuple[nn.Module, str]
Buffers = dict[Place, Tensor]
_Stamp = tuple[int, int]


class ChangingBuffers:
    """Knows which buffers of some modules a forward changes: it learns that from the first one.

    A change from training to evaluation, or back, makes it learn again.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Watch the buffers of `modules` and of all inside them."""
        inside = dict.fromkeys(part for module in modules for part in module.modules())
        self._owners = [owner for owner in inside if any(_own(owner))]
        self._changing: dict[tuple[bool, ...], frozenset[Place]] = {}

    @contextmanager
    def watched(self) -> Iterator[Buffers]:
        """Yield what will hold, after the forward inside, the buffers it changes as they were."""
        before = self._present()
        mode = tuple(owner.training for owner in self._owners)
        known = self._changing.get(mode)
        copies = _copies({p: t for p, t in before.items() if known is None or p in known})
        stamps = self._stamps()
        yield copies
        if known is None:
            known = frozenset(p for p, t in self._present().items() if not _same(copies.get(p), t))
            self._changing[mode] = known
        self._refuse_others(stamps, known)
        for place in copies.keys() - known:
            del copies[place]

    @contextmanager
    def as_before(self, copies: Mapping[Place, Tensor]) -> Iterator[None]:
        """Let the forward inside find, and change, the copies instead of the buffers."""
        present = {(owner, name): getattr(owner, name) for owner, name in copies}
        stamps = self._stamps()
        _put(copies)
        try:
            yield
            self._refuse_others(stamps, copies.keys())
        finally:
            _put(present)

    def _refuse_others(self, stamps: Mapping[Place, _Stamp], known: Collection[Place]) -> None:
        """Refuse a forward that changed more than is known to change."""
        for (owner, name), stamp in self._stamps().items():
            if (owner, name) not in known and stamps.get((owner, name)) != stamp:
                raise ConfigError(
                    f"buffer {name!r} of a {type(owner).__name__} did not change in the first "
                    f"forward but does in a later one, which then cannot be repeated: let every "
                    f'forward change it, or set memory.recompute = "none"'
                )

    def _stamps(self) -> dict[Place, _Stamp]:
        """Return a cheap sign of change: which tensor it is and how often it was set."""
        return {place: (id(tensor), tensor._version) for place, tensor in self._present().items()}

    def _present(self) -> Buffers:
        return {(owner, name): tensor for owner in self._owners for name, tensor in _own(owner)}


def _own(owner: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return owner.named_buffers(recurse=False)


def _copies(buffers: Mapping[Place, Tensor]) -> Buffers:
    """Copy every tensor once, for one may be the buffer of several modules."""
    copied = {id(tensor): tensor.clone() for tensor in buffers.values()}
    return {place: copied[id(tensor)] for place, tensor in buffers.items()}


def _same(before: Tensor | None, after: Tensor) -> bool:
    """Compare values: batch norms change theirs behind the back of version counters."""
    if before is None or before.shape != after.shape or before.dtype != after.dtype:
        return False
    same: bool = torch.equal(before, after)
    return same


def _put(buffers: Mapping[Place, Tensor]) -> None:
    for (owner, name), tensor in buffers.items():
        setattr(owner, name, tensor)


Forward = Callable[[Tensor], Tensor]  # must give the same numbers when it is called again
_KEY = "memory.recompute"
_OFF = 'set memory.recompute = "none"'


class RecomputedSegment:
    """Blocks whose inside is computed again; `name` says in messages which they are."""

    def __init__(self, name: str, modules: Iterable[nn.Module]) -> None:
        """Take blocks, and what else runs with them, such as a loss that is a module."""
        modules = tuple(modules)
        self.name = name
        inside = dict.fromkeys(p for module in modules for p in module.parameters())
        self.parameters = tuple(inside)
        self.buffers = ChangingBuffers(modules)
        self.is_checked = False  # whether its graph has been looked at for foreign parameters

    def run(self, forward: Forward, hidden: Tensor, anchors: Sequence[Tensor] = ()) -> Tensor:
        """Return what `forward` makes of `hidden`, to be computed again in backward.

        `anchors` are leaves that get no gradient but must be reached by the inner backward.
        """
        if not isinstance(hidden, Tensor):
            raise ConfigError(
                f"{self.name} gets a {type(hidden).__name__}, but {_KEY} keeps one tensor in front "
                f"of it: let blocks return one tensor, or {_OFF}"
            )
        if not hidden.requires_grad and not any(p.requires_grad for p in self.parameters):
            return forward(hidden)
        call = _Call(self, forward, tuple(anchors))
        output: Tensor = _Node.apply(call, hidden, *self.parameters)  # type: ignore[no-untyped-call]
        return output

    def check_graph(self, output: Tensor, reached: Sequence[Tensor]) -> None:
        """Refuse, once, a graph that ends in a parameter which would get no gradient."""
        if self.is_checked:
            return
        known = {id(tensor) for tensor in reached}
        for leaf in _leaves(output):
            if id(leaf) not in known:
                raise ConfigError(
                    f"{self.name} uses a parameter of shape {tuple(leaf.shape)} that is not its "
                    f"own, which would get no gradient with {_KEY}: make it an attribute of the "
                    f"block that uses it (several blocks may share it), or {_OFF}"
                )
        self.is_checked = True


@dataclass(slots=True)
class _Call:
    """One run of a segment: how to repeat it."""

    segment: RecomputedSegment
    forward: Forward
    anchors: tuple[Tensor, ...]
    copies: Buffers | None = None

    def first(self, hidden: Tensor) -> Tensor:
        number = hidden._version
        with self.segment.buffers.watched() as self.copies:
            output = self.forward(hidden.detach())
        if hidden._version != number:
            raise ConfigError(
                f"{self.segment.name} changes its input in place, but {_KEY} runs it again from "
                f"that input: use inplace=False, or {_OFF}"
            )
        if not isinstance(output, Tensor):
            raise ConfigError(
                f"{self.segment.name} returns a {type(output).__name__}, but {_KEY} keeps one "
                f"tensor behind it: let blocks return one tensor, or {_OFF}"
            )
        return output.detach()  # never an input or a parameter itself

    def second(self, hidden: Tensor, wanted: Sequence[Tensor], gradient: Tensor) -> list[Any]:
        """Run again and return the gradients of `wanted`; None for what took no part."""
        assert self.copies is not None, "the first forward ended"
        with torch.enable_grad(), self.segment.buffers.as_before(self.copies):
            output = self.forward(hidden)
        if not output.requires_grad:
            return [None] * len(wanted)
        reached = [*wanted, *self.anchors]
        self.segment.check_graph(output, [hidden, *self.segment.parameters, *self.anchors])
        found = torch.autograd.grad(output, reached, gradient, allow_unused=True)
        return list(found[: len(wanted)])


class _Node(torch.autograd.Function):
    """One run of a segment as one node; its backward runs the segment again."""

    @staticmethod
    def forward(ctx: Any, call: _Call, hidden: Tensor, *parameters: nn.Parameter) -> Tensor:
        output = call.first(hidden)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden)
        ctx.call = call
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        _, *needed = ctx.needs_input_grad
        (hidden,) = ctx.saved_tensors
        call, ctx.call = ctx.call, None
        if gradient is None:
            return (None,) * (1 + len(needed))
        inner = hidden.detach().requires_grad_(needed[0])
        inputs = (inner, *call.segment.parameters)
        wanted = [tensor for tensor, need in zip(inputs, needed, strict=True) if need]
        found = iter(call.second(inner, wanted, gradient))
        return (None, *(next(found) if need else None for need in needed))


def _leaves(output: Tensor) -> Iterator[Tensor]:
    """Yield the tensors at the ends of a graph that autograd would accumulate gradients in."""
    seen: set[Any] = set()
    ahead: list[Any] = [output.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        ahead.extend(following for following, _ in node.next_functions)
