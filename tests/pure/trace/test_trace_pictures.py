"""Pictures of traces: every event is at its place, in the colour of its kind."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ganglion.errors import ConfigError, DataError
from ganglion.trace.event import COMM, COMPUTE, HOST, Event
from ganglion.trace.pictures import Box, draw, round_ticks, svg_picture, time_unit
from ganglion.trace.png import write_png

SPACE = "{http://www.w3.org/2000/svg}"


def stages(num_stages: int, num_microbatches: int, unit_s: float = 1.0) -> list[Event]:
    """Return forwards and backwards one after the other, and what carries them."""
    found = []
    for stage in range(num_stages):
        for k in range(num_microbatches):
            at = stage + 4 * k
            more = {"stage": stage, "microbatch": k, "step": 0}
            places = (
                (COMPUTE, "forward", at, at + 1),
                (COMPUTE, "backward", at + 1, at + 3),
                (COMM, "send_forward", at + 1, at + 1.5),
                (COMM, "receive_forward", at - 0.5 if at else 0, at),
            )
            found += [
                Event(
                    rank=stage, lane=lane, kind=kind, start_s=a * unit_s, end_s=b * unit_s, **more
                )
                for lane, kind, a, b in places
            ]
    return found


def titled(events: list[Event]) -> list[Box]:
    return [box for box in draw(events).boxes if box.tip]


def test_every_event_has_its_box_and_its_tip() -> None:
    events = stages(2, 3)
    root = ElementTree.fromstring(svg_picture(events, title="two stages"))
    tips = [element.text or "" for element in root.iter(f"{SPACE}title")]
    shown = [e for e in events if e.duration_s > 0]  # one receive takes no time
    assert len(tips) == len(shown) == len(events) - 1
    assert "forward, stage 1, microbatch 2, step 0: 9 to 10 s (1 s)" in tips
    texts = [element.text for element in root.iter(f"{SPACE}text")]
    assert {"two stages", "rank 0, stage 0", "rank 1, stage 1", "forward message"} <= set(texts)


def test_boxes_are_to_scale() -> None:
    events = [
        Event(rank=0, lane=COMPUTE, kind="forward", start_s=100, end_s=101),
        Event(rank=0, lane=COMPUTE, kind="backward", start_s=102, end_s=104),
        Event(rank=1, lane=COMPUTE, kind="forward", start_s=103, end_s=104),
    ]
    by_x = sorted(titled(events), key=lambda box: box.x)
    zero, second = by_x[0].x, by_x[0].width
    assert [round((box.x - zero) / second, 6) for box in by_x] == [0, 2, 3]
    assert by_x[1].width == pytest.approx(2 * second)
    assert by_x[0].y == by_x[1].y < by_x[2].y
    assert 0 < zero < by_x[2].x + second < draw(events).width


def test_kinds_differ_in_colour_and_are_in_the_legend() -> None:
    kinds = ("forward", "backward", "weight", "reduce", "update", "evaluate")
    events = [
        Event(rank=0, lane=COMPUTE, kind=kind, start_s=at, end_s=at + 1)
        for at, kind in enumerate(kinds)
    ]
    colours = {box.fill for box in titled(events)}
    assert len(colours) == len(kinds)
    words = [word.text for word in draw(events).words]
    assert words[: len(kinds) + 1] == [*kinds, "idle"]
    legend = {box.fill for box in draw(events).boxes if not box.tip}
    assert colours <= legend


def test_the_number_of_a_microbatch_shows_where_it_fits() -> None:
    wide = Event(rank=0, lane=COMPUTE, kind="forward", start_s=0, end_s=1, microbatch=777)
    thin = Event(rank=0, lane=COMPUTE, kind="forward", start_s=1, end_s=1.0001, microbatch=888)
    words = [word.text for word in draw([wide, thin]).words]
    assert "777" in words
    assert "888" not in words


def test_all_numbers_fit_in_a_usual_pipeline() -> None:
    events = [e for e in stages(8, 32) if e.lane == COMPUTE]
    words = [word.text for word in draw(events).words]
    assert words.count("31") == 2 * 8


def test_communication_is_a_thinner_row_below() -> None:
    busy = Event(rank=0, lane=COMPUTE, kind="forward", start_s=0, end_s=1)
    first = Event(rank=0, lane=COMM, kind="reduce", start_s=0, end_s=1)
    second = Event(rank=0, lane=COMM, kind="reduce", start_s=0.5, end_s=2)
    host = Event(rank=0, lane=HOST, kind="update", start_s=2, end_s=3)
    row, low, lower, lowest = sorted(titled([busy, first, second, host]), key=lambda box: box.y)
    assert low.height < row.height
    assert row.y + row.height <= low.y
    assert low.y + low.height <= lower.y
    assert lower.y + lower.height <= lowest.y
    alone = Event(rank=0, lane=COMM, kind="reduce", start_s=1, end_s=1)
    assert draw([busy, alone]).height == draw([busy]).height  # no length, no row


def test_later_stages_of_a_rank_are_paler() -> None:
    chunks = [
        Event(rank=0, lane=COMPUTE, kind="forward", start_s=s, end_s=s + 1, stage=s) for s in (0, 4)
    ]
    assert [box.opacity for box in titled(chunks)] == [0.5, 1]
    assert 'fill-opacity="0.5"' in svg_picture(chunks)
    assert "fill-opacity" not in svg_picture(chunks[:1])


def test_text_is_escaped() -> None:
    odd = Event(rank=0, lane=COMPUTE, kind="<b>&", start_s=0, end_s=1)
    root = ElementTree.fromstring(svg_picture([odd], title='a < b & "c"\x00'))
    texts = [element.text for element in root.iter(f"{SPACE}text")]
    assert 'a < b & "c" ' in texts
    assert "<b>&" in texts


def test_a_picture_stays_small() -> None:
    assert len(svg_picture(stages(8, 64))) < 1_000_000
    many = [
        Event(rank=0, lane=COMPUTE, kind="forward", start_s=k, end_s=k + 1, microbatch=k)
        for k in range(50_000)
    ]
    assert len(titled(many)) < 5_000  # no more than there are pixels


def test_a_trace_of_one_moment() -> None:
    instant = Event(rank=0, lane=COMPUTE, kind="forward", start_s=3, end_s=3)
    (box,) = titled([instant])
    assert box.width > 0


def test_ticks_are_round() -> None:
    assert round_ticks(33, 9) == [0, 5, 10, 15, 20, 25, 30]
    assert round_ticks(10, 5) == [0, 2, 4, 6, 8, 10]
    assert round_ticks(0.003, 3) == pytest.approx([0, 0.001, 0.002, 0.003])
    assert round_ticks(0, 5) == [0]
    assert time_unit(2.5) == (1.0, "s")
    assert time_unit(0.02) == (1e3, "ms")
    assert time_unit(3e-6) == (1e6, "us")
    assert time_unit(0) == (1.0, "s")
    words = {word.text for word in draw(stages(1, 2, unit_s=1e-3)).words}
    assert {"0 ms", "1 ms", "2 ms"} <= words


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no events"):
        svg_picture([])
    with pytest.raises(DataError, match="no events"):
        write_png([], tmp_path / "a.png")


def test_without_matplotlib_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'ganglion\[plot\]'"):
        write_png(stages(1, 1), tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []


def test_a_png_has_twice_the_size(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures as .png need the extra `plot`")
    events = stages(4, 8)
    title = r"no $\formula$"
    for name in ("a.png", "b.png"):
        write_png(events, tmp_path / name, title)
    content = (tmp_path / "a.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    picture = draw(events, title)
    assert struct.unpack(">II", content[16:24]) == (2 * picture.width, 2 * picture.height)
    assert content == (tmp_path / "b.png").read_bytes()
