"""`ganglion clusters`: the table, one file, and names that are not there; without torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ganglion.decide.costs import builtin_clusters, builtin_text, find_cluster
from tests.support.answers import TorchlessCommand


@pytest.fixture
def torchless() -> TorchlessCommand:
    return TorchlessCommand()


def test_the_table_has_every_cluster_and_where_it_is_from(
    tmp_path: Path, torchless: TorchlessCommand
) -> None:
    result = torchless("clusters", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for name in builtin_clusters():
        assert f" {name} " in result.stdout
        paragraph = builtin_text(name).split("\n#\n")[0]
        words = " ".join(line.removeprefix("# ") for line in paragraph.splitlines())
        assert f"{name}: {words}" in result.stdout


def test_json_has_the_numbers_of_the_files(tmp_path: Path, torchless: TorchlessCommand) -> None:
    records = json.loads(torchless("clusters", "--json", cwd=tmp_path).stdout)
    assert [one["name"] for one in records] == builtin_clusters()
    for one in records:
        cluster = find_cluster(one["name"])
        assert one["ranks_per_node"] == cluster.ranks_per_node
        assert one["fp32_tflops"] == cluster.require_compute().fp32_tflops
        for name, link in (("intra_gbps", cluster.intra), ("inter_gbps", cluster.inter)):
            assert one[name] == (None if link is None else link.bandwidth_gbps)
    assert json.loads(torchless("clusters", "summit", "--json", cwd=tmp_path).stdout) in records


def test_one_name_prints_its_file(tmp_path: Path, torchless: TorchlessCommand) -> None:
    result = torchless("clusters", "summit", cwd=tmp_path)
    assert result.stdout.rstrip() == builtin_text("summit").rstrip()


def test_a_wrong_name_gets_the_nearest(tmp_path: Path, torchless: TorchlessCommand) -> None:
    result = torchless("clusters", "sumit", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr == ("error: 'sumit' is no built-in cluster: did you mean 'summit'?\n")
