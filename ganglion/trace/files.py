"""Trace files: read the events of a run folder, write a trace in any format."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from ganglion.errors import ConfigError, DataError
from ganglion.trace.chrome import chrome_trace
from ganglion.trace.event import LANES, NONE, Event, event_to_json, is_json
from ganglion.trace.pictures import svg_picture
from ganglion.trace.png import write_png

FOLDER = "trace"
EVENTS = ".jsonl"
SUFFIXES = (EVENTS, ".json", ".svg", ".png")
_NOT_EVENTS = ("metrics.jsonl",)
_TEXTS = ("lane", "kind", "axis")
_TIMES = ("start_s", "end_s")
_NUMBERS = tuple(name for name in Event._fields if name not in (*_TEXTS, *_TIMES))


def read_trace(path: Path) -> list[Event]:
    """Return the events of a file, or of all files of a trace or run folder, ordered by start.

    Raise DataError, with file and line, for a line that is no event; a last line that a crash left
    incomplete is dropped. A resumed run counts its messages anew: their flow numbers are shifted,
    so that they stay unique.
    """
    events: list[Event] = []
    for parts in _generations(_event_files(path)):
        found = [event for part in parts for event in _read_file(part)]
        first = max((event.flow for event in events), default=NONE) + 1
        events += [e if e.flow == NONE else e._replace(flow=e.flow + first) for e in found]
    return sorted(events, key=lambda event: (event.start_s, event.end_s, event.rank))


def write_trace(events: Sequence[Event], path: Path, title: str = "") -> None:
    """Write in the format of the suffix: .jsonl, .json (Chrome and Perfetto), .svg or .png."""
    check_suffix(path)
    try:
        if path.suffix == ".png":
            write_png(events, path, title)
            return
        if path.suffix == ".json":
            text = chrome_trace(events)
        elif path.suffix == ".svg":
            text = svg_picture(events, title)
        else:
            text = "".join(event_to_json(event) + "\n" for event in events)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose another place") from None


def check_suffix(path: Path) -> None:
    """Raise ConfigError unless `write_trace` knows the format of this file."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(
            f"cannot write a trace as {path.name!r}: end it in .jsonl (events), .json (Chrome and "
            "Perfetto), .svg or .png (pictures)"
        )


def _event_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.exists():
        raise DataError(f"no trace at {path}: give a .jsonl file, a trace folder or a run folder")
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    files = sorted(p for p in folder.glob(f"*{EVENTS}") if p.name not in _NOT_EVENTS)
    if not files:
        raise DataError(f"{folder} holds no *{EVENTS} of events; run with trace.enabled = true")
    return files


def _generations(files: Iterable[Path]) -> list[list[Path]]:
    """Return the files by launch: those whose names differ only in the rank."""
    found: dict[str, list[Path]] = {}
    for file in files:
        found.setdefault(re.sub(r"^rank\d+", "rank", file.name), []).append(file)
    return list(found.values())


def _read_file(path: Path) -> list[Event]:
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = text.split("\n")  # not splitlines, which splits at characters that JSON allows
    if not is_json(lines[-1]):
        lines.pop()  # incomplete, or empty after the last line end
    return [_event(line, f"{path}:{at}") for at, line in enumerate(lines, 1) if line.strip()]


def _event(line: str, where: str) -> Event:
    try:
        event = Event(**json.loads(line))
    except (json.JSONDecodeError, TypeError) as error:
        raise DataError(
            f"{where}: not a trace event ({error}); repair or remove the line"
        ) from None
    wrong = _wrong_field(event)
    if wrong:
        value = getattr(event, wrong)
        raise DataError(f"{where}: not a trace event: {wrong} is {value!r}; repair or remove it")
    return event


def _wrong_field(event: Event) -> str:
    """Return the name of a field with an invalid value, or ""."""
    for name in _TIMES:
        value = getattr(event, name)
        if type(value) not in (int, float) or not math.isfinite(value):
            return name
    for name in _NUMBERS:
        if type(getattr(event, name)) is not int:
            return name
    for name in _TEXTS:
        if type(getattr(event, name)) is not str:
            return name
    if event.lane not in LANES:
        return "lane"
    return "end_s" if event.end_s < event.start_s else ""
