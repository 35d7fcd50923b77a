"""One block under fake tensors: shapes and storages without memory, forward and backward.

    forward    layers (matmuls and lookups of parameters), what autograd saves, flop
    backward   flop for inputs and for weights, the bytes that are there at its peak

Bytes are those of torch's own attention kernel for this machine's processor. Flop are counted with
attention as plain products: a kernel that computes the scores again does not compute more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from ganglion.decide.shapes import FORMATS, Format
from ganglion.errors import ConfigError
from ganglion.execute.models import LossFn


@dataclass(frozen=True, slots=True)
class Outline:
    """The shape and dtype of a tensor, its first dim the samples."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        """Return a tensor like it."""
        return torch.empty(self.shape, dtype=self.dtype, device="cpu")


@dataclass(frozen=True, slots=True)
class LayerUse:
    """A product or lookup of a parameter: its name, rows before and behind, how it lies."""

    parameter: str
    input_rows: int
    output_rows: int
    is_table: bool = False
    is_transposed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopRun:
    """The flop of one microbatch, and the uses of parameters in it."""

    forward: int
    input: int
    weight: int
    layers: tuple[LayerUse, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRun:
    """The bytes of one microbatch, as `BlockActivations` has them, and the output."""

    input_bytes: int
    output_bytes: int
    kept_bytes: int
    scratch_bytes: int
    keeps_input: bool
    keeps_output: bool
    output: Outline


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeBlock:
    """A block and how it is run. `loss_fn` is that of the last block, `is_first` of data."""

    name: str
    block: nn.Module
    mode: FakeTensorMode
    is_first: bool
    loss_fn: LossFn | None
    target_of: Callable[[Tensor], Tensor]

    def operations(self, outline: Outline) -> tuple[Hashable, ...]:
        """Run a forward alone, and return its operations with the shapes that they work on.

        Blocks of one class with equal operations on equal parameters are described alike.
        """
        with self.mode:
            tensors = self._tensors(FORMATS[0])
            log = _Operations()
            with log:
                self._result(self._input(outline), tensors)
        return tuple(log.done)

    def run_bytes(self, outline: Outline, form: Format) -> ByteRun:
        """Run a microbatch in one format, and measure its memory."""
        with self.mode:
            x, tensors = self._input(outline), self._tensors(form)
            for parameter in tensors.values():
                if parameter.requires_grad:
                    _drop_gradients_of(parameter)
            with _autocast(form):
                self._result(x, tensors)  # fills caches, which no microbatch makes for itself
            # Autocast keeps its copies of weights until its context ends.
            with _autocast(form), _Made() as made, _Saved() as saved:
                output, result = self._result(x, tensors)
            ends = _key(x), _key(output)
            kept = [size for key, size in saved.sizes.items() if made.has(key) and key not in ends]
            return ByteRun(
                input_bytes=x.nbytes,
                output_bytes=output.nbytes,
                kept_bytes=sum(kept),
                scratch_bytes=_backward_peak(result),
                keeps_input=ends[0] in saved.sizes,
                keeps_output=ends[1] in saved.sizes and ends[0] != ends[1],
                output=Outline(tuple(output.shape), output.dtype),
            )

    def run_flops(self, outline: Outline, form: Format) -> FlopRun:
        """Run a microbatch, and count its operations.

        Those of the weights' gradients are what backward takes beyond the gradient of the input.
        """
        with self.mode, sdpa_kernel([SDPBackend.MATH]):
            tensors = self._tensors(form)
            x = self._input(outline)
            if x.is_floating_point():
                x.requires_grad_()
            with flop_counter() as forward, _LayerLog(tensors) as log:
                _, result = self._result(x, tensors)
            trained = [t for t in tensors.values() if t.requires_grad]
            inputs = [x] * x.requires_grad
            whole = _backward_flops(result, [*trained, *inputs])
            of_weights = _backward_flops(result, trained)
            if inputs:
                weight = whole - _backward_flops(result, inputs)
            else:  # ids have no gradient: take the products of the layers
                weight = min(whole, sum(use.flops for use in log.uses))
        taken = of_weights if self.is_first else whole
        return FlopRun(
            forward=int(forward.get_total_flops()),
            input=taken - weight,
            weight=weight,
            layers=tuple(use.record for use in log.uses),
        )

    def _input(self, outline: Outline) -> Tensor:
        x = outline.tensor()
        return x.requires_grad_() if x.is_floating_point() and not self.is_first else x

    def _tensors(self, form: Format) -> dict[str, Tensor]:
        return fake_tensors(self.block, form)

    def _result(self, x: Tensor, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the output, and what backward begins with: the output or the loss."""
        try:
            output = functional_call(self.block, dict(tensors), (x,))
            if not isinstance(output, Tensor):
                raise ConfigError(f"it returns {type(output).__name__}, not one tensor")
            if self.loss_fn is None:
                return output, output
            return output, self.loss_fn(output, self.target_of(output))
        except Exception as error:  # code of the user's own may fail in any way
            raise ConfigError(
                f"block {self.name!r} ({type(self.block).__name__}) does not run on an input of "
                f"shape {list(x.shape)} and {str(x.dtype).removeprefix('torch.')} without data: "
                f"{' '.join(str(error).split())[:300]}; give --seq or --input as the model wants "
                f"it, or blocks that take and return one tensor and read no values"
            ) from error


def fake_tensors(block: nn.Module, form: Format) -> dict[str, Tensor]:
    """Return parameters and buffers without memory; parameters in the format's weight dtype."""
    wide = form.weight_bytes == torch.float32.itemsize
    tensors: dict[str, Tensor] = {}
    for name, parameter in block.named_parameters():
        dtype = parameter.dtype if wide or not parameter.is_floating_point() else torch.bfloat16
        tensor = torch.empty(parameter.shape, dtype=dtype, device="cpu")
        tensors[name] = tensor.requires_grad_(parameter.requires_grad)
    for name, buffer in block.named_buffers():
        tensors[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
    return tensors


def _autocast(form: Format) -> AbstractContextManager[object]:
    return torch.autocast("cpu", torch.bfloat16) if form.is_autocast else nullcontext()


def _drop_gradients_of(parameter: Tensor) -> None:
    """Drop gradients when they are made: training adds them to a bucket at once."""

    def drop(trained: Tensor) -> None:
        trained.grad = None

    parameter.register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]


def flop_counter() -> FlopCounterMode:
    """Return a counter of operations, with convolutions in groups counted as they are computed."""
    return FlopCounterMode(
        display=False, custom_mapping={torch.ops.aten.convolution_backward: _conv_backward_flops}
    )


def _conv_backward_flops(  # type: ignore[no-untyped-def]
    grad_shape, x_shape, weight_shape, _bias, _stride, _padding, _dilation, transposed, *rest, **_
) -> int:
    """Return two flop for each weight and position, for each gradient that is asked for.

    torch's own count takes the weight of a convolution in groups for that of a full one.
    """
    _output_padding, _groups, wanted = rest[:3]
    positions = x_shape if transposed else grad_shape
    one: int = 2 * grad_shape[0] * math.prod(positions[2:]) * math.prod(weight_shape)
    return one * (bool(wanted[0]) + bool(wanted[1]))


def _backward_flops(result: Tensor, inputs: Sequence[Tensor]) -> int:
    if not inputs or not result.requires_grad:
        return 0
    with flop_counter() as counter:
        torch.autograd.grad(
            result, inputs, torch.empty_like(result), retain_graph=True, allow_unused=True
        )
    return int(counter.get_total_flops())


def _backward_peak(result: Tensor) -> int:
    """Return the most bytes that a backward makes and holds at once."""
    if not result.requires_grad:
        return 0
    with _Made(watches_peak=True) as made:
        torch.autograd.backward(result, torch.ones_like(result))
    peak_bytes: int = made.peak_bytes
    return peak_bytes


def _key(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The storages that operations make, and the most bytes that live at once."""

    def __init__(self, *, watches_peak: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._watches_peak = watches_peak
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {_key(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and _key(tensor) not in known:
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._storages[_key(tensor)] = (reference, storage.nbytes())
        if self._watches_peak:
            self._sweep()
        return output

    def has(self, key: int) -> bool:
        """Return whether a storage, which must be alive, was made here."""
        return key in self._storages

    def _sweep(self) -> None:
        gone = [
            key
            for key, (reference, _) in self._storages.items()
            if reference.expired()  # type: ignore[no-untyped-call]
        ]
        for key in gone:
            del self._storages[key]
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._storages.values()))


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operations of a forward: their names, the shapes of tensors, and other arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.done: list[Hashable] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = tree_leaves((args, kwargs))
        self.done.append((str(func), *map(_outlined, values)))
        return func(*args, **(kwargs or {}))


def _outlined(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return Outline(tuple(value.shape), value.dtype)
    return repr(value)


class _Saved:
    """The storages that autograd saves inside a `with` block."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> _Saved:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: Tensor) -> Tensor:
        self.sizes[_key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor


@dataclass(frozen=True, slots=True)
class _Use:
    record: LayerUse
    flops: int


class _LayerLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The products and lookups in which an operand is a parameter."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {_key(tensor): name for name, tensor in tensors.items()}
        self._shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.uses: list[_Use] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        found = self._use(func.overloadpacket, args, output)
        if found is not None:
            self.uses.append(found)
        return output

    def _use(self, packet: Any, args: Any, output: Any) -> _Use | None:
        aten = torch.ops.aten
        if packet in (aten.mm, aten.addmm):
            left, right = args[-2:]
            return self._product(left, right)
        if packet is aten.embedding and _key(args[0]) in self._names:
            rows = args[1].numel()
            return _Use(LayerUse(self._names[_key(args[0])], rows, rows, is_table=True), 0)
        if packet is aten.convolution and _key(args[1]) in self._names:
            image, weight = args[:2]
            before, after = _pixels(image), _pixels(output)
            is_transposed = bool(args[6])
            flops = 2 * (before if is_transposed else after) * weight.numel()
            return _Use(LayerUse(self._names[_key(weight)], before, after), flops)
        return None

    def _product(self, left: Tensor, right: Tensor) -> _Use | None:
        name = self._names.get(_key(right))
        if name is None or len(self._shapes[name]) != 2:
            return None
        rows = left.shape[0]
        is_transposed = tuple(right.shape) == self._shapes[name] and right.is_contiguous()
        record = LayerUse(name, rows, rows, is_transposed=is_transposed)
        return _Use(record, 2 * rows * right.numel())


def _pixels(image: Tensor) -> int:
    """Return the rows of an image tensor (samples, channels, ...)."""
    return image.numel() // image.shape[1]
