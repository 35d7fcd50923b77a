"""A description of any model, from running it under fake tensors: no weights, no data.

Every block runs with microbatches of two sizes, in each format: what grows is of a sample, the
rest is fixed. A measured description names no sizes that x and y could split.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from ganglion.decide.shapes import (
    FORMATS,
    MATRIX,
    TABLE,
    VECTOR,
    Amount,
    DescribedActivations,
    DescribedBlock,
    DescribedLayer,
    DescribedModel,
    Flops,
    Format,
    Parameter,
    each,
    fixed,
)
from ganglion.errors import ConfigError
from ganglion.execute.measure.fake_run import (
    ByteRun,
    FakeBlock,
    FlopRun,
    LayerUse,
    Outline,
    fake_tensors,
    flop_counter,
)
from ganglion.execute.models import (
    FAMILIES,
    Blocks,
    LossFn,
    cross_entropy,
    hugging_face_blocks,
    named_blocks,
)

_SIZES = (2, 3)  # microbatches; a single sample may be treated as a special case by torch
_NOT_IN_MUON = ("embedding.", "head.")
_TARGET_BYTES = 8  # a class number
_WHOLE = "or pass a list of modules that run one after another, each taking and returning a tensor"

TargetOf = Callable[[Tensor], Tensor]
_Outlines = Mapping[tuple[int, Format], Outline]  # of the inputs of a block
_Found = tuple[DescribedBlock, _Outlines]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOutline:
    """One sample without a batch dim: its shape and dtype; token ids are int64."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.int64

    @property
    def tokens(self) -> int:
        """Tokens of a sample, 1 where there are none."""
        return self.shape[0] if self.dtype == torch.int64 and self.shape else 1

    def of(self, size: int, form: Format) -> Outline:
        """Return a microbatch of so many samples; numbers are in the format of the weights."""
        is_half = self.dtype.is_floating_point and form.weight_bytes == torch.bfloat16.itemsize
        return Outline((size, *self.shape), torch.bfloat16 if is_half else self.dtype)


def classes_of(output: Tensor) -> Tensor:
    """Return a target of class numbers for an output (..., classes)."""
    return torch.empty(output.shape[:-1], dtype=torch.int64, device=output.device)


def describe_model(
    model: Blocks,
    sample: SampleOutline,
    *,
    name: str = "model",
    loss_fn: LossFn = cross_entropy,
    target_of: TargetOf = classes_of,
) -> DescribedModel:
    """Return the description of a model: blocks in order, or a module that can be cut into some.

    Nothing is computed and no weight is allocated; the model may be on the meta device. `target_of`
    returns a target like those of the loss, given the output.
    """
    with _silent():
        return _described(model, sample, name, loss_fn, target_of)


@contextmanager
def _silent() -> Iterator[None]:
    """Keep torch from printing the traceback of an operation that fails, which is raised anyway."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _described(
    model: Blocks, sample: SampleOutline, name: str, loss_fn: LossFn, target_of: TargetOf
) -> DescribedModel:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    blocks = cut_model(model)
    _check_shared(blocks)
    outlines: _Outlines = {(n, form): sample.of(n, form) for n in _SIZES for form in FORMATS}
    kinds = _Kinds(next(iter(blocks.values())))
    described: list[DescribedBlock] = []
    for place, (block_name, block) in enumerate(blocks.items()):
        fake = FakeBlock(
            name=block_name,
            block=block,
            mode=mode,
            is_first=place == 0,
            loss_fn=loss_fn if place == len(blocks) - 1 else None,
            target_of=target_of,
        )
        found, outlines = kinds.describe(fake, outlines)
        described.append(found)
    if isinstance(model, nn.Module) and _is_cut_here(model):
        _check_whole(model, sample, described, mode)
    return DescribedModel(
        name=name,
        sample_bytes=_sample_bytes(sample, outlines),
        blocks=tuple(described),
        tokens=sample.tokens,
    )


def _sample_bytes(sample: SampleOutline, outlines: Mapping[tuple[int, Format], Outline]) -> int:
    """Return the bytes of a sample and of its target, a class number for each row of outputs."""
    size = _SIZES[0]
    output = outlines[size, FORMATS[0]].shape
    given = sample.of(size, FORMATS[0])
    with FakeTensorMode():
        num_rows = torch.empty(output[:-1]).numel()
        return (given.tensor().nbytes + num_rows * _TARGET_BYTES) // size


# --- blocks --------------------------------------------------------------------------------------


def cut_model(model: Blocks) -> dict[str, nn.Module]:
    """Return the blocks of a model; one without any is cut at the children of its longest list.

    Modules beside that list run before or behind it, as they are declared.
    """
    if isinstance(model, nn.Module) and _is_cut_here(model):
        return _children(model)
    if isinstance(model, nn.Module) and _is_hugging_face(model):
        return hugging_face_blocks(model)
    return named_blocks(model)


def _children(model: nn.Module) -> dict[str, nn.Module]:
    """Return the children of a module in order, with those of the longest list in its place."""
    children = dict(model.named_children())
    lists = {n: c for n, c in children.items() if isinstance(c, nn.ModuleList | nn.Sequential)}
    if not lists:
        raise ConfigError(
            f"a {type(model).__name__} has no list of modules to cut it at: give the class a "
            f"`blocks()` method, {_WHOLE}"
        )
    longest = max(lists, key=lambda one: len(lists[one]))
    blocks: dict[str, nn.Module] = {}
    for name, child in children.items():
        if name == longest:
            blocks.update({f"{name}.{place}": part for place, part in enumerate(lists[name])})
        else:
            blocks[name] = child
    return blocks


def _is_cut_here(model: nn.Module) -> bool:
    """Return whether a module neither lists its blocks nor has known ones."""
    method = getattr(model, "blocks", None)
    lists_them = callable(method) and not isinstance(method, nn.Module)
    return not (lists_them or isinstance(model, nn.Sequential) or _is_hugging_face(model))


def _is_hugging_face(model: nn.Module) -> bool:
    return getattr(getattr(model, "config", None), "model_type", None) in FAMILIES


def _check_whole(
    model: nn.Module, sample: SampleOutline, blocks: list[DescribedBlock], mode: FakeTensorMode
) -> None:
    """Refuse a cut whose blocks, one after another, do not do what the whole model does."""
    size = _SIZES[0]
    with mode, sdpa_kernel([SDPBackend.MATH]), flop_counter() as counter:
        tensors = fake_tensors(model, FORMATS[0])
        functional_call(model, tensors, (sample.of(size, FORMATS[0]).tensor(),))
    whole = int(counter.get_total_flops())
    cut = sum(block.cost(size).forward_flops for block in blocks)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    num_cut = sum(block.num_parameters - block.tied_parameters for block in blocks)
    if (whole, num_parameters) != (cut, num_cut):
        raise ConfigError(
            f"a {type(model).__name__} takes {whole} flop with {num_parameters} parameters, but "
            f"its {len(blocks)} parts one after another take {cut:.0f} with {num_cut}: give the "
            f"class a `blocks()` method, {_WHOLE}"
        )


def _check_shared(blocks: Mapping[str, nn.Module]) -> None:
    """Refuse parameters that two blocks share, unless the first block is one of them."""
    owners: dict[int, tuple[int, str]] = {}
    for place, (name, block) in enumerate(blocks.items()):
        for parameter in block.parameters():
            first, owner = owners.setdefault(id(parameter), (place, name))
            if 0 < first < place:
                raise ConfigError(
                    f"blocks {owner!r} and {name!r} share a parameter of shape "
                    f"{list(parameter.shape)}: a description can say so of the first block alone; "
                    f"join the two in one block"
                )


def _kind_name(block: nn.Module, others: Iterable[DescribedBlock]) -> str:
    """Return a name for a new kind of block, from its class."""
    base = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(block).__name__).lower()
    taken = {other.name for other in others}
    names = (base, *(f"{base}.{number}" for number in range(2, len(taken) + 3)))
    return next(name for name in names if name not in taken)


# --- one block -----------------------------------------------------------------------------------


class _Kinds:
    """The kinds of blocks of a model: blocks that do the same are measured once."""

    def __init__(self, first: nn.Module) -> None:
        self._first_ids = {id(parameter) for parameter in first.parameters()}
        self._by_work: dict[Hashable, _Found] = {}
        self._named: dict[DescribedBlock, DescribedBlock] = {}

    def describe(self, fake: FakeBlock, outlines: _Outlines) -> _Found:
        """Return the description of a block, and the outlines of its outputs."""
        tied = set() if fake.is_first else self._first_ids
        work = _work(fake, outlines, tied)
        if work not in self._by_work:
            found, outputs = _describe_block(fake, outlines, tied)
            if found not in self._named:
                name = _kind_name(fake.block, self._named.values())
                self._named[found] = replace(found, name=name)
            self._by_work[work] = self._named[found], outputs
        return self._by_work[work]


def _work(fake: FakeBlock, outlines: _Outlines, tied: set[int]) -> Hashable:
    """Return what is equal of blocks whose descriptions are equal."""
    parameters = tuple(
        (name, tuple(p.shape), p.dtype, p.requires_grad, id(p) in tied)
        for name, p in fake.block.named_parameters()
    )
    return (
        type(fake.block),
        fake.is_first,
        fake.loss_fn is None,
        f"{fake.name}.".startswith(_NOT_IN_MUON),
        parameters,
        tuple(outlines.values()),
        fake.operations(outlines[_SIZES[0], FORMATS[0]]),
    )


def _describe_block(fake: FakeBlock, outlines: _Outlines, tied: set[int]) -> _Found:
    """Return a block without a name, and the outlines of its outputs."""
    flops = [fake.run_flops(outlines[size, FORMATS[0]], FORMATS[0]) for size in _SIZES]
    held = {key: fake.run_bytes(outline, key[1]) for key, outline in outlines.items()}
    uses = _uses(fake, flops)
    parameters = {
        name: _parameter(fake.name, name, parameter, uses.get(name), id(parameter) in tied)
        for name, parameter in fake.block.named_parameters()
    }
    one, rest = _flops(fake, flops)
    weights = [p.numel() for name, p in fake.block.named_parameters() if name in uses]
    places = list(parameters)
    output = held[_SIZES[0], FORMATS[0]].output
    block = DescribedBlock(
        name="",
        flops=one,
        fixed_flops=rest,
        output_elements=_elements(output),
        parameters=tuple(parameters.values()),
        layers=tuple(
            DescribedLayer(
                parameter=places.index(use.parameter),
                input_rows=use.input_rows,
                output_rows=use.output_rows,
            )
            for use in _slopes(fake, flops)
            if parameters[use.parameter].role != VECTOR
        ),
        activations=tuple(
            _activations([held[size, form] for size in _SIZES], weights, form) for form in FORMATS
        ),
    )
    return block, {key: run.output for key, run in held.items()}


def _elements(output: Outline) -> int:
    with FakeTensorMode():
        return output.tensor().numel() // output.shape[0]


def _slopes(fake: FakeBlock, runs: list[FlopRun]) -> list[LayerUse]:
    """Return the layers with the rows of one sample."""
    small, large = (run.layers for run in runs)
    if [use.parameter for use in small] != [use.parameter for use in large]:
        raise ConfigError(
            f"block {fake.name!r} uses other layers for {_SIZES[1]} samples than for {_SIZES[0]}: "
            f"it cannot be described"
        )
    return [
        replace(
            one,
            input_rows=two.input_rows - one.input_rows,
            output_rows=two.output_rows - one.output_rows,
        )
        for one, two in zip(small, large, strict=True)
    ]


def _uses(fake: FakeBlock, runs: list[FlopRun]) -> dict[str, LayerUse]:
    return {use.parameter: use for use in _slopes(fake, runs)}


def _parameter(
    block_name: str, name: str, parameter: nn.Parameter, use: LayerUse | None, is_tied: bool
) -> Parameter:
    """Return the record of a parameter; a matrix lies (outputs, inputs)."""
    shape = tuple(parameter.shape)
    if use is not None and use.is_transposed:
        shape = shape[::-1]
    role = VECTOR if use is None or len(shape) < 2 else TABLE if use.is_table else MATRIX
    return Parameter(
        shape=shape,
        axes=(None,) * len(shape),
        role=role,
        is_tied=is_tied,
        in_muon=len(shape) == 2 and not f"{block_name}.{name}".startswith(_NOT_IN_MUON),
    )


def _flops(fake: FakeBlock, runs: list[FlopRun]) -> tuple[Flops, Flops]:
    """Return the flop of a sample, and those of a microbatch of any size."""
    lines = {
        name: _exact_line(getattr(runs[0], name), getattr(runs[1], name))
        for name in ("forward", "input", "weight")
    }
    for name, (each_sample, rest) in lines.items():
        if each_sample < 0 or rest < 0:
            raise ConfigError(
                f"block {fake.name!r} takes {getattr(runs[0], name)} flop ({name}) for "
                f"{_SIZES[0]} samples and {getattr(runs[1], name)} for {_SIZES[1]}, which is not "
                f"in proportion: it cannot be described"
            )
    return _part(lines, 0), _part(lines, 1)


def _part(lines: Mapping[str, tuple[int, int]], place: int) -> Flops:
    return Flops(**{name: line[place] for name, line in lines.items()})


def _exact_line(small: int, large: int) -> tuple[int, int]:
    """Return what a sample adds, and what is there without any."""
    return large - small, small - _SIZES[0] * (large - small)


def _amount(small: int, large: int) -> Amount:
    """Return bytes of each sample and fixed ones; peaks may grow faster than in proportion."""
    one, rest = _exact_line(small, large)
    if one < 0 or rest < 0:
        one, rest = -(-max(small, large) // _SIZES[0]), 0
    return (*each(one), *fixed(rest))


def _activations(runs: list[ByteRun], weights: list[int], form: Format) -> DescribedActivations:
    """Return the activations in one format.

    The scratch has room for one gradient of a weight; a block that is computed again makes those of
    all its weights at once.
    """
    small, large = runs
    scratch = _amount(small.scratch_bytes, large.scratch_bytes)
    others = sum(weights) - max(weights, default=0)
    return DescribedActivations(
        input=_amount(small.input_bytes, large.input_bytes),
        output=_amount(small.output_bytes, large.output_bytes),
        kept=_amount(small.kept_bytes, large.kept_bytes),
        scratch=(scratch,) if scratch else (),
        rerun=(*scratch, *fixed(others * form.weight_bytes, when="z=1")),
        gradient=fixed(sum(weights) * form.weight_bytes, when="z=1"),
        keeps_input=small.keeps_input,
        keeps_output=small.keeps_output,
    )
