"""The plan: frozen, equal after a round trip through JSON, and never silently ignored."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ganglion.decide.plan import Plan
from ganglion.errors import ConfigError, GanglionError, LayoutError, UnknownKeyError

small = st.integers(1, 4)
plans = st.builds(
    Plan,
    data=small,
    x=small,
    y=small,
    z=small,
    microbatch_size=small,
    num_microbatches=small,
    schedule=st.sampled_from(["gpipe", "two_bw"]),
    precision=st.sampled_from(["fp32", "bf16"]),
    servers=st.integers(0, 2),
)


@given(plans)
def test_json_round_trip(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan


@given(plans)
def test_batch_arithmetic(plan: Plan) -> None:
    assert plan.global_batch_size == (
        plan.microbatch_size * plan.num_microbatches * plan.data * plan.z
    )
    assert plan.num_ranks == plan.data * plan.pipe * plan.x * plan.y * plan.z + plan.servers


def test_stage_boundaries_survive_json() -> None:
    plan = Plan(pipe=3, stage_boundaries=(2, 5))
    assert Plan.from_json(plan.to_json()).stage_boundaries == (2, 5)


def test_plan_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Plan().data = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"data": 0}, "axis data has size 0"),
        ({"microbatch_size": 0}, "microbatch_size is 0"),
        ({"num_microbatches": 0}, "num_microbatches is 0"),
        ({"servers": -1}, "servers is -1"),
        ({"precision": "fp8"}, "precision 'fp8' is not one of"),
        ({"recompute": "block"}, r"memory.recompute = 'block' is not one of \['none', 'full', 's"),
        ({"recompute_every": 2}, "memory.recompute_every = 2 is for memory.recompute = 'full'"),
        ({"recompute": "full", "recompute_every": -1}, "memory.recompute_every = -1"),
        ({"recompute_blocks": ("1",)}, r"memory.recompute_blocks = \('1',\) is for .* 'blocks'"),
        ({"recompute": "blocks", "recompute_blocks": ("2-1",)}, "'2-1', which is no block"),
        ({"recompute": "blocks", "recompute_blocks": ("b",)}, "'b', which is no block"),
        ({"recompute": "blocks", "recompute_blocks": ("1-3", "3")}, "no block may be in two"),
        ({"recompute": "budget"}, r"memory.activation_mib = 0.0: set it"),
        ({"activation_mib": 4.0}, "memory.activation_mib = 4.0 is for memory.recompute = 'budget'"),
        ({"offload_activations": "tape"}, "memory.offload_activations = 'tape' is not one of"),
        ({"offload": "tape"}, r"memory.offload = 'tape' is not one of \['none', 'host', 'disk'\]"),
        ({"pipe": 3, "stage_boundaries": (1,)}, "has 1 cuts, but pipe=3 stages need 2"),
        ({"pipe": 3, "stage_boundaries": (2, 2)}, "must rise strictly"),
    ],
)
def test_impossible_plans_are_refused(fields: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Plan(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["none", "sync_easgd", "diloco", "hogwild_easgd"])
def test_servers_without_a_served_centre_are_refused(method: str) -> None:
    text = rf"averaging.servers = 2, but averaging.method = '{method}' needs none"
    with pytest.raises(ConfigError, match=text):
        Plan(servers=2, averaging=method).require_built()


def test_what_is_built_is_not_refused() -> None:
    Plan(data=2, averaging="async_easgd", servers=2).require_built()
    Plan(data=4, num_microbatches=3, precision="bf16").require_built()
    Plan(data=2, pipe=3, num_microbatches=3, schedule="two_bw").require_built()
    Plan(recompute="full").require_built()
    Plan(offload="disk").require_built()
    Plan(x=2, y=2, z=2, pipe=2).require_built()


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("{", ConfigError, "my.json is not JSON"),
        ("[]", ConfigError, "not a plan of format 1"),
        ('{"format": 2}', ConfigError, "not a plan of format 1"),
        ('{"format": 1, "dat": 2}', UnknownKeyError, "unknown field 'dat'"),
        ('{"format": 1, "data": "2"}', ConfigError, "data must be of type int"),
        ('{"format": 1, "data": true}', ConfigError, "data must be of type int"),
        ('{"format": 1, "rank_order": "x"}', ConfigError, "rank_order must be a list of str"),
        ('{"format": 1, "data": 0}', LayoutError, "axis data has size 0"),
    ],
)
def test_bad_plan_files(text: str, kind: type[GanglionError], message: str) -> None:
    with pytest.raises(kind, match=message):
        Plan.from_json(text, "my.json")


def test_every_field_is_in_the_file() -> None:
    record = json.loads(Plan().to_json())
    assert set(record) == {"format", *(field.name for field in dataclasses.fields(Plan))}


def test_a_plan_from_words() -> None:
    words = ["data=2", "pipe=3", "schedule=two_bw", "stage_boundaries=1,4", "precision=bf16"]
    plan = Plan.from_arguments(words, global_batch_size=24, microbatch_size=3)
    assert plan == Plan(
        data=2,
        pipe=3,
        schedule="two_bw",
        stage_boundaries=(1, 4),
        precision="bf16",
        microbatch_size=3,
        num_microbatches=4,
    )
    for layout in ([], ["data=2"], ["z=4"]):
        one = Plan.from_arguments(layout, global_batch_size=24, microbatch_size=3)
        assert one.global_batch_size == 24


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["dat=2"], "'dat=2' is not field=value of a plan"),
        (["data"], "'data' is not field=value"),
        (["num_microbatches=2"], "is not field=value"),
        (["data=two"], "data='two' is not a number"),
        (["data=5"], r"a global batch of 24 cannot be cut .* data \* z = 5"),
        (["data=0"], "data \\* z = 0"),
    ],
)
def test_bad_words_are_refused(words: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Plan.from_arguments(words, global_batch_size=24, microbatch_size=3)
