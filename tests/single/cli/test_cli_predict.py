"""Commands that predict: `ganglion schedule`, `ganglion simulate` and `ganglion trace`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ganglion.decide.plan import Plan
from tests.support.answers import TorchlessCommand
from tests.support.answers import ganglion as answer

RUN = """
[model]
layers = 8
[parallel]
pipe = 4
schedule = "{schedule}"
[train]
global_batch_size = 64
microbatch_size = 2
"""
STAGES = """
num_nodes = 1
ranks_per_node = 8
[links.intra]
latency_s = 0.25
bandwidth_gbps = 1e9
[stages]
forward_s = 1.0
backward_s = {backward}
backward_weight_s = 1.0
"""


SPLIT = """
[model]
layers = 4
hidden = 256
heads = 8
vocab_size = 256
[data]
kind = "synthetic"
[train]
global_batch_size = 16
microbatch_size = 2
[parallel]
"""


def ganglion(*words: str, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a command that must end with `code`."""
    result = answer(*words, cwd=cwd)
    assert result.returncode == code, result.stdout + result.stderr
    return result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(RUN.format(schedule="2bw"))
    (tmp_path / "stages.toml").write_text(STAGES.format(backward=1.0))
    plan = Plan(pipe=4, num_microbatches=16, schedule="message_driven")
    (tmp_path / "plan.json").write_text(plan.to_json())
    return tmp_path


def test_schedule_json_has_the_promised_keys(tmp_path: Path) -> None:
    words = ["schedule", "zb", "--stages", "3", "--microbatches", "4", "--json"]
    figures = json.loads(ganglion(*words, cwd=tmp_path).stdout)
    assert {"makespan_s", "bubble", "peak_live", "versions", "staleness", "order"} <= set(figures)
    assert figures["order"][2] == [
        *("2F0", "2B0", "2F1", "2B1", "2F2", "2B2"),
        *("2W0", "2F3", "2B3", "2W1", "2W2", "2W3"),
    ]
    assert figures["bubble"] == pytest.approx(1 - 12 / 14)


def test_whole_backward_is_the_sum_of_its_halves(tmp_path: Path) -> None:
    words = ["schedule", "1f1b", "--stages", "2", "--microbatches", "2", "--json"]
    halves = ["--backward-s", "0.5", "--backward-weight-s", "1.5"]
    figures = json.loads(ganglion(*words, *halves, cwd=tmp_path).stdout)
    assert figures["makespan_s"] == 9


def test_chunks_divide_the_times_of_a_rank(tmp_path: Path) -> None:
    words = ["schedule", "interleaved", "--chunks", "4", "--compare", "1f1b", "--json"]
    interleaved, plain = json.loads(ganglion(*words, cwd=tmp_path).stdout)
    assert interleaved["makespan_s"] == pytest.approx(8 * 3 + 3 * 3 / 4)
    assert plain["makespan_s"] == pytest.approx(8 * 3 + 3 * 3)


def test_default_limit_follows_latency_and_jitter(tmp_path: Path) -> None:
    def limit(*options: str) -> int:
        words = ["schedule", "axonn", "--stages", "4", "--microbatches", "64", "--json", *options]
        return int(json.loads(ganglion(*words, cwd=tmp_path).stdout)["limit"])

    assert limit() == 4 < limit("--latency-s", "0.25") < limit("--latency-s", "3")
    assert limit("--jitter", "0.3") > 4
    assert limit("--limit", "5") == 5


def test_svg_is_a_picture_and_other_suffixes_are_refused(tmp_path: Path) -> None:
    ganglion("schedule", "2bw", "--svg", "picture.svg", cwd=tmp_path)
    root = ElementTree.parse(tmp_path / "picture.svg").getroot()
    assert root.tag.endswith("svg")
    refused = ganglion("schedule", "2bw", "--svg", "picture.pdf", cwd=tmp_path, code=2)
    assert "does not end in .svg" in refused.stderr


def test_simulate_a_run_file_on_a_built_in_cluster(folder: Path) -> None:
    answer = ganglion("simulate", "run.toml", "--cluster", "summit", cwd=folder)
    assert "two_bw" in answer.stdout and "samples/s" in answer.stdout
    figures = json.loads(
        ganglion("simulate", "run.toml", "--cluster", "summit", "--json", cwd=folder).stdout
    )
    assert figures["versions"] == 2 and figures["peak_live"] == [4, 3, 2, 1]
    slot_s = max(f + b for f, b in zip(figures["forward_s"], figures["backward_s"], strict=True))
    assert figures["step_s"] >= 32 * slot_s * 0.999


def test_simulate_takes_keys_of_the_run_file(folder: Path) -> None:
    words = ["simulate", "run.toml", "--cluster", "summit", "--json", "--parallel.pipe", "2"]
    figures = json.loads(ganglion(*words, "--parallel.schedule=gpipe", cwd=folder).stdout)
    assert (figures["schedule"], len(figures["forward_s"])) == ("gpipe", 2)
    words = ["simulate", "plan.json", "--cluster", "stages.toml", "--parallel.pipe", "2"]
    refused = ganglion(*words, cwd=folder, code=2)
    assert "--parallel.pipe is a key of a run file, but plan.json is a plan" in refused.stderr
    refused = ganglion("schedule", "gpipe", "--parallel.pipe", "2", cwd=folder, code=2)
    assert "`memory`, `describe`, `plan` and `why` take those" in refused.stderr


def test_simulate_layers_that_are_split(folder: Path) -> None:
    def figures(parallel: str) -> dict[str, list[float]]:
        (folder / "split.toml").write_text(SPLIT + parallel)
        words = ["simulate", "split.toml", "--cluster", "perlmutter", "--json"]
        found: dict[str, list[float]] = json.loads(ganglion(*words, cwd=folder).stdout)
        return found

    # Rank by rank what a microbatch waits for: less with overlap, least with kept weights.
    waiting, overlapped, kept = (
        figures(f"z = 2\npipe = 2\n{how}")
        for how in ("overlap = false", "", "keep_gathered_mib = 100")
    )
    rows = (waiting["collective_s"], overlapped["collective_s"], kept["collective_s"])
    for slow, quick, quickest in zip(*rows, strict=True):
        assert slow > quick > quickest > 0
    assert waiting["step_s"] > overlapped["step_s"]
    assert figures("data = 2\npipe = 2")["collective_s"] == [0.0, 0.0]
    for axes in ("x = 2", "y = 2\nx = 2", 'x = 2\npipe = 2\nschedule = "interleaved"'):
        assert all(seconds > 0 for seconds in figures(axes)["collective_s"])


def test_simulate_what_is_computed_again(folder: Path) -> None:
    """Some blocks, all, and those that a budget leaves no room for."""
    budget = 'recompute = "budget"\nactivation_mib = 30'
    memory = ['recompute = "none"', budget, 'recompute = "full"', 'recompute = "sqrt"']
    found = []
    for text in memory:
        (folder / "again.toml").write_text(f"{RUN.format(schedule='1f1b')}\n[memory]\n{text}\n")
        shown = ganglion("simulate", "again.toml", "--cluster", "summit", "--json", cwd=folder)
        found.append(json.loads(shown.stdout)["step_s"])
    assert found[0] < found[1] < found[2] == found[3]


def test_simulate_a_plan_with_times_from_the_file(folder: Path) -> None:
    """A.9 item 9 of the AxoNN specification: with a limit of 8 or more it ends after 58.5 s."""
    words = ["simulate", "plan.json", "--cluster", "stages.toml", "--steps", "1", "--json"]
    figures = json.loads(ganglion(*words, cwd=folder).stdout)
    assert figures["limit"] >= 7
    assert figures["makespan_s"] == pytest.approx(58.5, abs=0.5)


def test_simulate_with_troubles(folder: Path) -> None:
    words = ["simulate", "plan.json", "--cluster", "stages.toml", "--steps", "1", "--json"]
    calm = json.loads(ganglion(*words, cwd=folder).stdout)["makespan_s"]
    paused = json.loads(ganglion(*words, "--pause", "3:10:5", cwd=folder).stdout)["makespan_s"]
    slow = json.loads(ganglion(*words, "--slow", "1:2", cwd=folder).stdout)["makespan_s"]
    assert calm + 4 <= paused <= calm + 5.5
    assert slow > 1.7 * calm


@pytest.mark.parametrize("suffix", ["jsonl", "json", "svg"])
def test_traces_of_simulations_are_written_and_read(folder: Path, suffix: str) -> None:
    ganglion("simulate", "run.toml", "--cluster", "summit", "--trace", f"t.{suffix}", cwd=folder)
    text = (folder / f"t.{suffix}").read_text()
    if suffix == "json":
        kinds = {event["ph"] for event in json.loads(text)["traceEvents"]}
        assert {"X", "M", "s", "f"} <= kinds
    elif suffix == "svg":
        assert text.startswith("<svg") or text.startswith("<?xml")
    else:
        answer = ganglion("trace", "t.jsonl", cwd=folder)
        assert "critical path" in answer.stdout.lower()


def test_trace_compares_a_prediction_with_what_happened(folder: Path) -> None:
    (folder / "slower.toml").write_text(STAGES.format(backward=2.0))
    for name in ("stages", "slower"):
        words = ["simulate", "plan.json", "--cluster", f"{name}.toml", "--steps", "1"]
        ganglion(*words, "--trace", f"{name}.jsonl", cwd=folder)
    answer = ganglion("trace", "stages.jsonl", "--against", "slower.jsonl", cwd=folder)
    assert "compute" in answer.stdout


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["schedule", "1f1b", "--stages", "0"], "--stages 0 leaves nothing to do"),
        (["schedule", "2bw", "--microbatches", "3"], "4 + 0 = 4 microbatches"),
        (["schedule", "what"], "is not a schedule"),
        (["schedule", "1f1b", "--chunks", "2"], "one_f_one_b has no chunks"),
        (["schedule", "1f1b", "--forward-s", "-1"], "forward_s is -1"),
        (["schedule", "1f1b", "--compare", "what"], "is not a schedule"),
        (["simulate", "none.toml", "--cluster", "summit"], "none.toml does not exist"),
        (["simulate", "run.toml", "--cluster", "none.toml"], "cluster file none.toml does not"),
        (["simulate", "run.toml"], "Missing option '--cluster'"),
        (["simulate", "run.toml", "--cluster", "laptop"], "layouts of 4 ranks"),
        (["simulate", "plan.json", "--cluster", "summit"], "is a plan, which does not say"),
        (
            ["simulate", "run.toml", "--cluster", "summit", "--trace", "t.pdf"],
            "end it in .jsonl (events), .json",
        ),
        (["simulate", "run.toml", "--cluster", "summit", "--pause", "1:2"], "RANK:START:LENGTH"),
        (["simulate", "run.toml", "--cluster", "summit", "--slow", "9:2"], "rank 9 is none of"),
        (["trace", "none.jsonl"], "none.jsonl"),
        (["trace"], "Missing argument"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_values_end_in_one_line_and_code_2(folder: Path, words: list[str], text: str) -> None:
    refused = ganglion(*words, cwd=folder, code=2)
    shown = " ".join(refused.stderr.replace("│", " ").split())
    assert text in shown
    if "Missing" not in text:  # those are told by the parser, with the usage above
        assert len(refused.stderr.splitlines()) == 1


def test_predictions_do_not_import_torch(folder: Path) -> None:
    torchless = TorchlessCommand()
    for words in (
        ["schedule", "zbv", "--stages", "8", "--microbatches", "32", "--svg", "p.svg"],
        ["simulate", "run.toml", "--cluster", "summit", "--trace", "t.jsonl"],
        ["trace", "t.jsonl"],
    ):
        result = torchless(*words, cwd=folder)
        assert result.returncode == 0, result.stderr


def test_simulate_tells_what_averaging_costs(tmp_path: Path) -> None:
    averaged = RUN.format(schedule="1f1b") + '[averaging]\nmethod = "{}"\ntau = 4\nservers = {}\n'
    words = ("--cluster", "perlmutter", "--json")
    found = {}
    for method, servers in (("none", 0), ("sync_easgd", 0), ("async_sgd", 1)):
        (tmp_path / "run.toml").write_text(averaged.format(method, servers))
        ranks = ("--nproc", str(8 + servers))
        shown = ganglion("simulate", "run.toml", *words, *ranks, cwd=tmp_path)
        found[method] = json.loads(shown.stdout)
    assert found["none"]["averaging"] is None
    for method in ("sync_easgd", "async_sgd"):
        figures = found[method]["averaging"]
        assert figures["num_workers"] == 2
        assert 0 < figures["worker_step_s"] <= found[method]["step_s"] == figures["step_s"]
        assert figures["worker_step_s"] < found["none"]["step_s"]  # it sums no gradients
        assert figures["exchange_s"] > 0
    text = ganglion(
        "simulate", "run.toml", "--cluster", "perlmutter", "--nproc", "9", cwd=tmp_path
    ).stdout
    assert "async_sgd, 2 workers, 1 server: an exchange of" in text
    slow = ("--cluster", "perlmutter", "--nproc", "9", "--slow", "1:2")
    shown = ganglion("simulate", "run.toml", *slow, "--json", cwd=tmp_path)
    slowed = json.loads(shown.stdout)["averaging"]
    usual = found["async_sgd"]["averaging"]
    assert slowed["worker_step_s"] == usual["worker_step_s"]
    assert slowed["step_s"] == pytest.approx(usual["step_s"] + slowed["disturbed_s"])
    assert 0 < slowed["disturbed_s"] < usual["worker_step_s"]
    assert (
        "slow workers and pauses add"
        in ganglion("simulate", "run.toml", *slow, cwd=tmp_path).stdout
    )
    refused = ganglion("simulate", "run.toml", *slow[:-1], "8:2", cwd=tmp_path, code=2)
    assert "rank 8 is none of the plan's ranks 0 to 7" in refused.stderr
