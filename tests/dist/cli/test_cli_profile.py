"""`ganglion profile` on real ranks: the file it writes is used, and runs make it better."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ganglion.decide.costs import cluster_text, find_cluster, read_cluster
from ganglion.decide.predict import scaled_compute
from tests.support.answers import ganglion as answer
from tests.support.command import TINY, ganglion, under_torchrun

RUN = """
[model]
layers = 2
hidden = 64
heads = 2
vocab_size = 256
[data]
kind = "synthetic"
seq_len = 32
[parallel]
pipe = 2
[train]
global_batch_size = 16
microbatch_size = 2
"""


def test_a_quick_profile_gives_a_file_that_simulate_takes(tmp_path: Path) -> None:
    done = ganglion(
        *("profile", "--quick", "--nproc", "2", "--write", "my.toml", "--json"),
        *("--cluster-name", "test box"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    cluster = read_cluster(tmp_path / "my.toml")
    compute = cluster.require_compute()
    assert cluster.name == "test box" and cluster.ranks_per_node == 2 and cluster.num_nodes == 1
    assert compute.fp32_tflops == record["cluster"]["compute"]["fp32_tflops"] > 0
    assert 0 < compute.efficiency <= 1
    assert cluster.intra is not None and cluster.intra.bandwidth_gbps > 0
    assert set(cluster.tiers) == {"host", "disk"}
    kinds = {one["kind"] for errors in record["errors"].values() for one in errors}
    assert {"forward", "backward", "update", "action", "message", "all-reduce"} <= kinds
    assert {(one["precision"], one["rank"]) for one in record["products"]} == {
        (precision, rank) for precision in ("fp32", "bf16") for rank in (0, 1)
    }
    head = (tmp_path / "my.toml").read_text().split("\nname = ")[0]
    assert "2 ranks on cpu" in head and "compute, forward" in head
    (tmp_path / "run.toml").write_text(RUN)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my.toml", "run.toml"]
    simulated = answer("simulate", "run.toml", "--cluster", "my.toml", "--json", cwd=tmp_path)
    assert simulated.returncode == 0, simulated.stderr
    assert json.loads(simulated.stdout)["step_s"] > 0


def test_a_run_corrects_a_wrong_file(tmp_path: Path) -> None:
    done = ganglion(
        *("train", "--nproc", "2", *TINY, "--model.vocab_size", "256", "--parallel.pipe", "2"),
        # Enough work that it shows beside what Python takes.
        *("--model.layers", "2", "--model.hidden", "128", "--data.seq_len", "64"),
        *("--train.steps", "12", "--output.dir", "run", "--output.sample_tokens", "0"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    wrong = scaled_compute(find_cluster("laptop"), 100.0)
    (tmp_path / "wrong.toml").write_text(cluster_text(replace(wrong, name="wrong")))
    refined = answer(
        *("profile", "--from", "run", "--base", "wrong.toml", "--write", "better.toml", "--json"),
        cwd=tmp_path,
    )
    assert refined.returncode == 0, refined.stderr
    record = json.loads(refined.stdout)
    assert "computation" in {one["group"] for one in record["changes"]}
    assert record["error_before"] > 5  # far too slow
    assert abs(record["error_after"]) < 0.2 * record["error_before"]
    better = read_cluster(tmp_path / "better.toml")
    assert better.require_compute().efficiency == record["compute"]["efficiency"]
    assert (
        "refined by `ganglion profile --from` with the run run"
        in (tmp_path / "better.toml").read_text()
    )
    # Once more, from the better file: little is left to change.
    again = answer("profile", "--from", "run", "--base", "better.toml", "--json", cwd=tmp_path)
    record_again = json.loads(again.stdout)
    for change in record_again["changes"]:
        assert 0.9 < change["factor"] < 1.1, change


def test_people_see_what_changed(tmp_path: Path) -> None:
    done = answer("profile", "--from", "nowhere", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "error: nowhere holds no run: it has no run.toml; check the path\n"


def test_a_folder_that_is_not_there_is_refused_before_measuring(tmp_path: Path) -> None:
    done = answer("profile", "--write", "no/my.toml", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "error: --write no/my.toml: the folder no does not exist: make it, or name another file\n"
    )


@pytest.mark.slow
def test_ranks_of_torchrun_measure_together_and_the_first_writes(tmp_path: Path) -> None:
    options = ("--quick", "--write", "my.toml", "--json")
    done = under_torchrun(2, "-m", "ganglion", "profile", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["cluster"]["ranks_per_node"] == 2  # printed once
    assert read_cluster(tmp_path / "my.toml").intra is not None


def test_a_launcher_has_decided_about_the_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    done = answer("profile", "--nproc", "4", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "error: --nproc 4, but torchrun has started 2 processes already: leave out --nproc\n"
    )
