"""The run file: reading, overriding, writing, and refusing what cannot work."""

from __future__ import annotations

import itertools
import tomllib
import typing
from pathlib import Path

import pytest

from ganglion.decide.config import (
    AveragingSection,
    Override,
    RunFile,
    check_plan,
    known_keys,
    load_run_file,
    model_shape,
    read_toml,
    render_run_file,
    resolve,
)
from ganglion.decide.config.files import QUICKSTART, recipe
from ganglion.decide.config.tensor_checks import check_vocabulary
from ganglion.decide.plan import AVERAGINGS, Plan
from ganglion.errors import ConfigError, GanglionError, LayoutError, UnknownKeyError

HUGGING_FACE = "ganglion.execute.models.hugging_face:build"


def load(*overrides: tuple[str, str], **tables: object) -> RunFile:
    return load_run_file(tables, [Override(*pair) for pair in overrides])


def test_rendered_file_reads_back_equal() -> None:
    file = load(
        ("model.args.width", "8"),
        ("parallel.stage_boundaries", "[1, 3]"),
        ("output.sample_prompt", 'say "hi"\n'),
        ("output.dir", "\U0001f9e0 \u00fc \\ " + "".join(map(chr, [*range(32), 0x7F, 0x85]))),
        parallel={"pipe": 3},
        data={"args": {"\U0001f9e0\x7f": "\U0001f9e0\x7f"}},
    )
    assert load_run_file(tomllib.loads(render_run_file(file))) == file


def test_every_key_is_rendered_with_a_comment() -> None:
    lines = render_run_file(RunFile()).splitlines()
    keys = [key.split(".")[1] for key in known_keys()]
    rendered = list(itertools.pairwise(lines))
    for key in keys:
        comments = [before for before, line in rendered if line.startswith(f"{key} = ")]
        assert comments and all(len(c) > 4 and c.startswith("# ") for c in comments), key
    assert "None" not in "".join(lines)


def test_quickstart_is_a_valid_run_file() -> None:
    file = load_run_file(recipe(QUICKSTART))
    for processes in (1, 2):
        assert resolve(file, processes).data == processes


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("train.steps", "30", 30),
        ("optimizer.lr", "1e-4", 1e-4),
        ("trace.enabled", "false", False),
        ("output.dir", "2024", "2024"),
        ("output.dir", "a b", "a b"),
        ("data.kind", "synthetic", "synthetic"),
        ("parallel.data", "auto", "auto"),
        ("parallel.data", "2", 2),
        ("parallel.stage_boundaries", "[1, 2]", [1, 2]),
    ],
)
def test_override_values(key: str, text: str, value: object) -> None:
    section, name = key.split(".")
    assert getattr(getattr(load((key, text)), section), name) == value


def test_override_wins_over_the_file() -> None:
    assert load(("train.steps", "7"), train={"steps": 5, "seed": 3}).train.steps == 7


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        ({"train": {"stpes": 3}}, "unknown key 'train.stpes'; did you mean 'train.steps'"),
        ({"train": {"lr": 3}}, "unknown key 'train.lr'; did you mean 'optimizer.lr'"),
        ({"tarin": {}}, r"unknown key 'tarin'; did you mean \[train\]"),
        ({"model": {"qqqq": 1}}, "the keys there are"),
        ({"zzz": {}}, "the sections are"),
    ],
)
def test_unknown_keys_name_the_nearest(tables: dict[str, object], text: str) -> None:
    with pytest.raises(UnknownKeyError, match=text):
        load_run_file(tables)


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        ({"train": {"steps": "many"}}, "train.steps = 'many' cannot be used"),
        ({"train": {"steps": 0}}, "train.steps = 0 cannot be used: .*greater than or equal to 1"),
        ({"model": {"kind": "rnn"}}, "model.kind = 'rnn' cannot be used: .*'gpt'"),
        ({"train": 3}, "train = 3 cannot be used"),
        ({"parallel": {"data": "x"}}, "parallel.data = 'x' cannot .* integer, .* or .*'auto'"),
        ({"parallel": {"data": 0}}, "parallel.data = 0 cannot .* greater than or equal to 1"),
        ({"parallel": {"stage_boundaries": [1, "a"]}}, r"stage_boundaries.1 = 'a' cannot be used"),
        ({"model": {"args": {"w": []}}}, r"model.args.w = \[\] cannot be used"),
        ({"output": {"sample_prompt": ""}}, "output.sample_prompt = '' .* at least 1 character"),
    ],
)
def test_bad_values_name_the_key(tables: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_run_file(tables)


@pytest.mark.parametrize("tables", [{}, {"train": {"steps": 5}}], ids=str)
def test_a_key_below_a_plain_value_is_refused(tables: dict[str, object]) -> None:
    text = "--train.steps.x: train.steps is not a table of keys; write --train.steps 3"
    with pytest.raises(ConfigError, match=text):
        load(("train.steps.x", "3"), **tables)
    with pytest.raises(ConfigError, match=r"model\.args is not a table"):
        load(("model.args.x", "3"), model={"args": 3})


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read_toml(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[model\n")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        read_toml(tmp_path / "bad.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_toml(tmp_path)


def test_data_axis_is_what_the_processes_leave() -> None:
    assert resolve(load(), 4).data == 4
    assert resolve(load(parallel={"pipe": 2}), 4).data == 2
    assert resolve(load()).data == 1
    assert resolve(load(parallel={"data": 2})).num_ranks == 2


def test_microbatches_are_derived() -> None:
    file = load(train={"global_batch_size": 24, "microbatch_size": 3})
    assert resolve(file, 2).num_microbatches == 4


@pytest.mark.parametrize(
    ("tables", "processes", "text"),
    [
        ({"parallel": {"data": 2}}, 3, r"= 2 \* 1 \+ 0 = 2 processes, but 3 were started"),
        ({"parallel": {"pipe": 2}}, 3, r"cannot hold .* = 2 ranks a replica: start 4 "),
        (
            {"train": {"global_batch_size": 10, "microbatch_size": 4}},
            2,
            r"train.global_batch_size = 10 is not a multiple of .* = 4 \* 2 = 8: set .* = 16",
        ),
        ({"model": {"hidden": 10, "heads": 4}}, 1, "model.hidden = 10 is not a multiple of"),
        ({"model": {"heads": 4, "kv_heads": 3}}, 1, "model.heads = 4 is not a multiple of"),
        ({"model": {"heads": 1, "hidden": 5}}, 1, "model.head_size = 5 is odd"),
        (
            {"model": {"layers": 1}, "parallel": {"pipe": 5}},
            5,
            "parallel.pipe = 5 makes 5 stages, but the model has 4 blocks",
        ),
        (
            {"model": {"layers": 1}, "parallel": {"pipe": 2, "stage_boundaries": [4]}},
            2,
            "cuts after the last of 4 blocks",
        ),
        ({"parallel": {"x": 3}}, 3, "model.heads = 4 cannot be split over parallel.x = 3"),
        (
            {
                "model": {"build": HUGGING_FACE, "args": {"model_type": "gpt2", "n_head": 6}},
                "parallel": {"x": 4},
            },
            4,
            r"model\.args\.n_head = 6 cannot be split over parallel\.x = 4: choose a multiple of 4",
        ),
        ({"parallel": {"y": 5}}, 5, "model.hidden = .* cannot be split over parallel.y = 5"),
        (
            {"model": {"kind": "mlp", "hidden": 9}, "parallel": {"x": 2}},
            2,
            "model.hidden = 9 cannot be split over parallel.x = 2",
        ),
        (
            {"model": {"kind": "conv"}, "parallel": {"x": 4}},
            4,
            r'layer of model.kind = "conv", = 6 cannot be split over parallel.x = 4',
        ),
        ({"train": {"steps": 5, "stop_at": 6}}, 1, "train.stop_at = 6 lies beyond train.steps = 5"),
        ({"parallel": {"schedule": "1f2b"}}, 1, "parallel.schedule = '1f2b' is not a schedule"),
    ],
)
def test_impossible_layouts_are_refused_with_numbers(
    tables: dict[str, object], processes: int, text: str
) -> None:
    with pytest.raises(GanglionError, match=text):
        resolve(load_run_file(tables), processes)


def test_axes_that_fit_every_layer_are_taken() -> None:
    """The layers of the conv net give 6 and 120 outputs over x, 16 and 84 over y."""
    tables = {"model": {"kind": "conv"}, "parallel": {"x": 3, "y": 4}}
    assert resolve(load_run_file(tables), 12).num_ranks == 12
    two_layers = {"model": {"kind": "mlp", "layers": 2, "hidden": 9}, "parallel": {"y": 2}}
    assert resolve(load_run_file(two_layers), 2).y == 2


def test_a_vocabulary_of_the_data_must_fit_x() -> None:
    check_vocabulary(66, Plan(x=2))
    with pytest.raises(LayoutError, match=r"the data .* = 65 cannot be split over parallel.x = 2"):
        check_vocabulary(65, Plan(x=2))


def test_schedule_aliases() -> None:
    for alias, name in (("1F1B", "one_f_one_b"), ("2bw", "two_bw"), ("axonn", "message_driven")):
        assert resolve(load(parallel={"schedule": alias})).schedule == name


def test_reserved_sections_reach_the_plan() -> None:
    plan = resolve(load(averaging={"method": "sync_easgd"}, memory={"recompute": "full"}))
    assert (plan.averaging, plan.recompute) == ("sync_easgd", "full")


def test_the_schema_lists_the_averaging_methods_of_a_plan() -> None:
    assert typing.get_args(AveragingSection.model_fields["method"].annotation) == AVERAGINGS


@pytest.mark.parametrize(
    ("averaging", "schedule", "text"),
    [
        ({"beta": 1.5}, "1f1b", r"beta = 1.5 gives alpha = 0.375 .* = 1.5, above 1.*unsafe=True"),
        ({"alpha": 0.3}, "1f1b", r"alpha = 0.3 gives alpha = 0.3 and beta = 4 workers .* = 1.2"),
        ({"alpha": 0.1, "rho": 1.0}, "1f1b", "exactly one of alpha, beta and rho"),
        ({"alpha": 0.45, "unsafe": True}, "1f1b", r"diverges .* below .* = 0.4 with P = 4"),
        ({"method": "local_sgd", "beta": 0.9}, "1f1b", r"averaging.beta = 0.9 means nothing"),
        ({"method": "async_sgd", "rho": 1.0}, "1f1b", r"averaging.rho = 1 means nothing"),
        ({"method": "async_easgd", "beta": 1.2}, "1f1b", r"\[averaging\].* beta = 1.2 .* above 1"),
        ({"method": "diloco", "center_momentum": 0.9}, "1f1b", r"center_momentum = 0.9 means noth"),
        ({"method": "async_msgd", "outer_lr": 0.7}, "1f1b", r"outer_lr = 0.7 .*'slow_momentum'"),
        ({"max_staleness": 8}, "1f1b", r"averaging.max_staleness = 8 means nothing"),
        ({}, "2bw", r"averaging.method = 'sync_easgd' .* parallel.schedule = 'two_bw' keeps older"),
    ],
)
def test_averaging_that_cannot_work_is_refused(
    averaging: dict[str, object], schedule: str, text: str
) -> None:
    section = {"method": "sync_easgd", **averaging}
    with pytest.raises(ConfigError, match=text):
        resolve(
            load(
                averaging=section,
                parallel={"schedule": schedule, "pipe": 2},
                train={"global_batch_size": 32, "microbatch_size": 2},
            ),
            8,
        )


def test_measgd_needs_momentum() -> None:
    optimizer = {"name": "sgd", "momentum": 0.0}
    with pytest.raises(ConfigError, match=r'"async_measgd" with optimizer.momentum = 0'):
        resolve(load(averaging={"method": "async_measgd"}, optimizer=optimizer), 4)


def test_servers_are_processes_beside_the_mesh() -> None:
    averaging = {"method": "async_easgd", "servers": 2}
    plan = resolve(load(averaging=averaging, parallel={"pipe": 2}), 6)
    assert (plan.data, plan.servers, plan.num_ranks, plan.mesh().num_ranks) == (2, 2, 6, 4)
    assert plan.drifts
    with pytest.raises(LayoutError, match=r"servers"):
        resolve(load(averaging=averaging, parallel={"pipe": 2, "data": 2}), 4)


def test_averaging_has_a_rate_without_one() -> None:
    plan = resolve(load(averaging={"method": "sync_easgd"}), 4)
    assert (plan.summed_axes, plan.num_summed_shares, plan.num_shares) == (("z",), 1, 4)


def test_an_unknown_recomputation_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError, match=r"memory.recompute = 'ful' cannot be used.*'full'"):
        load(memory={"recompute": "ful"})


def test_a_plan_file_must_fit() -> None:
    file = load(train={"global_batch_size": 16})
    check_plan(file, Plan(data=2, microbatch_size=4, num_microbatches=2), 2)
    with pytest.raises(LayoutError, match="the plan needs 2 processes, but 3 were started"):
        check_plan(file, Plan(data=2, microbatch_size=4, num_microbatches=2), 3)
    with pytest.raises(LayoutError, match=r"= 8 samples, but train.global_batch_size = 16"):
        check_plan(file, Plan(data=2, microbatch_size=4), None)


def test_model_shapes_are_completed_from_the_data() -> None:
    gpt = model_shape(load().model, num_outputs=256, input_shape=(32,))
    assert (gpt.vocab_size, gpt.seq_len, gpt.head_size) == (256, 32, 64)  # type: ignore[union-attr]
    conv = load(model={"kind": "conv"}).model
    assert model_shape(conv, num_outputs=10, input_shape=(1, 28, 28)).num_blocks == 5
    with pytest.raises(LayoutError, match="needs images"):
        model_shape(conv, num_outputs=10, input_shape=(28,))
    mlp = load(model={"kind": "mlp", "layers": 2}).model
    assert model_shape(mlp, num_outputs=10, input_shape=(1, 4, 4)).num_inputs == 16  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("model", "num_outputs", "tokens", "text"),
    [
        ({}, 10, False, r'model.kind = "gpt" needs token ids, but data.kind .* \(1, 4, 4\)'),
        ({"kind": "mlp"}, 256, True, 'model.kind = "mlp" needs numbers, but data.kind'),
        ({"kind": "conv"}, 256, True, 'model.kind = "conv" needs numbers, but data.kind'),
        ({"vocab_size": 200}, 256, True, "model.vocab_size = 200 is less than the 256 token ids"),
        ({}, 0, True, 'model.kind = "gpt" .* num_classes = 0: give it an attribute num_classes'),
        ({"kind": "mlp"}, 0, False, "num_classes = 0: give it an attribute num_classes"),
        ({"kind": "conv"}, 0, None, "num_classes = 0: give it an attribute num_classes"),
    ],
)
def test_a_model_that_does_not_fit_the_data_is_refused(
    model: dict[str, object], num_outputs: int, tokens: bool | None, text: str
) -> None:
    section = load(model=model).model
    with pytest.raises(LayoutError, match=text):
        model_shape(section, num_outputs=num_outputs, input_shape=(1, 4, 4), tokens=tokens)


@pytest.mark.parametrize(("vocab_size", "num_outputs"), [(256, 256), (300, 256), (5, 0), (0, 7)])
def test_a_vocabulary_may_be_larger_than_the_data(vocab_size: int, num_outputs: int) -> None:
    section = load(model={"vocab_size": vocab_size}).model
    shape = model_shape(section, num_outputs=num_outputs, input_shape=(8,), tokens=True)
    assert shape.vocab_size == (vocab_size or num_outputs)  # type: ignore[union-attr]


def test_weight_decay_is_called_decoupled_only_where_it_is() -> None:
    lines = render_run_file(RunFile()).splitlines()
    comment = lines[lines.index("weight_decay = 0.1") - 1]
    assert "decoupled (adamw, muon)" in comment
    assert "added to gradients (sgd)" in comment
