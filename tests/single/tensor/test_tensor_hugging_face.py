"""GPT-2 and Llama of Hugging Face over x, y, z and data equal the serial model, by name."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ganglion import Plan, RunSettings, parallelize
from ganglion.decide.config.tensor_checks import FAMILIES, check_hugging_face
from ganglion.decide.topology import Mesh
from ganglion.errors import LayoutError
from ganglion.execute.comm import SoloGroup, World, run_threads
from ganglion.execute.models import cross_entropy, named_parameters, tensor_cuts
from ganglion.execute.models.hugging_face import build, hugging_face_blocks, hugging_face_names
from ganglion.execute.models.tensor_cuts import hugging_face_cuts
from ganglion.execute.pipeline.blocks import random_stream
from ganglion.execute.tensor import apply_tensor_parallel
from tests.support.covering import cells
from tests.support.hugging_face import Logits
from tests.support.serial import (
    TOLERANCE,
    Batch,
    History,
    assert_same_by_name,
    copies,
    train_serially,
)
from tests.support.tensors import Held, factorizations, whole
from tests.support.training import OPTIMIZERS, share_of

transformers = pytest.importorskip(
    "transformers", reason="needs the extra `hf`: pip install 'ganglion[hf]'"
)

VOCAB_SIZE, SEQ_LEN, BATCH_SIZE, NUM_STEPS = 64, 8, 8, 2
SETTINGS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "n_layer": 2,
        "n_embd": 32,
        "n_head": 8,
        "n_positions": 8,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "llama": {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8,
    },
}
CLASSES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}
SMALL = [*factorizations(2), *factorizations(4)]
FOUR = [plan for plan in factorizations(4) if plan.data == 1]
EIGHT = [
    Plan(x=2, y=2, z=2),
    Plan(x=2, y=2, data=2),
    Plan(y=2, z=2, data=2),
    Plan(x=4, y=2),
    Plan(z=8),
]
_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True)
class Case:
    """One model to train; `changes` are settings other than the usual ones.

    By SGD: the gradient of a bias of keys is zero, and AdamW would divide its rounding by itself.
    """

    family: str
    changes: tuple[tuple[str, Any], ...] = ()
    attention: str = "sdpa"
    dtype: torch.dtype = torch.float64


def make_model(case: Case) -> Any:
    """The same model on every thread, whose every parameter matters."""
    with _ONE_AT_A_TIME:
        return copy.deepcopy(_made(case))


@functools.cache
def _made(case: Case) -> Any:
    settings = {"bos_token_id": None, "eos_token_id": None, **SETTINGS[case.family]}
    config = transformers.AutoConfig.for_model(
        case.family,
        vocab_size=VOCAB_SIZE,
        attn_implementation=case.attention,
        **settings | dict(case.changes),
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, CLASSES[case.family])(config).train()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    if case.dtype == torch.float64:
        replace_norms(model)
    return model.to(case.dtype)


def replace_norms(model: nn.Module) -> None:
    """Llama's norms round to fp32 inside: put in those of torch, which compute as they are told."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__ == "LlamaRMSNorm":
                made = nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon)
                made.weight = child.weight
                setattr(module, name, made)


def make_batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(2)
    shape = (NUM_STEPS, BATCH_SIZE, SEQ_LEN + 1)
    ids = torch.randint(VOCAB_SIZE, shape, generator=generator)
    return [(step[:, :-1].contiguous(), step[:, 1:].contiguous()) for step in ids]


def train(world: World, plan: Plan, case: Case) -> Held:
    """Train the blocks under `plan` and return what this rank holds."""
    blocks = hugging_face_blocks(make_model(case))
    run = parallelize(
        blocks,
        cross_entropy,
        OPTIMIZERS["sgd"],
        dataclasses.replace(plan, bucket_mib=0.002),
        RunSettings(max_grad_norm=0.5),
        world=world,
    )
    history = History()
    for batch in make_batches():
        for result in run.steps([share_of(batch, world, plan)]):
            history.losses.append(result.loss)
            history.norms.append(result.grad_norm)
        history.gradients.append(copies(run.gradients()))
    history.weights = copies(dict(named_weights(run.model_tensors(), blocks)))
    return Held(history, run.placements(), world.coordinates, world.mesh)


def named_weights(
    tensors: Mapping[str, Tensor], blocks: Mapping[str, nn.Module]
) -> dict[str, Tensor]:
    """Leave out buffers, which a plain loop does not list."""
    names = named_parameters(blocks)
    return {name: tensor for name, tensor in tensors.items() if name in names}


@functools.cache
def plain_loop(case: Case) -> History:
    """The model's own forward, loop and optimizer in one process; names are those of the blocks."""
    model = make_model(case)
    found = train_serially(
        Logits(model), cross_entropy, OPTIMIZERS["sgd"], make_batches(), max_grad_norm=0.5
    )
    blocks = hugging_face_blocks(model)
    origins = hugging_face_names(blocks)
    for tensors in (*found.gradients, found.weights):
        renamed = {name: tensors[f"inner.{origins[name]}"] for name in named_parameters(blocks)}
        tensors.clear()
        tensors.update(renamed)
    return found


def with_batch(plan: Plan, microbatch_size: int = 0) -> Plan:
    """Cut the same global batches: two microbatches where there are two, or of a given size."""
    share = BATCH_SIZE // plan.num_shares
    size = microbatch_size or max(1, share // 2)
    return dataclasses.replace(plan, microbatch_size=size, num_microbatches=share // size)


def assert_equals(plan: Plan, case: Case, wanted: History) -> list[Held]:
    held = run_threads(plan.mesh(), lambda world: train(world, plan, case))
    relative, absolute = TOLERANCE[case.dtype]
    for rank in held:
        assert rank.history.losses == pytest.approx(wanted.losses, rel=relative, abs=absolute)
        assert rank.history.norms == pytest.approx(wanted.norms, rel=relative, abs=absolute)
    for step, gradients in enumerate(wanted.gradients):
        found = whole(held, [rank.history.gradients[step] for rank in held])
        assert_same_by_name(found, gradients)
    assert_same_by_name(whole(held, [rank.history.weights for rank in held]), wanted.weights)
    return held


@cells(family=["gpt2", "llama"], plan=[*SMALL, *EIGHT])
def test_every_layout_equals_the_model_of_hugging_face(family: str, plan: Plan) -> None:
    """GPT-2 ties its embeddings, Llama does not, and has half as many key heads as heads."""
    case = Case(family)
    assert_equals(with_batch(plan), case, plain_loop(case))


VARIANTS = {
    "gpt2 untied": Case("gpt2", (("tie_word_embeddings", False),)),
    "llama tied": Case("llama", (("tie_word_embeddings", True), ("attention_bias", True))),
    "gpt2 eager": Case("gpt2", attention="eager"),
}


@cells(variant=VARIANTS, plan=FOUR)
def test_variants_equal_the_model_of_hugging_face(variant: str, plan: Plan) -> None:
    case = VARIANTS[variant]
    assert_equals(with_batch(plan), case, plain_loop(case))


@cells(attention=["eager", "sdpa"], plan=[Plan(x=2, y=2), Plan(y=2, z=2)])
def test_norms_of_llama_itself(attention: str, plan: Plan) -> None:
    case = Case("llama", attention=attention, dtype=torch.float32)
    assert_equals(with_batch(plan), case, plain_loop(case))


@cells(family=["gpt2", "llama"], plan=[Plan(x=2, y=2, pipe=2), Plan(z=2, data=2, pipe=2)])
def test_with_a_pipeline(family: str, plan: Plan) -> None:
    case = Case(family)
    assert_equals(with_batch(plan), case, plain_loop(case))


# --- dropout ------------------------------------------------------------------------------------


@pytest.fixture
def _own_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each thread draw for itself, as processes do: all of them share torch's generator."""
    own = threading.local()

    def seed(number: int) -> None:
        own.generator = torch.Generator().manual_seed(number)

    def dropout(x: Tensor, p: float, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return x
        drawn = torch.rand(x.shape, generator=own.generator, dtype=torch.float64)
        return x * (drawn >= p) / (1 - p)

    monkeypatch.setattr(random_stream, "_seed", seed)
    monkeypatch.setattr(torch.nn.functional, "dropout", dropout)
    monkeypatch.setattr(torch, "dropout", lambda x, p, train: dropout(x, p, train))


DROPOUT = Case("gpt2", (("n_layer", 1), ("resid_pdrop", 0.3), ("embd_pdrop", 0.3)))


@functools.cache
def alone_with_dropout(case: Case) -> History:
    """What one process makes of microbatches of one sample each; numbers must be a thread's own."""
    plan = with_batch(Plan(), microbatch_size=1)
    return run_threads(plan.mesh(), lambda world: train(world, plan, case))[0].history


@pytest.mark.usefixtures("_own_random_numbers")
@cells(plan=[*factorizations(4), Plan(x=2, y=2, data=2)])
def test_dropout_is_that_of_one_process(plan: Plan) -> None:
    wanted = alone_with_dropout(DROPOUT)
    assert wanted.losses != pytest.approx(plain_loop(Case("gpt2")).losses, rel=1e-3)
    assert_equals(with_batch(plan, microbatch_size=1), DROPOUT, wanted)


ATTENTION_DROPOUT = {
    "gpt2": Case("gpt2", (*DROPOUT.changes, ("attn_pdrop", 0.3)), attention="eager"),
    "llama": Case("llama", (("attention_dropout", 0.3),), "eager", torch.float32),
}


@pytest.mark.usefixtures("_own_random_numbers")
@cells(family=ATTENTION_DROPOUT, plan=[Plan(y=2), Plan(z=2), Plan(y=2, data=2)])
def test_dropout_of_attention_where_heads_stay_together(family: str, plan: Plan) -> None:
    case = ATTENTION_DROPOUT[family]
    assert_equals(with_batch(plan, microbatch_size=1), case, alone_with_dropout(case))


# --- refusals and the description --------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "text"),
    [
        (
            Case("gpt2", (("attn_pdrop", 0.1),)),
            "layers.0.attention.attn cannot be split over x = 4: attn_pdrop = 0.1 draws one mask "
            "for the heads of all ranks, so the result would depend on the layout: set "
            "attn_pdrop = 0 in model.args, or parallel.x = 1",
        ),
        (
            Case("llama", (("attention_dropout", 0.2),)),
            "set attention_dropout = 0 in model.args, or parallel.x = 1",
        ),
        # 2 heads of 4 features: 8 features would divide by 4, through the middle of a head.
        (
            Case("llama", (("num_key_value_heads", 2),)),
            "layers.0.attention.self_attn: num_key_value_heads = 2 cannot be split over x = 4: "
            "choose a multiple of 4, or another parallel.x",
        ),
        (
            Case("gpt2", (("n_head", 2),)),
            "layers.0.attention.attn: n_head = 2 cannot be split over x = 4",
        ),
        (
            Case("llama", (("pad_token_id", 1),)),
            "embedding.embed_tokens is an embedding with padding_idx",
        ),
    ],
    ids=["gpt2 dropout", "llama dropout", "key heads", "heads", "padding"],
)
def test_what_cannot_be_split_is_refused(case: Case, text: str) -> None:
    plan = with_batch(Plan(x=4))
    with pytest.raises(LayoutError, match=re.escape(text)):
        run_threads(plan.mesh(), lambda world: train(world, plan, case))


LIMITS: dict[str, list[dict[str, Any]]] = {
    "gpt2": [
        {"n_head": 3, "n_embd": 24},
        {"num_attention_heads": 3, "hidden_size": 24},
        {"n_embd": 10, "n_head": 2},
        {"n_inner": 7},
        {"vocab_size": 30},
        {"vocab_size": 31},
        {"attn_pdrop": 0.1},
        {},
    ],
    "llama": [
        {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3},
        {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 6},
        {"hidden_size": 24},
        {"intermediate_size": 9},
        {"vocab_size": 31},
        {"attention_dropout": 0.1},
        {"pad_token_id": 1},
        {},
    ],
}


@pytest.mark.parametrize(
    ("family", "changes"), [(f, c) for f, each in LIMITS.items() for c in each], ids=str
)
@pytest.mark.parametrize("axes", [{"x": 2}, {"x": 3}, {"y": 2}, {"y": 3}, {"z": 2}], ids=str)
def test_what_the_split_refuses_is_refused_before_the_launch(
    family: str, changes: dict[str, Any], axes: dict[str, int]
) -> None:
    """From the run file alone, and nothing else is."""
    settings = {"model_type": family, **SETTINGS[family], "vocab_size": 36} | changes

    def split(world: World) -> None:
        with torch.device("meta"):
            blocks = build(**settings)
        apply_tensor_parallel(blocks, world, tensor_cuts(blocks).modules)

    def refused(check: Callable[[], object]) -> bool:
        try:
            check()
        except LayoutError:
            return True
        return False

    world = World(0, Mesh(**axes), lambda _: SoloGroup(0))
    assert refused(lambda: check_hugging_face(settings, Plan(**axes))) == refused(
        lambda: split(world)
    )


def test_sizes_that_a_run_file_leaves_out_are_those_of_transformers() -> None:
    for family, config in (("gpt2", transformers.GPT2Config), ("llama", transformers.LlamaConfig)):
        sizes = FAMILIES[family]
        plain = config()
        for key, value in sizes.defaults.items():
            wanted = getattr(plain, key)
            if value is None and key in sizes.mirrors and wanted is not None:
                other, factor = sizes.mirrors[key]
                value = factor * sizes.defaults[other]
            assert wanted == value, key
        for alias, key in sizes.aliases.items():
            assert config.attribute_map[alias] == key


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_no_parameter_is_left_whole(family: str) -> None:
    plan = with_batch(Plan(x=2, y=2))
    held = run_threads(plan.mesh(), lambda world: train(world, plan, Case(family)))
    for name, placement in held[0].placements.items():
        axes = {shard.axis for shard in placement.shards}
        if len(placement.shape) == 1:
            assert len(axes) == 1, name
        else:
            assert axes == ({"y"} if "wpe" in name else {"x", "y"}), name


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_blocks_of_others_are_left_to_the_general_path(family: str) -> None:
    blocks = hugging_face_blocks(make_model(Case(family)))
    found = hugging_face_cuts(blocks)
    assert found is not None and found.output_axis == "x"
    del blocks["head"]
    found = hugging_face_cuts(blocks)
    assert found is not None and found.output_axis == "y"
    assert hugging_face_cuts({**blocks, "mine": nn.Linear(2, 2)}) is None
