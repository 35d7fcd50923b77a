"""A trace as a PNG file: the picture of `pictures.py`, painted by matplotlib."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from ganglion.errors import ConfigError
from ganglion.trace.event import Event
from ganglion.trace.pictures import PAPER, Box, Picture, Words, draw

PX_PER_INCH = 100.0
POINTS_PER_INCH = 72.0
MAX_DOTS = 20_000  # of a side; matplotlib refuses 65,536
_ALIGNED = {"start": "left", "middle": "center", "end": "right"}


def write_png(events: Sequence[Event], path: Path, title: str = "") -> None:
    """Write the picture at twice its size in dots; raise ConfigError without matplotlib."""
    picture = draw(events, title)
    # A Figure, not pyplot: that needs no window system and keeps no state.
    size = (picture.width / PX_PER_INCH, picture.height / PX_PER_INCH)
    figure = _module("matplotlib.figure").Figure(figsize=size, facecolor=PAPER)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, picture.width)
    axes.set_ylim(picture.height, 0)  # pixels count downwards
    axes.axis("off")
    _paint_boxes(axes, picture)
    for words in picture.words:
        _paint_words(axes, words)
    scale = min(2.0, MAX_DOTS / max(picture.width, picture.height))
    # Software and date would make two files of one trace differ.
    figure.savefig(path, format="png", dpi=PX_PER_INCH * scale, metadata={"Software": None})


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"a .png needs matplotlib ({error}): pip install 'ganglion[plot]', or write a .svg"
        ) from None


def _paint_boxes(axes: Any, picture: Picture) -> None:
    collection = _module("matplotlib.collections").PolyCollection
    look = groupby(picture.boxes, key=lambda box: (box.fill, box.outlined, box.opacity))
    for order, ((fill, outlined, opacity), boxes) in enumerate(look):
        edge = {"edgecolor": PAPER, "linewidth": 0.5} if outlined else {"linewidth": 0}
        shapes = [_corners(box) for box in boxes]
        found = collection(shapes, facecolor=fill, alpha=opacity, zorder=1 + order, **edge)
        axes.add_collection(found, autolim=False)


def _corners(box: Box) -> list[tuple[float, float]]:
    right, lower = box.x + box.width, box.y + box.height
    return [(box.x, box.y), (right, box.y), (right, lower), (box.x, lower)]


def _paint_words(axes: Any, words: Words) -> None:
    axes.text(
        words.x,
        words.y,
        words.text,
        fontsize=words.size * POINTS_PER_INCH / PX_PER_INCH,
        ha=_ALIGNED[words.anchor],
        va="baseline",
        color=words.fill,
        parse_math=False,  # a dollar in a title is a dollar
        zorder=1000,
    )
