"""Run files and run folders: reading, overrides, validation, recipes, writing, and names.

runs/quickstart-20260101-120000/
  run.toml plan.json          the run file and the plan, as resolved
  metrics.jsonl tensorboard/  results, step by step
  trace/ logs/                events and output of each rank
  checkpoints/                states to continue from
  model.safetensors           the weights at the end, under serial names
  prediction.json             of a pipeline: its steps beside the simulator's
  memory.json                 memory of each rank, beside the memory model's prediction
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ganglion.decide.config.schema import RunFile, Section
from ganglion.errors import ConfigError, UnknownKeyError

RUNS = "runs"
RUN_FILE = "run.toml"
PLAN_FILE = "plan.json"
METRICS_FILE = "metrics.jsonl"
TENSORBOARD = "tensorboard"
TRACE = "trace"
LOGS = "logs"
CHECKPOINTS = "checkpoints"
MODEL_FILE = "model.safetensors"
PREDICTION_FILE = "prediction.json"
MEMORY_FILE = "memory.json"

QUICKSTART = "quickstart"  # a built-in run file


@dataclass(frozen=True, slots=True)
class Override:
    """One `--section.key value` of the command line, its value still text."""

    key: str
    text: str


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file into plain tables."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"run file {path} does not exist; check the path") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"run file {path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"run file {path} is not valid TOML: {error}") from error


def recipe(name: str) -> dict[str, Any]:
    """Return the tables of a built-in run file."""
    file = resources.files("ganglion.decide.config").joinpath("recipes", f"{name}.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))


def load_run_file(
    tables: Mapping[str, Any], overrides: Iterable[Override] = (), source: str = "run file"
) -> RunFile:
    """Validate tables read from TOML, after laying the overrides over them."""
    merged = {
        name: dict(table) if isinstance(table, Mapping) else table for name, table in tables.items()
    }
    for override in overrides:
        _apply(merged, override)
    try:
        return RunFile.model_validate(merged)
    except ValidationError as error:
        raise _explain(error.errors(), source) from error


def _apply(tables: dict[str, Any], override: Override) -> None:
    section, _, key = override.key.partition(".")
    table = tables.setdefault(section, {})
    if not isinstance(table, dict):
        raise ConfigError(f"--{override.key}: {section} is not a section of the run file")
    first, _, rest = key.partition(".")
    if rest:  # a key of a table, such as model.args.width
        inner = _inner_table(table, section, first, override)
        table[first] = {**inner, rest: _parse(override.text)}
    else:  # of plain text `--output.dir 2024` stays text
        is_text = _kind(section, first) is str
        table[first] = override.text if is_text else _parse(override.text)


def _inner_table(
    table: Mapping[str, Any], section: str, key: str, override: Override
) -> Mapping[str, Any]:
    old = table.get(key, {})
    kind = _kind(section, key)
    if not isinstance(old, Mapping) or (kind is not None and get_origin(kind) is not dict):
        raise ConfigError(
            f"--{override.key}: {section}.{key} is not a table of keys; write --{section}.{key} "
            f"{override.text}"
        )
    return old


def _kind(section: str, key: str) -> Any:
    """Return the type of a field, or None for an unknown key."""
    fields = _sections()[section].model_fields if section in _sections() else {}
    return fields[key].annotation if key in fields else None


def _sections() -> dict[str, type[Section]]:
    kinds = {name: field.annotation for name, field in RunFile.model_fields.items()}
    return {
        name: kind
        for name, kind in kinds.items()
        if isinstance(kind, type) and issubclass(kind, Section)
    }


def _parse(text: str) -> Any:
    """Read a value as TOML would; a bare word, which is not TOML, is taken as text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(details: list[ErrorDetails], source: str) -> ConfigError:
    first = details[0]
    key = _user_key(first["loc"])
    if first["type"] == "extra_forbidden":
        return UnknownKeyError(f"{source}: unknown key {key!r}; {_nearest(key)}")
    # A value that may be of several types has one complaint for each of them.
    messages = [d["msg"] for d in details if _user_key(d["loc"]) == key]
    complaints = [message[:1].lower() + message[1:] for message in messages]
    return ConfigError(
        f"{source}: {key} = {first['input']!r} cannot be used: {', or '.join(complaints)}"
    )


def _user_key(loc: tuple[str | int, ...]) -> str:
    """Return the part of an error's place that a user wrote; pydantic adds the types it tried."""
    kind = _kind(str(loc[0]), str(loc[1])) if len(loc) > 1 else None
    depth = 3 if kind is None or get_origin(kind) in (dict, list) else 2
    return ".".join(str(part) for part in loc[:depth])


def known_keys() -> list[str]:
    """Return every `section.key` of the run file."""
    return [f"{name}.{key}" for name, kind in _sections().items() for key in kind.model_fields]


def _nearest(key: str) -> str:
    section, _, last = key.rpartition(".")
    sections = list(RunFile.model_fields)
    if not section:
        near = difflib.get_close_matches(key, sections, n=1, cutoff=0.5)
        return f"did you mean [{near[0]}]?" if near else f"the sections are {sections}"
    keys = known_keys()
    inside = [known for known in keys if known.startswith(f"{section}.")]
    for candidates in (inside, keys):
        by_name = {known.rpartition(".")[2]: known for known in reversed(candidates)}
        near = difflib.get_close_matches(last, by_name, n=1, cutoff=0.7)
        if near:
            return f"did you mean {by_name[near[0]]!r}?"
    return f"the keys there are {inside}"


# --- writing -------------------------------------------------------------------------------------


def render_run_file(run: RunFile) -> str:
    """Return the run file as TOML text that reads back to an equal one."""
    sections = ((name, getattr(run, name)) for name in RunFile.model_fields)
    return "\n".join(_render_section(name, section) for name, section in sections)


def _render_section(name: str, section: Section) -> str:
    lines = [f"# {(section.__doc__ or '').strip()}", f"[{name}]"]
    for key, field in type(section).model_fields.items():
        lines.append(f"# {field.description}")
        lines.append(f"{key} = {_render_value(getattr(section, key))}")
    return "\n".join(lines) + "\n"


def _render_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _quote(value)
    if isinstance(value, Mapping):
        pairs = (f"{_quote(key)} = {_render_value(item)}" for key, item in value.items())
        return "{" + ", ".join(pairs) + "}"
    return "[" + ", ".join(_render_value(item) for item in value) + "]"


def _quote(text: str) -> str:
    """Write a TOML basic string: JSON's, but for surrogate escapes, and DEL must be escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
