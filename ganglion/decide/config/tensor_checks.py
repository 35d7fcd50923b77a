"""Which tensor axes a model can be split over, from the numbers of its run file alone.

A weight (outputs, inputs) is cut along its outputs by one of x and y, along its inputs by the
other, and what is left of its rows by z, if z divides them.
"""

from __future__ import annotations

import itertools

from ganglion.decide.config.divisible import check_divides
from ganglion.decide.config.hugging_face_checks import BUILDER, check_hugging_face
from ganglion.decide.config.schema import ModelSection, RunFile
from ganglion.decide.plan import Plan
from ganglion.decide.shapes import CONV_CHANNELS, CONV_WIDTHS
from ganglion.errors import ConfigError


def check_tensor_axes(run: RunFile, plan: Plan) -> None:
    """Refuse tensor axes that the model's sizes do not fit."""
    if run.parallel.keep_gathered and run.parallel.keep_gathered_mib:
        raise ConfigError(
            f"parallel.keep_gathered = true keeps all gathered weights, but parallel."
            f"keep_gathered_mib = {run.parallel.keep_gathered_mib:g} only some: leave one out"
        )
    if plan.x * plan.y * plan.z == 1:
        return
    if run.model.build == BUILDER:
        check_hugging_face(run.model.args, plan)
    if not run.model.build:
        check = {"gpt": _check_gpt, "mlp": _check_mlp, "conv": _check_conv}[run.model.kind]
        check(run.model, plan)


def check_vocabulary(vocab_size: int, plan: Plan) -> None:
    """Refuse a vocabulary, known once the data are read, that x does not divide."""
    check_divides("the vocabulary of the data (model.vocab_size = 0)", vocab_size, "x", plan.x)


def _check_gpt(model: ModelSection, plan: Plan) -> None:
    kv_heads = model.kv_heads or model.heads
    check_divides("model.heads", model.heads, "x", plan.x)
    check_divides("model.kv_heads", kv_heads, "x", plan.x)
    check_divides("model.mlp_hidden", model.mlp_hidden or 4 * model.hidden, "x", plan.x)
    check_divides("model.vocab_size", model.vocab_size, "x", plan.x)
    check_divides("model.hidden", model.hidden, "y", plan.y)


def _check_mlp(model: ModelSection, plan: Plan) -> None:
    """Layers take turns: the first gives its outputs over x, the next over y; ends are whole."""
    if model.layers > 1:
        check_divides("model.hidden", model.hidden, "x", plan.x)
    if model.layers > 2:
        check_divides("model.hidden", model.hidden, "y", plan.y)


def _check_conv(model: ModelSection, plan: Plan) -> None:
    """Its layers take turns too; the last one's outputs are whole."""
    turns = itertools.cycle([("x", plan.x), ("y", plan.y)])
    for size, (axis, parts) in zip((*CONV_CHANNELS, *CONV_WIDTHS), turns, strict=False):
        check_divides(f'the outputs of a layer of model.kind = "{model.kind}",', size, axis, parts)
