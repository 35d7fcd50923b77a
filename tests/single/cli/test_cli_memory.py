"""`ganglion memory`: the table, the picture, what fits, and what is refused."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ganglion.decide.config import expected_shape, load_run_file, read_toml
from ganglion.decide.config.resolve import resolve
from ganglion.decide.plan import Plan
from ganglion.decide.predict import predicted_memory, state_rules
from tests.support.answers import TorchlessCommand
from tests.support.answers import ganglion as answer

RUN = """
[model]
layers = 8
[parallel]
pipe = 4
schedule = "2bw"
[train]
global_batch_size = 64
microbatch_size = 2
"""
CLUSTER = """
name = "box"
num_nodes = 1
ranks_per_node = 8
[compute]
fp32_tflops = 1.0
bf16_tflops = 1.0
efficiency = 0.5
memory_gib = {memory_gib}
[links.intra]
latency_s = 1e-6
bandwidth_gbps = 10
"""
STAGES = """
num_nodes = 1
ranks_per_node = 4
[stages]
forward_s = 1.0
backward_s = 1.0
[links.intra]
latency_s = 1e-6
bandwidth_gbps = 10
"""


def ganglion(*words: str, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run `ganglion memory`, which must end with `code`."""
    result = answer("memory", *words, cwd=cwd)
    assert result.returncode == code, result.stdout + result.stderr
    return result


def figures(*words: str, cwd: Path, code: int = 0) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(ganglion(*words, "--json", cwd=cwd, code=code).stdout)
    return answer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "plan.json").write_text(
        Plan(pipe=2, x=2, microbatch_size=4, num_microbatches=16, recompute="full").to_json()
    )
    (tmp_path / "small.toml").write_text(CLUSTER.format(memory_gib=0.03))
    (tmp_path / "large.toml").write_text(CLUSTER.format(memory_gib=16))
    (tmp_path / "stages.toml").write_text(STAGES)
    return tmp_path


def test_json_has_the_bytes_of_the_model(folder: Path) -> None:
    found = figures("run.toml", cwd=folder)
    assert (found["budget_bytes"], found["fits"], found["num_ranks"]) == (None, None, 4)
    run = load_run_file(read_toml(folder / "run.toml"))
    wanted = predicted_memory(expected_shape(run), resolve(run), state_rules(run))
    by_pipe = {pipe: row for row in found["rows"] for pipe in row["pipe"]}
    for pipe, held in enumerate(wanted):
        assert by_pipe[pipe]["total_bytes"] == held.total == sum(by_pipe[pipe]["bytes"].values())
        assert by_pipe[pipe]["bytes"]["activations"] == held.activations


def test_equal_ranks_are_one_row(folder: Path) -> None:
    rows = figures("run.toml", "--parallel.schedule", "gpipe", "--nproc", "8", cwd=folder)["rows"]
    assert sorted(rank for row in rows for rank in row["ranks"]) == list(range(8))
    assert len(rows) < 8 and all(len(row["ranks"]) >= 2 for row in rows)
    one = figures("run.toml", "--parallel.pipe", "1", "--nproc", "4", cwd=folder)["rows"]
    assert [row["ranks"] for row in one] == [[0, 1, 2, 3]]


def test_table_and_picture(folder: Path) -> None:
    shown = ganglion("run.toml", "--memory.recompute", "full", cwd=folder).stdout
    lines = shown.splitlines()
    assert "two_bw" in lines[0] and "recompute full" in lines[0]
    heads = ["ranks", "weights", "versions", "grads", "moments", "live", "again", "comm"]
    assert lines[1].split() == [*heads, "scratch", "MiB"]
    bar = next(line for line in lines if "WW" in line)
    letters = list(bar.split()[1])
    assert letters == sorted(letters, key="WVGMARCS".index)
    row = figures("run.toml", "--memory.recompute", "full", cwd=folder)["rows"][0]
    for letter, name in (("W", "weights"), ("G", "gradients"), ("M", "moments")):
        share = row["bytes"][name] / row["total_bytes"]
        assert letters.count(letter) == pytest.approx(share * len(letters), abs=1.5)
    assert max(map(len, lines[1:6])) <= 80
    assert "--cluster FILE says whether that fits" in lines[-1]


def test_numbers_of_the_table_add_up(folder: Path) -> None:
    lines = ganglion("run.toml", "--model.hidden", "1024", cwd=folder).stdout.splitlines()
    for line in lines[2:6]:
        *parts, total = [float(word.replace("-", "0")) for word in line.split()[1:]]
        assert sum(parts) == pytest.approx(total, rel=0.02)


def test_what_fits_and_what_does_not(folder: Path) -> None:
    fits = ganglion("run.toml", "--cluster", "large.toml", cwd=folder).stdout
    assert "fits: " in fits and "compute.memory_gib = 16.0 GiB of large.toml" in fits
    assert "|=memory_gib" in fits and "...|" in fits
    over = ganglion("run.toml", "--cluster", "small.toml", cwd=folder, code=1).stdout
    assert "does not fit: " in over and "more than compute.memory_gib" in over
    found = figures("run.toml", "--cluster", "small.toml", cwd=folder, code=1)
    assert found["fits"] is False and found["budget_bytes"] == round(0.03 * 2**30)


def test_the_remedy_is_one_that_helps(folder: Path) -> None:
    """Between what recomputation needs and what the plan needs without, it is recomputation."""
    words = ["run.toml", "--train.microbatch_size", "16", "--train.global_batch_size", "128"]
    need = [
        max(row["total_bytes"] for row in figures(*words, *more, cwd=folder)["rows"])
        for more in ([], ["--memory.recompute", "full"])
    ]
    assert need[1] < need[0]
    (folder / "between.toml").write_text(CLUSTER.format(memory_gib=sum(need) / 2 / 2**30))
    over = ganglion(*words, "--cluster", "between.toml", cwd=folder, code=1).stdout
    assert 'set memory.recompute = "full", which needs' in over
    ganglion(*words, "--cluster", "between.toml", "--memory.recompute", "full", cwd=folder)


def test_a_cluster_of_times_alone_has_nothing_to_compare_with(folder: Path) -> None:
    shown = ganglion("run.toml", "--cluster", "stages.toml", cwd=folder).stdout
    assert "has no compute.memory_gib to compare with" in shown


def test_a_plan_decides_the_layout(folder: Path) -> None:
    words = ["run.toml", "--plan", "plan.json"]
    found = figures(*words, cwd=folder)
    assert (found["num_ranks"], found["schedule"], found["recompute"]) == (4, "one_f_one_b", "full")
    assert [row["pipe"] for row in found["rows"]] == [[0], [1]]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "Missing argument"),
        (["none.toml"], "run file none.toml does not exist"),
        (["plan.json"], "is a plan, which does not say how large the model is"),
        (["run.toml", "--cluster", "none.toml"], "cluster file none.toml does not"),
        (["run.toml", "--cluster", "laptop"], "layouts of 4 ranks"),
        (["run.toml", "--plan", "none.json"], "--plan none.json cannot be read"),
        (["run.toml", "--plan", "plan.json", "--parallel.x", "2"], "contradict each other"),
        (["run.toml", "--parallel.x", "3"], "model.heads = 4 cannot be split over parallel.x"),
        (["run.toml", "--model.heads", "3", "--model.hidden", "48", "--parallel.x", "3"], "256"),
        (["run.toml", "--model.build", "a:b"], "is code of your own, whose size cannot be known"),
        (["run.toml", "--data.kind", "dataset"], 'data.kind = "dataset" is code of your own'),
        (["run.toml", "--parallel.schedule", "what"], "is not a schedule"),
        (["run.toml", "--model.layer", "2"], "did you mean 'model.layers'"),
        (["run.toml", "--memory.offload", "tape"], "memory.offload = 'tape'"),
        (["run.toml", "--nproc", "6"], "6 processes cannot hold"),
        (["run.toml", "--nothing"], "No such option"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_values_end_in_one_line_and_code_2(folder: Path, words: list[str], text: str) -> None:
    refused = ganglion(*words, cwd=folder, code=2)
    assert text in " ".join(refused.stderr.split())
    if text not in ("Missing argument", "No such option"):  # those are told by the parser
        assert len(refused.stderr.splitlines()) == 1


def test_torch_is_not_imported(folder: Path) -> None:
    words = ["memory", "run.toml", "--cluster", "summit", "--model.layers", "96"]
    layout = ["--parallel.pipe", "32", "--parallel.data", "8", "--train.global_batch_size", "4096"]
    result = TorchlessCommand()(*words, *layout, cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr


def test_who_serves_a_centre_has_a_row_of_its_own(folder: Path) -> None:
    """The first of four workers holds what it serves; with a server, that does and no worker."""
    averaging = ["--parallel.pipe", "1", "--parallel.schedule", "gpipe"]
    averaging += ["--averaging.method", "async_easgd"]
    first, others = figures("run.toml", *averaging, "--nproc", "4", cwd=folder)["rows"]
    assert (first["ranks"], others["ranks"]) == ([0], [1, 2, 3])
    weights = first["bytes"]["weights"]
    assert others["bytes"]["center"] == 2 * weights
    assert first["bytes"]["center"] == (2 + 3 + 4) * weights
    averaging += ["--averaging.servers", "1", "--nproc", "5"]
    workers, server = figures("run.toml", *averaging, cwd=folder)["rows"]
    assert (workers["ranks"], server["ranks"], server["pipe"]) == ([0, 1, 2, 3], [4], [])
    assert workers["bytes"] == others["bytes"]
    assert server["bytes"]["center"] == (3 + 4) * weights
    assert "0-3" in ganglion("run.toml", *averaging, cwd=folder).stdout
