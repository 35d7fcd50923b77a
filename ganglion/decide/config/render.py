"""Writing a run file: every key with its value, and its description as a comment above it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ganglion.decide.config.schema import RunFile, Section


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
