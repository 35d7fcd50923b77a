"""Traces survive their files, and Chrome's format gets slices and arrows it can show."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ganglion.errors import ConfigError, DataError
from ganglion.trace.chrome import chrome_trace, event_name, sub_lanes
from ganglion.trace.event import COMM, COMPUTE, HOST, Event, event_to_json
from ganglion.trace.files import read_trace, write_trace

Record = dict[str, Any]


def pipeline() -> list[Event]:
    """Return two ranks and one message without length, that starts at 10 s."""
    work = {"stage": 0, "microbatch": 3, "step": 0, "version": 2}
    sent = {"stage": 0, "microbatch": 3, "bytes": 64, "flow": 5}
    return [
        Event(rank=0, lane=COMPUTE, kind="forward", start_s=10, end_s=10.25, **work),
        Event(rank=0, lane=COMM, kind="send_forward", start_s=10.25, end_s=10.25, **sent),
        Event(
            rank=1,
            lane=COMM,
            kind="receive_forward",
            start_s=10.25,
            end_s=10.25,
            **{**sent, "stage": 1},
        ),
        Event(rank=1, lane=HOST, kind="agree", start_s=11, end_s=11.5),
        Event(rank=1, lane=COMM, kind="reduce", start_s=11, end_s=12, axis="data"),
    ]


def records(events: list[Event]) -> list[Record]:
    found: list[Record] = json.loads(chrome_trace(events))["traceEvents"]
    return found


def of_phase(events: list[Event], phase: str) -> list[Record]:
    return [record for record in records(events) if record["ph"] == phase]


def test_processes_are_ranks_and_threads_are_lanes() -> None:
    names = [(r["name"], r["pid"], r["args"]) for r in of_phase(pipeline(), "M")]
    assert ("process_name", 0, {"name": "rank 0, stage 0"}) in names
    assert ("process_sort_index", 1, {"sort_index": 1}) in names
    threads = [(pid, args["name"]) for name, pid, args in names if name == "thread_name"]
    assert threads == [(0, "compute"), (0, "comm"), (1, "comm"), (1, "host")]
    assert all(r["tid"] > 0 for r in records(pipeline()) if r["ph"] != "M")


def test_a_rank_without_stage_or_with_several() -> None:
    bare = Event(rank=3, lane=COMPUTE, kind="forward", start_s=0, end_s=1)
    assert records([bare])[0]["args"] == {"name": "rank 3"}
    both = [Event(rank=0, lane=COMM, kind="x", start_s=0, end_s=1, stage=s) for s in (4, 0)]
    assert records(both)[0]["args"] == {"name": "rank 0, stages 0 4"}


def test_a_slice_tells_what_it_knows() -> None:
    first = of_phase(pipeline(), "X")[0]
    assert (first["name"], first["cat"], first["ts"], first["dur"]) == ("F 3", "forward", 0, 250000)
    assert first["args"] == {"step": 0, "stage": 0, "microbatch": 3, "version": 2}
    assert first["cname"]
    reduction = next(r for r in of_phase(pipeline(), "X") if r["cat"] == "reduce")
    assert (reduction["ts"], reduction["args"]) == (1e6, {"axis": "data"})


@pytest.mark.parametrize(
    ("kind", "microbatch", "name"),
    [
        ("backward", 0, "B 0"),
        ("weight", 12, "W 12"),
        ("send_backward", 1, "send B 1"),
        ("receive_forward", 2, "receive F 2"),
        ("reduce", -1, "reduce"),
        ("all_gather", -1, "all_gather"),
    ],
)
def test_names_read_well(kind: str, microbatch: int, name: str) -> None:
    one = Event(rank=0, lane=COMM, kind=kind, start_s=0, end_s=1, microbatch=microbatch)
    assert event_name(one) == name


def test_an_arrow_binds_to_slices_without_length() -> None:
    found = records(pipeline())
    (start,), (end,) = ([r for r in found if r["ph"] == phase] for phase in "sf")
    assert (start["id"], start["name"], start["cat"]) == (end["id"], end["name"], end["cat"])
    assert end["bp"] == "e"
    assert found.index(start) < found.index(end)
    for arrow, kind in ((start, "send_forward"), (end, "receive_forward")):
        (piece,) = [r for r in found if r["ph"] == "X" and r["cat"] == kind]
        assert (piece["pid"], piece["tid"]) == (arrow["pid"], arrow["tid"])
        assert piece["ts"] <= arrow["ts"] < piece["ts"] + piece["dur"]
        assert found.index(piece) < found.index(arrow)


def test_an_arrow_points_forward_though_the_receive_was_posted_first() -> None:
    sent = Event(rank=0, lane=COMM, kind="send_backward", start_s=5, end_s=6, flow=0)
    posted = Event(rank=1, lane=COMM, kind="receive_backward", start_s=0, end_s=7, flow=0)
    (start,), (end,) = (of_phase([sent, posted], phase) for phase in "sf")
    assert (start["ts"], end["ts"]) == (5e6, 7e6 - 0.001)


def test_an_arrow_begins_before_it_ends_even_at_one_moment() -> None:
    sent = Event(rank=1, lane=COMM, kind="send_backward", start_s=1, end_s=2, flow=0)
    back = Event(rank=0, lane=COMM, kind="receive_backward", start_s=0, end_s=1 + 1e-9, flow=0)
    arrows = [r for r in records([sent, back]) if r["ph"] in "sf"]
    assert [(r["ph"], r["ts"]) for r in arrows] == [("s", 1e6), ("f", 1e6)]


def test_half_a_message_and_other_events_get_no_arrow() -> None:
    sent = Event(rank=0, lane=COMM, kind="send_forward", start_s=0, end_s=1, flow=4)
    assert of_phase([sent], "s") == []
    got = Event(rank=1, lane=COMM, kind="receive_forward", start_s=0, end_s=1, flow=4)
    other = Event(rank=0, lane=COMM, kind="reduce", start_s=0, end_s=1, flow=4)
    assert [len(of_phase([sent, got, other], phase)) for phase in "sf"] == [1, 1]


def random_trace(seed: int) -> list[Event]:
    noise = random.Random(seed)
    starts = [round(noise.uniform(0, 50), 1) for _ in range(400)]
    return [
        Event(
            rank=noise.randrange(3),
            lane=noise.choice((COMPUTE, COMM, HOST)),
            kind=noise.choice(("forward", "reduce", "agree")),
            start_s=start_s,
            end_s=start_s + noise.choice((0.0, 0.1, 0.3, 2.0)),
            microbatch=index,
        )
        for index, start_s in enumerate(starts)
    ]


def test_slices_of_a_thread_never_overlap() -> None:
    """Perfetto drops those that do."""
    by_thread: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    slices = of_phase(random_trace(0), "X")
    for record in slices:
        by_thread[record["pid"], record["tid"]].append((record["ts"], record["dur"]))
    assert len(slices) == 400
    for pieces in by_thread.values():
        pieces.sort()
        for (ts, dur), (following, _) in pairwise(pieces):
            assert dur > 0
            assert round((ts + dur) * 1000) <= round(following * 1000)
    names = {
        r["args"]["name"] for r in of_phase(random_trace(0), "M") if r["name"] == "thread_name"
    }
    assert {"comm", "comm 2"} <= names


def test_the_same_events_give_the_same_text() -> None:
    events = random_trace(1)
    shuffled = random.Random(2).sample(events, len(events))
    assert chrome_trace(shuffled) == chrome_trace(events)


def test_sub_lanes_take_the_lowest_free_one() -> None:
    assert sub_lanes([(0, 4), (1, 2), (2, 3), (2.5, 5), (4, 6)]) == [0, 1, 1, 2, 0]
    assert sub_lanes([]) == []


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(DataError, match="no events"):
        chrome_trace([])


def save(path: Path, events: list[Event], tail: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(event_to_json(e) + "\n" for e in events) + tail)


def test_a_run_folder_is_read_in_order_of_starts(tmp_path: Path) -> None:
    events = pipeline()
    for rank in (0, 1):
        mine = [e for e in events if e.rank == rank]
        save(tmp_path / "trace" / f"rank{rank}.jsonl", mine[::-1])
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    found = read_trace(tmp_path)
    assert sorted(found, key=events.index) == events
    assert [e.start_s for e in found] == sorted(e.start_s for e in events)
    assert read_trace(tmp_path / "trace") == found
    assert len(read_trace(tmp_path / "trace" / "rank1.jsonl")) == 3


def test_metrics_are_no_events(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(DataError, match=r"holds no \*.jsonl of events; .*trace.enabled"):
        read_trace(tmp_path)
    save(tmp_path / "rank0.jsonl", pipeline()[:1])
    assert read_trace(tmp_path) == pipeline()[:1]


def test_a_resumed_run_keeps_its_messages_apart(tmp_path: Path) -> None:
    for name in ("rank0.jsonl", "rank1.jsonl", "rank0-from-4.jsonl", "rank1-from-4.jsonl"):
        save(tmp_path / name, [e for e in pipeline() if e.rank == int(name[4])])
    flows = sorted(e.flow for e in read_trace(tmp_path) if e.flow >= 0)
    assert len(flows) == 4
    assert (flows[0], flows[2]) == (flows[1], flows[3])
    assert flows[0] != flows[2]


def test_a_half_written_last_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    save(path, pipeline()[:2], tail='{"rank": 0, "la')
    assert read_trace(path) == pipeline()[:2]
    path.write_text("\n".join(map(event_to_json, pipeline()[:2])))
    assert read_trace(path) == pipeline()[:2]  # whole, but for its line end


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ('{"rank": 0, "la', "not a trace event"),
        ("[1, 2]", "not a trace event"),
        ('{"rank": 0, "step": 1}', "missing 4 required"),
        ('{"rank": 0, "lane": "comm", "kind": "x", "start_s": 2, "end_s": 1}', "end_s is 1"),
        ('{"rank": 0, "lane": "comm", "kind": "x", "start_s": "2", "end_s": 1}', "start_s is '2'"),
        ('{"rank": 0, "lane": "comm", "kind": "x", "start_s": NaN, "end_s": 1}', "start_s is nan"),
        ('{"rank": 0.5, "lane": "comm", "kind": "x", "start_s": 0, "end_s": 1}', "rank is 0.5"),
        ('{"rank": 0, "lane": "street", "kind": "x", "start_s": 0, "end_s": 1}', "lane is 'stree"),
        ('{"rank": 0, "lane": "comm", "kind": 3, "start_s": 0, "end_s": 1}', "kind is 3"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, wrong: str) -> None:
    path = tmp_path / "rank0.jsonl"
    good = event_to_json(pipeline()[0])
    path.write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(DataError, match=r"rank0\.jsonl:2: ") as raised:
        read_trace(path)
    assert wrong in str(raised.value)


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no trace at .*nowhere"):
        read_trace(tmp_path / "nowhere")


def test_the_suffix_decides_the_format(tmp_path: Path) -> None:
    events = pipeline()
    write_trace(events, tmp_path / "a.jsonl")
    assert read_trace(tmp_path / "a.jsonl") == events
    write_trace(events, tmp_path / "a.json")
    assert (tmp_path / "a.json").read_text() == chrome_trace(events)
    write_trace(events, tmp_path / "a.svg", title="mine")
    assert "mine" in (tmp_path / "a.svg").read_text()


def test_other_suffixes_and_places_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'a.gif': .*\.jsonl .*\.json .*\.svg .*\.png") as raised:
        write_trace(pipeline(), tmp_path / "a.gif")
    assert "\n" not in str(raised.value)
    with pytest.raises(ConfigError, match=r"cannot write .*No such file"):
        write_trace(pipeline(), tmp_path / "missing" / "a.svg")
