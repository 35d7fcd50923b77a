"""Model descriptions as JSON: written to be read by people, read strictly, exact both ways.

    {"format": 1, "name": "gpt", "sample_bytes": 8192, "tokens": 512, "splits": [...],
     "order": [{"blocks": ["embedding"]}, {"blocks": ["attention", "mlp"], "times": 24}, ...],
     "blocks": {"attention": {"flops": ..., "parameters": ..., "layers": ..., "activations": ...}}}

Equal blocks are written once; `order` says where they are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ganglion.decide.shapes.amounts import FORMATS, Amount, Condition, Term
from ganglion.decide.shapes.block import MATRIX, TABLE, VECTOR, Parameter
from ganglion.decide.shapes.described import (
    DescribedActivations,
    DescribedBlock,
    DescribedLayer,
    DescribedModel,
    Flops,
    Split,
)
from ganglion.decide.shapes.strict_json import Node, read_json
from ganglion.decide.topology import TENSOR_AXES

DESCRIPTION_FORMAT = 1
_LINE_WIDTH = 100
_LONGEST_PERIOD = 16  # blocks of a layer that can be folded
_MOST_TIMES = 10_000
_ROLES = (MATRIX, TABLE, VECTOR)
_SPLIT_AXES = ("x", "y")
_FLOPS = ("forward", "input", "weight")


def description_to_json(model: DescribedModel) -> str:
    """Return the text of a description; `description_from_json` reads it back to an equal one."""
    record = {
        "format": DESCRIPTION_FORMAT,
        "name": model.name,
        "sample_bytes": model.sample_bytes,
        "tokens": model.tokens,
        "splits": [{"axis": s.axis, "name": s.name, "size": s.size} for s in model.splits],
        "order": _folded([block.name for block in model.blocks]),
        "blocks": {block.name: _block_record(block) for block in model.blocks},
    }
    return _text(record, 0) + "\n"


def description_from_json(text: str, source: str) -> DescribedModel:
    """Return the description of JSON text; `source` names the file in errors."""
    root = read_json(text, source, "write it again with `ganglion describe`")
    root.require_format(DESCRIPTION_FORMAT, "model description")
    fields = root.table(
        required=("format", "name", "sample_bytes", "order", "blocks"),
        optional=("tokens", "splits"),
    )
    kinds = {name: _block(name, node) for name, node in fields["blocks"].entries().items()}
    order = [name for node in fields["order"].items() for name in _names(node, list(kinds))]
    for name in kinds:
        if name not in order:
            raise fields["order"].error(
                f"does not have block {name!r}: add it, or remove the block"
            )
    return DescribedModel(
        name=fields["name"].text(),
        sample_bytes=fields["sample_bytes"].number(),
        blocks=tuple(kinds[name] for name in order),
        tokens=fields["tokens"].number(least=1) if "tokens" in fields else 1,
        splits=tuple(map(_split, fields["splits"].items())) if "splits" in fields else (),
    )


# --- writing -------------------------------------------------------------------------------------


def _folded(names: Sequence[str]) -> list[dict[str, Any]]:
    """Return runs of names, those that repeat written once with the number of times."""
    groups: list[dict[str, Any]] = []
    start = 0
    while start < len(names):
        period, times = _longest_repeat(names, start)
        members = list(names[start : start + period])
        if times > 1:
            groups.append({"blocks": members, "times": times})
        elif groups and "times" not in groups[-1]:
            groups[-1]["blocks"] += members
        else:
            groups.append({"blocks": members})
        start += period * times
    return groups


def _longest_repeat(names: Sequence[str], start: int) -> tuple[int, int]:
    """Return the period and times of the repetition from here that covers most; (1, 1) if none."""
    best = (1, 1)
    for period in range(1, min(_LONGEST_PERIOD, len(names) - start) + 1):
        times, member = 1, names[start : start + period]
        while names[start + times * period : start + (times + 1) * period] == member:
            times += 1
        if times > 1 and period * times > best[0] * best[1]:
            best = (period, times)
    return best


def _block_record(block: DescribedBlock) -> dict[str, Any]:
    fixed = {"fixed_flops": _flops_record(block.fixed_flops)}
    return {
        "flops": _flops_record(block.flops),
        **(fixed if block.fixed_flops != Flops() else {}),
        "output_elements": block.output_elements,
        "parameters": list(map(_parameter_record, block.parameters)),
        "layers": [
            {"parameter": layer.parameter, "rows": [layer.input_rows, layer.output_rows]}
            for layer in block.layers
        ],
        "activations": {
            form.name: _activation_record(held)
            for form, held in zip(FORMATS, block.activations, strict=True)
        },
    }


def _flops_record(flops: Flops) -> dict[str, int]:
    return {name: getattr(flops, name) for name in _FLOPS}


def _parameter_record(parameter: Parameter) -> dict[str, Any]:
    flags = {"is_tied": parameter.is_tied, "in_muon": parameter.in_muon}
    return {
        "shape": list(parameter.shape),
        "axes": list(parameter.axes),
        "role": parameter.role,
        **{name: True for name, is_on in flags.items() if is_on},
    }


def _activation_record(held: DescribedActivations) -> dict[str, Any]:
    keeps = held.keeps_input
    return {
        "keeps_input": keeps if isinstance(keeps, bool) else str(keeps),
        "keeps_output": held.keeps_output,
        **{name: _terms(getattr(held, name)) for name in ("input", "output", "kept")},
        **{name: list(map(_terms, getattr(held, name))) for name in ("scratch", "held")},
        **{name: _terms(getattr(held, name)) for name in ("rerun", "gradient")},
    }


def _terms(amount: Amount) -> list[dict[str, Any]]:
    return [
        {
            "fixed_bytes" if term.is_fixed else "bytes": term.num_bytes,
            **({"over": " ".join(term.over)} if term.over else {}),
            **({"when": " ".join(map(str, term.when))} if term.when else {}),
        }
        for term in amount
    ]


def _text(value: Any, indent: int) -> str:
    """Return JSON with everything that fits on one line, on one line."""
    line = json.dumps(value, ensure_ascii=False)
    if len(line) + indent <= _LINE_WIDTH or not isinstance(value, dict | list):
        return line
    inner = " " * (indent + 2)
    if isinstance(value, list):
        parts = [f"{inner}{_text(item, indent + 2)}" for item in value]
        return "[\n" + ",\n".join(parts) + "\n" + " " * indent + "]"
    parts = [f"{inner}{json.dumps(key)}: {_text(item, indent + 2)}" for key, item in value.items()]
    return "{\n" + ",\n".join(parts) + "\n" + " " * indent + "}"


# --- reading -------------------------------------------------------------------------------------


def _names(node: Node, known: Sequence[str]) -> list[str]:
    fields = node.table(required=("blocks",), optional=("times",))
    names = [item.choice(known) for item in fields["blocks"].items()]
    return names * (fields["times"].number(1, _MOST_TIMES) if "times" in fields else 1)


def _split(node: Node) -> Split:
    fields = node.table(required=("axis", "name", "size"))
    return Split(
        axis=fields["axis"].choice(_SPLIT_AXES),
        name=fields["name"].text(),
        size=fields["size"].number(least=1),
    )


def _block(name: str, node: Node) -> DescribedBlock:
    fields = node.table(
        required=("flops", "output_elements", "parameters", "layers", "activations"),
        optional=("fixed_flops",),
    )
    formats = fields["activations"].table(required=[form.name for form in FORMATS])
    return DescribedBlock(
        name=name,
        flops=_flops(fields["flops"]),
        fixed_flops=_flops(fields["fixed_flops"]) if "fixed_flops" in fields else Flops(),
        output_elements=fields["output_elements"].number(),
        parameters=tuple(map(_parameter, fields["parameters"].items())),
        layers=tuple(map(_layer, fields["layers"].items())),
        activations=tuple(_activations(formats[form.name]) for form in FORMATS),
    )


def _flops(node: Node) -> Flops:
    fields = node.table(required=_FLOPS)
    return Flops(**{name: field.number() for name, field in fields.items()})


def _parameter(node: Node) -> Parameter:
    fields = node.table(required=("shape", "axes", "role"), optional=("is_tied", "in_muon"))
    shape = tuple(item.number(least=1) for item in fields["shape"].items())
    axes = tuple(None if n.value is None else n.choice(_SPLIT_AXES) for n in fields["axes"].items())
    if len(axes) != len(shape):
        raise fields["axes"].error(
            f"has {len(axes)} axes for {len(shape)} dims: write one for each"
        )
    flags = {name: fields[name].flag() for name in ("is_tied", "in_muon") if name in fields}
    return Parameter(shape=shape, axes=axes, role=fields["role"].choice(_ROLES), **flags)


def _layer(node: Node) -> DescribedLayer:
    fields = node.table(required=("parameter", "rows"))
    rows = [item.number() for item in fields["rows"].items()]
    if len(rows) != 2:
        raise fields["rows"].error(f"has {len(rows)} numbers: write those of inputs and outputs")
    return DescribedLayer(
        parameter=fields["parameter"].number(), input_rows=rows[0], output_rows=rows[1]
    )


def _activations(node: Node) -> DescribedActivations:
    fields = node.table(
        required=("keeps_input", "input", "output", "kept"),
        optional=("keeps_output", "scratch", "held", "rerun", "gradient"),
    )
    keeps = fields["keeps_input"]
    plain = {name: _amount(fields[name]) for name in ("rerun", "gradient") if name in fields}
    moments = {
        name: tuple(map(_amount, fields[name].items()))
        for name in ("scratch", "held")
        if name in fields
    }
    return DescribedActivations(
        input=_amount(fields["input"]),
        output=_amount(fields["output"]),
        kept=_amount(fields["kept"]),
        scratch=moments.get("scratch", ()),
        held=moments.get("held", ()),
        rerun=plain.get("rerun", ()),
        gradient=plain.get("gradient", ()),
        keeps_input=keeps.flag() if isinstance(keeps.value, bool) else _condition(keeps),
        keeps_output=fields["keeps_output"].flag() if "keeps_output" in fields else False,
    )


def _amount(node: Node) -> Amount:
    return tuple(map(_term, node.items()))


def _term(node: Node) -> Term:
    is_fixed = "fixed_bytes" in node.entries()
    key = "fixed_bytes" if is_fixed else "bytes"
    fields = node.table(required=(key,), optional=("over", "when"))
    axes = fields["over"].words() if "over" in fields else []
    conditions = fields["when"].words() if "when" in fields else []
    return Term(
        num_bytes=fields[key].number(),
        is_fixed=is_fixed,
        over=tuple(axis.choice(TENSOR_AXES) for axis in axes),
        when=tuple(map(_condition, conditions)),
    )


def _condition(node: Node) -> Condition:
    return node.parsed(Condition.parse)


def is_description(text: str) -> bool:
    """Return whether JSON text is meant as a model description, and not as a plan."""
    try:
        record = json.loads(text)
    except json.JSONDecodeError:
        return False
    return isinstance(record, dict) and ("blocks" in record or "order" in record)
