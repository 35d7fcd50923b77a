"""`ganglion describe`: print a model in numbers, or write its description for predictions."""

from __future__ import annotations

import json
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from ganglion.cli.overrides import Overrides
from ganglion.decide.config import (
    Override,
    RunFile,
    expected_shape,
    load_run_file,
    own_code_key,
    read_model,
    read_toml,
)
from ganglion.decide.shapes import (
    FAMILIES,
    KNOWN_MODELS,
    DescribedModel,
    Layout,
    describe_shape,
    description_to_json,
    is_model_name,
    named_model,
)
from ganglion.decide.topology import Mesh
from ganglion.errors import ConfigError, GanglionError
from ganglion.units import format_bytes, format_count

if TYPE_CHECKING:
    from ganglion.execute.measure import SampleOutline

_HF = "hf:"
_NAME_WIDTH = 18


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeRequest:
    """The options of the command."""

    source: str | None
    arguments: Sequence[str]
    seq: int | None
    shape: str | None
    loss: str
    overrides: Overrides = ()


def describe_command(
    request: DescribeRequest, *, write: Path | None, list_names: bool, as_json: bool
) -> None:
    """Describe, write the description if asked, and print it as a table or JSON."""
    if list_names:
        _print_names(as_json=as_json)
        return
    model = _model(request)
    text = description_to_json(model)
    if write is not None:
        _write(write, text)
    if as_json or (write is None and not sys.stdout.isatty()):
        print(text, end="")
        return
    _print(model)
    if write is not None:
        print(f"description written to {write}")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--write {path} cannot be written: {error}") from error


# --- sources -------------------------------------------------------------------------------------


def _model(request: DescribeRequest) -> DescribedModel:
    source = request.source
    if source is None:
        raise ConfigError(
            "describe needs a source: a run file, a model name (--list has them), "
            "package.module:function or hf:config.json"
        )
    is_config = source.startswith(_HF)
    is_code = is_config or (":" in source and not is_model_name(source))
    if not is_code:
        _refuse_options(request, source)
    if source.endswith(".toml") and not is_config:
        return _of_run(request, Path(source))
    if request.overrides:
        raise ConfigError(
            f"--{request.overrides[0][0]} is a key of a run file, but {source} is none: leave it "
            f"out"
        )
    if is_config:
        return _of_hugging_face(request, Path(source.removeprefix(_HF)))
    return _of_function(request, source) if is_code else read_model(source)


def _refuse_options(request: DescribeRequest, source: str) -> None:
    """Refuse options that only code of the user's own reads."""
    if request.arguments:
        raise ConfigError(
            f"{request.arguments[0]!r} is an argument of package.module:function, but the source "
            f"is {source}: leave it out, or write sizes into the name, as in gpt2:seq=512"
        )
    given = {"--seq": request.seq, "--input": request.shape}
    for option, value in given.items():
        if value is not None:
            raise ConfigError(
                f"{option} {value} is for package.module:function and hf:, but the source is "
                f"{source}: write seq=N into a name, or --data.seq_len N for a run file"
            )


def _of_run(request: DescribeRequest, path: Path) -> DescribedModel:
    overrides = [Override(*pair) for pair in request.overrides]
    run = load_run_file(read_toml(path), overrides, str(path))
    if run.model.build:
        return _of_own_run(run, path)
    if own_code_key(run) is not None:
        raise ConfigError(
            f"{path}: the sizes of a built-in model follow from its data, and data.kind = "
            f'"dataset" is code of your own: set model.build, or data.kind to one of the others'
        )
    return describe_shape(expected_shape(run))


def _of_own_run(run: RunFile, path: Path) -> DescribedModel:
    """Build the user's model without memory, and run it on samples like those of the run's data."""
    import torch

    from ganglion.cli.environment import cache_folder
    from ganglion.execute.measure import SampleOutline, describe_model
    from ganglion.execute.models import build_user_blocks, loss_function
    from ganglion.execute.train import open_source

    loss_fn = loss_function(run.model.loss)
    with torch.device("meta"):
        blocks = build_user_blocks(run.model.build, run.model.args)
    target_of = _target_of(run.model.loss)
    if run.data.kind in ("text", "synthetic"):
        sample = SampleOutline(shape=(run.data.seq_len,))
    else:
        inputs, _ = open_source(run, cache_folder()).train[0]
        value = torch.as_tensor(inputs)
        sample = SampleOutline(shape=tuple(value.shape), dtype=value.dtype)
    name = f"{path.stem}: {run.model.build}"
    return describe_model(blocks, sample, name=name, loss_fn=loss_fn, target_of=target_of)


def _of_hugging_face(request: DescribeRequest, path: Path) -> DescribedModel:
    import torch

    from ganglion.execute.measure import SampleOutline, describe_model
    from ganglion.execute.models import hugging_face_blocks, read_config

    config: Any = read_config(path)
    length = request.seq or int(config.max_position_embeddings)
    with torch.device("meta"):
        blocks = hugging_face_blocks(config)
    name = f"{config.model_type} of {path}"
    return describe_model(blocks, SampleOutline(shape=(length,)), name=name)


def _of_function(request: DescribeRequest, source: str) -> DescribedModel:
    """Call a function without memory, and describe the blocks or the module that it returns."""
    import torch

    from ganglion.execute.measure import describe_model
    from ganglion.execute.models import call_function, loss_function

    sample = _sample(request, source)
    args = _arguments(request.arguments)
    try:
        with torch.device("meta"):
            model = call_function(source, args, key="SOURCE", args_key="the arguments")
    except GanglionError:
        raise
    except Exception as error:  # code of the user's own may fail in any way
        raise ConfigError(
            f"{source} cannot be built without memory: {' '.join(str(error).split())}; let it make "
            f"modules without reading values of their weights"
        ) from error
    return describe_model(
        model,  # type: ignore[arg-type]
        sample,
        name=source,
        loss_fn=loss_function(request.loss),
        target_of=_target_of(request.loss),
    )


def _target_of(loss: str) -> Any:
    """Return what makes a target for an output: class numbers, or numbers like the output."""
    import torch

    from ganglion.execute.measure import classes_of

    return torch.empty_like if loss == "mse" else classes_of


def _sample(request: DescribeRequest, source: str) -> SampleOutline:
    import torch

    from ganglion.execute.measure import SampleOutline

    if (request.seq is None) == (request.shape is None):
        raise ConfigError(
            f"{source} needs to know its samples: give --seq N for N token ids, or --input for "
            f"numbers, as in --input 3x224x224"
        )
    if request.shape is None:
        assert request.seq is not None, "one of both is given"
        return SampleOutline(shape=(request.seq,))
    sizes = request.shape.split("x")
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise ConfigError(f"--input {request.shape} is no shape: write it as in --input 3x224x224")
    return SampleOutline(shape=tuple(map(int, sizes)), dtype=torch.float32)


def _arguments(given: Sequence[str]) -> dict[str, object]:
    """Read KEY=VALUE; values as in TOML, a bare word as text."""
    found: dict[str, object] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"{text!r} is no argument: write it as KEY=VALUE, as in layers=12")
        try:
            found[key] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            found[key] = value
    return found


# --- printing ------------------------------------------------------------------------------------


def _print(model: DescribedModel) -> None:
    """Print a table with a row for every kind of block; bytes are of a sample in fp32."""
    console = Console(highlight=False)
    tokens = f", {model.tokens} tokens a sample" if model.tokens > 1 else ""
    console.print(
        f"{model.name}: {model.num_blocks} blocks, {format_count(model.num_parameters)} "
        f"parameters{tokens}; flop and bytes of one sample in fp32:",
        soft_wrap=True,
        markup=False,
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("block", no_wrap=True, max_width=_NAME_WIDTH, overflow="ellipsis")
    for column in ("blocks", "parameters", "forward", "backward", "kept", "output"):
        table.add_column(column, justify="right", no_wrap=True)
    counts = Counter(block.name for block in model.blocks)
    for row in _rows(model, counts):
        table.add_row(*row)
    console.print(table)


def _rows(model: DescribedModel, counts: Mapping[str, int]) -> list[tuple[str, ...]]:
    layout = Layout(microbatch_size=1, mesh=Mesh())
    kinds = {block.name: block for block in model.blocks}
    rows = []
    flops, kept = [0.0, 0.0], 0
    for name, block in kinds.items():
        cost, held = block.cost(1), block.activations[0].on(layout)
        backward = cost.input_flops + cost.weight_flops
        flops = [flops[0] + counts[name] * cost.forward_flops, flops[1] + counts[name] * backward]
        kept += counts[name] * held.saved_bytes
        rows.append(
            (
                name,
                str(counts[name]),
                format_count(block.num_parameters),
                format_count(cost.forward_flops),
                format_count(backward),
                format_bytes(held.saved_bytes),
                format_bytes(held.output_bytes),
            )
        )
    whole = (str(model.num_blocks), format_count(model.num_parameters))
    return [*rows, ("all", *whole, *map(format_count, flops), format_bytes(kept), "")]


def _print_names(*, as_json: bool) -> None:
    models = {name: named_model(name) for name in KNOWN_MODELS}
    if as_json:
        records = [
            {"name": n, "parameters": m.num_parameters, "tokens": m.tokens, "is": KNOWN_MODELS[n]}
            for n, m in models.items()
        ]
        print(json.dumps(records, indent=2))
        return
    width = max(map(len, models))
    for name, model in models.items():
        print(f"{name:<{width}}  {format_count(model.num_parameters):>6}  {KNOWN_MODELS[name]}")
    print("\nFamilies, with their sizes and defaults:")
    for name, family in FAMILIES.items():
        sizes = (
            f"{key}=..." if key in family.required else key if not value else f"{key}={value}"
            for key, value in family.sizes.items()
        )
        print(f"{name}:{','.join(sizes)}")
