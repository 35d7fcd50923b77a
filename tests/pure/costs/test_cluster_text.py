"""A written cluster file reads back as the same cluster, with its comments in place."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ganglion.decide.costs import (
    Cluster,
    builtin_clusters,
    builtin_text,
    cluster_text,
    find_cluster,
    parse_cluster,
)
from ganglion.decide.costs.cluster import (
    Compute,
    Link,
    PrefixRates,
    Runtime,
    StageTable,
    Tier,
)
from ganglion.errors import ConfigError

WHOLE = Cluster(
    source="whole",
    name='two "boxes"',
    num_nodes=2,
    ranks_per_node=4,
    price_per_hour=2.5,
    compute=Compute(
        fp32_tflops=15.7,
        bf16_tflops=125.0,
        efficiency=0.5,
        memory_gib=16.0,
        memory_bandwidth_gbps=7200.0,
        activation_gbps=5000.0,
        update_gbps=6000.0,
        jitter=0.1,
        block_s=1e-5,
        update_s=2e-5,
        action_s=3e-5,
    ),
    intra=Link(latency_s=1.2e-5, bandwidth_gbps=220.0),
    inter=Link(
        latency_s=1.4e-5,
        bandwidth_gbps=103.0,
        collective_gbps=300.0,
        bucket_gbps=350.0,
        collective_latency_s=0.0,
        collective_s=5e-5,
        shared=True,
    ),
    tiers={"host": Tier(read_gbps=90.0, write_gbps=80.0)},
    runtime=Runtime(overlaps_messages=False, overlaps_collectives=False, shares_pieces=True),
    prefix_rates=PrefixRates(inter_gbps=640.0, intra_gbps={(1, 2): 608.0, (2, 4): 300.0}),
    stages=StageTable(forward_s=(1.0, 1.2), backward_s=2.0),
)


def test_everything_reads_back() -> None:
    assert parse_cluster(cluster_text(WHOLE), "whole") == WHOLE


@pytest.mark.parametrize("name", builtin_clusters())
def test_built_in_clusters_read_back(name: str) -> None:
    cluster = find_cluster(name)
    assert parse_cluster(cluster_text(cluster), cluster.source) == cluster


def test_comments_stand_beside_their_values_and_on_top() -> None:
    text = cluster_text(
        WHOLE, head=["measured", "", "twice"], comments={"compute.efficiency": "of products"}
    )
    assert text.startswith("# measured\n#\n# twice\n\nname = ")
    (line,) = [one for one in text.splitlines() if one.startswith("efficiency")]
    assert line.endswith("# of products")
    assert parse_cluster(text, "whole") == WHOLE


def test_defaults_are_left_out() -> None:
    text = cluster_text(replace(WHOLE, runtime=Runtime(), stages=None, tiers={}))
    assert "[runtime]" not in text and "[tiers" not in text and "[stages]" not in text


def test_a_built_in_file_is_found_by_name_alone() -> None:
    assert builtin_text("laptop").startswith("#")
    with pytest.raises(
        ConfigError, match=r"'labtop' is no built-in cluster: did you mean 'laptop'\?"
    ):
        builtin_text("labtop")
