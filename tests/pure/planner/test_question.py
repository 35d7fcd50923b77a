"""What a planner is asked: fields that are fixed, and questions that make no sense."""

from __future__ import annotations

import pytest

from ganglion.decide.costs import find_cluster
from ganglion.decide.planner import Question, parse_fixed
from ganglion.decide.shapes import GPTShape
from ganglion.errors import ConfigError, LayoutError, UnknownKeyError
from ganglion.units import GIB

SMALL = GPTShape(
    vocab_size=512,
    seq_len=64,
    num_layers=6,
    hidden=64,
    num_heads=4,
    num_kv_heads=4,
    head_size=16,
    mlp_hidden=256,
)


def test_fields_are_read_as_their_own_types() -> None:
    text = (
        "pipe=6,data=8,order=pipe-data,schedule=axonn|2bw,microbatch=8,overlap=false,bucket_mib=2"
    )
    assert parse_fixed(text) == {
        "pipe": (6,),
        "data": (8,),
        "rank_order": (("x", "y", "z", "pipe", "data"),),
        "schedule": ("message_driven", "two_bw"),
        "microbatch_size": (8,),
        "overlap": (False,),
        "bucket_mib": (2.0,),
    }
    assert parse_fixed("") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pip=6", "did you mean 'pipe'"),
        ("pipe", "'pipe' is not field=value of a plan"),
        ("pipe=", "is not field=value of a plan"),
        ("pipe=six", "--fix pipe=six: 'six' is not a number"),
        ("order=pipe-dta", "--fix order=pipe-dta must name axes of"),
        ("order=data-data", "each once"),
        ("schedule=1f2b", "--fix schedule = '1f2b' is not a schedule; did you mean '1f1b'"),
        ("num_microbatches=4", "follows from --batch, data, z and microbatch"),
        ("pipe=0", "--fix pipe=0: a size must be at least 1"),
        ("microbatch=4|-2", "--fix microbatch=-2: a size must be at least 1"),
        ("overlap=perhaps", "'perhaps' is not true or false"),
    ],
)
def test_wrong_fields_are_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_fixed(text)
    assert message in str(caught.value)
    if "did you mean 'pipe'" in message:
        assert isinstance(caught.value, UnknownKeyError)


def ask(**changes: object) -> Question:
    fields = {
        "shape": SMALL,
        "name": "small",
        "cluster": find_cluster("laptop"),
        "num_ranks": 2,
        "global_batch_size": 16,
        "memory_bytes": 4 * GIB,
        **changes,
    }
    return Question(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_ranks": 0}, "--gpus 0: a plan needs at least 1"),
        ({"global_batch_size": -4}, "--batch -4: a plan needs at least 1"),
        ({"max_staleness": -1}, "--max-staleness -1"),
        ({"num_ranks": 3}, "--gpus 3, but laptop.toml has cluster.num_nodes * ranks_per_node"),
    ],
)
def test_questions_without_sense_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        ask(**changes)
    assert message in str(caught.value)


def test_a_precision_is_chosen_by_the_speed_of_the_devices() -> None:
    assert ask().precisions == ("fp32",)
    assert ask(cluster=find_cluster("summit")).precisions == ("bf16_master",)
    assert ask(fixed={"precision": ("bf16",)}).precisions == ("bf16",)
