"""A trace as a picture, in letters or in colours: a row per rank, time to the right.

`draw` turns events into rectangles and words in pixels; `svg_picture` writes those as SVG, and
`png.py` paints them as PNG. The picture has a light background of its own, so that it is readable
on a dark page too; colour-blind people can distinguish its colours, those of Okabe and Ito.

`render_grid` draws letters:

    0  0123a4b5c6d7efgh          digits: forward of that microbatch (last digit)
    1  .012a3b4c5d6e7fgh         letters: its backward, a for 0, b for 1; capitals: its weight half
    2  ..0a1b2c3d4e5f6g7h        .: idle
"""

from __future__ import annotations

import html
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from ganglion.trace.chrome import rank_name, sub_lanes
from ganglion.trace.event import COMM, COMPUTE, HOST, NONE, Event
from ganglion.trace.statistics import stages_of, time_span

INK = "#1a1a1a"
FAINT = "#5f5f5f"
PAPER = "#ffffff"
IDLE = "#e9e9e9"
IDLE_THIN = "#f5f5f5"
GRID = "#c9c9c9"
OTHER = "#5c5c5c"
_STYLES = (  # kinds, word of the legend, colour
    (("forward",), "forward", "#56b4e9"),
    (("backward",), "backward", "#e69f00"),
    (("weight",), "weight", "#009e73"),
    (("reduce",), "reduce", "#d48fb8"),
    (("update",), "update", "#f0e442"),
    (("send_forward", "receive_forward"), "forward message", "#0072b2"),
    (("send_backward", "receive_backward"), "backward message", "#d55e00"),
)
_COLOURS = {kind: colour for kinds, _, colour in _STYLES for kind in kinds}

FONT_PX = 11.0
NUMBER_PX = 9.0
LETTER_WIDTH = 0.62  # of the font size, for the wider of common fonts
ROW_PX = 22.0
THIN_PX = 6.0
MAX_THIN_PX = 30.0  # all sub-lanes of a lane together
GAP_PX = 9.0
EDGE_PX = 14.0
MIN_BOX_PX = 1.0
TICK_PX = 80.0
MIN_PLOT_PX = 760.0
MAX_PLOT_PX = 2400.0
UNITS = ((1.0, "s"), (1e3, "ms"), (1e6, "us"), (1e9, "ns"))


@dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle in pixels; `outlined` separates it from its neighbours."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    outlined: bool = False
    opacity: float = 1.0
    tip: str = ""


@dataclass(frozen=True, slots=True)
class Words:
    """A text whose baseline starts, ends or is centred (`anchor`) at a point."""

    x: float
    y: float
    text: str
    size: float = FONT_PX
    anchor: str = "start"
    fill: str = INK


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """Boxes and words, painted in this order."""

    width: float
    height: float
    boxes: tuple[Box, ...]
    words: tuple[Words, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """The map from seconds to pixels."""

    zero_s: float
    span_s: float
    left: float
    plot: float

    def x(self, time_s: float) -> float:
        return self.left + (time_s - self.zero_s) / self.span_s * self.plot


def render_grid(events: Sequence[Event], max_columns: int = 100) -> list[str]:
    """Return one line per rank; a column is the shortest computation, or more to fit the width."""
    shown = [event for event in events if event.lane == COMPUTE]
    if not shown:
        return []
    end_s = max(event.end_s for event in shown)
    shortest_s = min(event.duration_s for event in shown if event.duration_s > 0)
    column_s = max(shortest_s, end_s / max_columns)
    num_columns = max(1, round(end_s / column_s))
    ranks = sorted({event.rank for event in shown})
    rows = {rank: ["."] * num_columns for rank in ranks}
    for event in shown:
        first, last = round(event.start_s / column_s), round(event.end_s / column_s)
        for column in range(first, min(max(last, first + 1), num_columns)):
            rows[event.rank][column] = _letter(event)
    return [f"{rank:3d}  {''.join(rows[rank])}" for rank in ranks]


def _letter(event: Event) -> str:
    digit = event.microbatch % 10
    if event.kind == "forward":
        return str(digit)
    return ("ABCDEFGHIJ" if event.kind == "weight" else "abcdefghij")[digit]


def svg_picture(events: Sequence[Event], title: str = "") -> str:
    """Return a self-contained SVG document; raise DataError if there are no events."""
    picture = draw(events, title)
    size = f'width="{picture.width:g}" height="{picture.height:g}"'
    view = f'viewBox="0 0 {picture.width:g} {picture.height:g}"'
    space = 'xmlns="http://www.w3.org/2000/svg" font-family="Helvetica,Arial,sans-serif"'
    lines = [f"<svg {space} {size} {view}>"]
    for (fill, outlined), boxes in groupby(picture.boxes, key=lambda box: (box.fill, box.outlined)):
        edge = f' stroke="{PAPER}" stroke-width=".7"' if outlined else ""
        lines += [f'<g fill="{fill}"{edge}>', *map(_rectangle, boxes), "</g>"]
    for words in picture.words:
        look = f'font-size="{words.size:g}" text-anchor="{words.anchor}" fill="{words.fill}"'
        spot = f'x="{_px(words.x)}" y="{_px(words.y)}"'
        lines.append(f"<text {spot} {look}>{_safe(words.text)}</text>")
    return "\n".join([*lines, "</svg>"]) + "\n"


def time_unit(span_s: float) -> tuple[float, str]:
    """Return a unit in which the span is easy to read: its number per second and its name."""
    fitting = [unit for unit in UNITS if span_s * unit[0] >= 1]
    return fitting[0] if fitting else UNITS[0 if span_s <= 0 else -1]


def round_ticks(span: float, most: int) -> list[float]:
    """Return 0 and further multiples of 1, 2 or 5 times a power of ten, up to `span`."""
    if span <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(power * n for n in (1, 2, 5, 10, 20) if span / (power * n) <= most)
    return [step * n for n in range(int(span / step * (1 + 1e-9)) + 1)]


def draw(events: Sequence[Event], title: str = "") -> Picture:
    """Return the picture of a trace; raise DataError if there are no events."""
    start_s, end_s = time_span(events)
    stages = stages_of(events)
    names = {rank: rank_name(rank, mine) for rank, mine in stages.items()}
    names = {rank: n if len(n) <= 26 else n[:23] + "..." for rank, n in names.items()}
    left = EDGE_PX + max(map(len, names.values())) * FONT_PX * LETTER_WIDTH + 4
    span_s = (end_s - start_s) or 1.0
    scale = _Scale(zero_s=start_s, span_s=span_s, left=left, plot=_plot_width(events, span_s))
    shown = [event for event in events if event.lane == COMPUTE or event.duration_s > 0]
    sheet = _Sheet(scale, stages)
    sheet.head(title, {event.kind for event in shown or events})
    sheet.rows(shown, names)
    sheet.axis()
    return sheet.picture()


class _Sheet:
    """A picture drawn from top to bottom; `y` is the top of the next row."""

    def __init__(self, scale: _Scale, stages: Mapping[int, Sequence[int]]) -> None:
        self.scale = scale
        self.y = EDGE_PX
        self.behind: list[Box] = []
        self.boxes: list[Box] = []
        self.words: list[Words] = []
        self._paler = {
            (rank, stage): 1 - 0.5 * nth / (len(mine) - 1)
            for rank, mine in stages.items()
            for nth, stage in enumerate(mine)
            if nth
        }

    def picture(self) -> Picture:
        width, height = self.scale.left + self.scale.plot + 2 * EDGE_PX, self.y + EDGE_PX
        paper = Box(0, 0, width, height, PAPER)
        # Boxes that look the same are grouped, so that their style is written once.
        boxes = sorted(self.boxes, key=lambda box: (box.fill, box.outlined, box.opacity))
        return Picture(
            width=math.ceil(width),
            height=math.ceil(height),
            boxes=(paper, *self.behind, *boxes),
            words=tuple(self.words),
        )

    def head(self, title: str, kinds: set[str]) -> None:
        if title:
            self.words.append(Words(EDGE_PX, self.y + FONT_PX, title, FONT_PX + 3))
            self.y += FONT_PX + 14
        x = EDGE_PX
        for colour, word in _legend(kinds):
            self.behind.append(Box(x, self.y, FONT_PX, FONT_PX, colour))
            self.words.append(Words(x + FONT_PX + 4, self.y + FONT_PX - 1.5, word))
            x += FONT_PX + 18 + len(word) * FONT_PX * LETTER_WIDTH
        if self._paler:
            self.words.append(Words(x, self.y + FONT_PX - 1.5, "paler: later stage of the rank"))
        self.y += FONT_PX + GAP_PX
        self._top = self.y

    def rows(self, events: Iterable[Event], names: Mapping[int, str]) -> None:
        """Draw for each rank a row of computations, and thin ones of communication and host."""
        lanes: dict[str, dict[int, list[Event]]] = {lane: {} for lane in (COMPUTE, COMM, HOST)}
        for event in sorted(events, key=lambda event: (event.start_s, event.end_s)):
            lanes.get(event.lane, lanes[HOST]).setdefault(event.rank, []).append(event)
        thin = [_stacked(lanes[lane]) for lane in (COMM, HOST)]
        for rank, name in names.items():
            middle = self.y + ROW_PX / 2 + FONT_PX * 0.36
            self.words.append(Words(self.scale.left - 6, middle, name, anchor="end"))
            for event, box in self._row(lanes[COMPUTE].get(rank, []), ROW_PX, IDLE):
                self.words += _number(event, box)
            for depth, stacks in thin:
                for nth in range(depth):
                    height = min(THIN_PX, MAX_THIN_PX / depth)
                    self._row(stacks.get((rank, nth), []), height, IDLE_THIN)
            self.y += GAP_PX

    def _row(self, events: Iterable[Event], height: float, colour: str) -> list[tuple[Event, Box]]:
        """Draw a row; boxes hidden behind others of the least width are left out."""
        self.behind.append(Box(self.scale.left, self.y, self.scale.plot, height, colour))
        found: list[tuple[Event, Box]] = []
        drawn_to = 0.0
        for event in events:
            x, end = self.scale.x(event.start_s), self.scale.x(event.end_s)
            if end - x >= MIN_BOX_PX or end > drawn_to:
                found.append((event, self._box(event, x, max(end - x, MIN_BOX_PX), height)))
                drawn_to = max(drawn_to, x + MIN_BOX_PX)
        self.boxes += [box for _, box in found]
        self.y += height
        return found

    def _box(self, event: Event, x: float, width: float, height: float) -> Box:
        return Box(
            x=x,
            y=self.y,
            width=width,
            height=height,
            fill=_COLOURS.get(event.kind, OTHER),
            outlined=width > 3,
            opacity=self._paler.get((event.rank, event.stage), 1.0),
            tip=_tip(event, self.scale),
        )

    def axis(self) -> None:
        """Draw grid lines behind the rows and numbers below them."""
        scale = self.scale
        per_s, unit = time_unit(scale.span_s)
        for tick in round_ticks(scale.span_s * per_s, max(4, int(scale.plot // TICK_PX))):
            x = scale.x(scale.zero_s + tick / per_s)
            self.behind.append(Box(x - 0.5, self._top - 3, 1, self.y - self._top + 3, GRID))
            text = f"{tick:g} {unit}"
            self.words.append(Words(x, self.y + FONT_PX + 2, text, anchor="middle", fill=FAINT))
        self.y += FONT_PX + 4


def _plot_width(events: Iterable[Event], span_s: float) -> float:
    """Return a width at which most microbatch numbers fit into their boxes."""
    durations = sorted(e.duration_s for e in events if e.lane == COMPUTE and e.microbatch != NONE)
    durations = [duration for duration in durations if duration > 0]
    if not durations:
        return MIN_PLOT_PX
    short_s = durations[len(durations) // 10]
    wanted = span_s / short_s * (2 * NUMBER_PX * LETTER_WIDTH + 2)
    return min(max(wanted, MIN_PLOT_PX), MAX_PLOT_PX)


def _legend(kinds: set[str]) -> list[tuple[str, str]]:
    entries = [(colour, word) for names, word, colour in _STYLES if kinds & set(names)]
    others = sorted(kinds - set(_COLOURS))
    if others:
        shown = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        entries.append((OTHER, shown))
    return [*entries, (IDLE, "idle")]


def _stacked(by_rank: Mapping[int, list[Event]]) -> tuple[int, dict[tuple[int, int], list[Event]]]:
    """Return the depth of a thin lane and its events by (rank, sub-lane)."""
    found: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for rank, events in by_rank.items():
        # In whole nanoseconds: consecutive events must not overlap by a rounding error.
        lanes = sub_lanes([(round(event.start_s, 9), round(event.end_s, 9)) for event in events])
        for event, lane in zip(events, lanes, strict=True):
            found[rank, lane].append(event)
    return max((lane + 1 for _, lane in found), default=0), found


def _tip(event: Event, scale: _Scale) -> str:
    per_s, unit = time_unit(scale.span_s)
    start, end = (event.start_s - scale.zero_s) * per_s, (event.end_s - scale.zero_s) * per_s
    numbers = (("stage", event.stage), ("microbatch", event.microbatch), ("step", event.step))
    words = [event.kind, *(f"{name} {value}" for name, value in numbers if value != NONE)]
    words += [f"version {event.version}"] * (event.version != NONE)
    words += [f"{event.bytes} bytes"] * (event.bytes > 0)
    return f"{', '.join(words)}: {start:.4g} to {end:.4g} {unit} ({end - start:.4g} {unit})"


def _number(event: Event, box: Box) -> list[Words]:
    """Return the microbatch's number, if it fits its box."""
    text = str(event.microbatch)
    fits = len(text) * NUMBER_PX * LETTER_WIDTH <= box.width
    if event.microbatch == NONE or not fits:
        return []
    middle = box.y + box.height / 2 + NUMBER_PX * 0.36
    ink = PAPER if box.fill == OTHER else INK
    return [Words(box.x + box.width / 2, middle, text, NUMBER_PX, "middle", ink)]


def _rectangle(box: Box) -> str:
    place = f'x="{_px(box.x)}" y="{_px(box.y)}"'
    size = f'width="{_px(box.width)}" height="{_px(box.height)}"'
    faded = f' fill-opacity="{box.opacity:g}"' if box.opacity < 1 else ""
    if not box.tip:
        return f"<rect {place} {size}{faded}/>"
    return f"<rect {place} {size}{faded}><title>{_safe(box.tip)}</title></rect>"


def _px(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _safe(text: str) -> str:
    """Return the text escaped for XML, which cannot contain control characters."""
    return html.escape(
        "".join(letter if letter.isprintable() else " " for letter in text), quote=False
    )
