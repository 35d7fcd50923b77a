"""The JSON state of a checkpoint: step, plan, optimizer settings, extra state."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ganglion.decide.plan import Plan
from ganglion.errors import CheckpointError, ConfigError

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"

STATE_FORMAT = 1
_FIELDS: dict[str, type] = {"step": int, "plan": dict, "optimizer": dict, "extra": dict}


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """All state that is not a tensor; tuples come back as lists."""

    step: int
    plan: Plan
    optimizer: Mapping[str, JSON] = field(default_factory=dict)
    extra: Mapping[str, JSON] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the state as JSON text; refuse values that JSON cannot hold."""
        _check_json(self.optimizer, "optimizer")
        _check_json(self.extra, "extra")
        record = {
            "format": STATE_FORMAT,
            "step": self.step,
            "plan": json.loads(self.plan.to_json()),
            "optimizer": self.optimizer,
            "extra": self.extra,
        }
        return json.dumps(record, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str) -> SavedState:
        """Read a state back; `source` names the file in error messages."""
        record = _checked_record(text, source)
        try:
            plan = Plan.from_json(json.dumps(record["plan"]), f"the plan in {source}")
        except ConfigError as error:
            raise CheckpointError(str(error)) from error
        return cls(
            step=record["step"], plan=plan, optimizer=record["optimizer"], extra=record["extra"]
        )


def _checked_record(text: str, source: str) -> dict[str, Any]:
    try:
        record: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{source} is not JSON: {error}; use another checkpoint") from error
    found = record.pop("format", None) if isinstance(record, dict) else None
    if found != STATE_FORMAT:
        raise CheckpointError(
            f"{source} has format {found!r}, but this version reads format {STATE_FORMAT}: "
            f"load it with the version that saved it"
        )
    if set(record) != set(_FIELDS):
        raise CheckpointError(
            f"{source} has the fields {sorted(record)}, not {sorted(_FIELDS)}: use another "
            f"checkpoint"
        )
    for name, kind in _FIELDS.items():
        if type(record[name]) is not kind:
            raise CheckpointError(
                f"{source}: {name} must be of type {kind.__name__}, not {record[name]!r}: use "
                f"another checkpoint"
            )
    return dict(record)


def _check_json(value: object, where: str) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{where} has the key {key!r}, but JSON keys are text")
            _check_json(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_json(item, f"{where}[{index}]")
    elif not isinstance(value, bool | int | float | str | None):
        raise CheckpointError(
            f"{where} is a {type(value).__name__}, which JSON cannot hold: save tensors as "
            f"tensors, and turn the rest into numbers, text, lists and mappings"
        )
