"""Runs with tensor axes, as threads: pieces of all ranks put together and compared by name."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ganglion import Plan, RunSettings, parallelize
from ganglion.decide.shapes import ConvShape, GPTShape, MLPShape, ModelShape
from ganglion.decide.topology import Coordinates, Mesh, ModelCuts, Placement
from ganglion.execute.comm import World, run_threads
from ganglion.execute.models import named_buffers, named_parameters
from ganglion.execute.pipeline.blocks import random_stream
from ganglion.execute.pipeline.blocks.random_stream import RandomStream
from ganglion.execute.tensor import WITHOUT_OVERLAP, TensorSettings
from ganglion.execute.train import Run
from ganglion.execute.update import autocast
from tests.support.serial import (
    TOLERANCE,
    Batch,
    History,
    LossFn,
    assert_same_by_name,
    assert_same_gradients,
    copies,
    gradients_of,
)

# Every width divides by 8, so that any factorization of 8 ranks fits.
_GPT = GPTShape(
    vocab_size=64,
    seq_len=8,
    num_layers=1,
    hidden=32,
    num_heads=8,
    num_kv_heads=8,
    head_size=4,
    mlp_hidden=64,
    bias=True,
)
WIDE: dict[str, ModelShape] = {
    "wide_gpt": _GPT,
    "wide_gpt3": replace(_GPT, num_layers=3, num_heads=16, head_size=2, bias=False),
    "wide_tied": replace(
        _GPT, hidden=64, head_size=8, bias=False, tied_embedding=True, positions="learned"
    ),
    "wide_mlp": MLPShape(num_inputs=12, num_outputs=64, num_layers=3, hidden=64),
    "wide_conv": ConvShape(image_size=28, num_channels=1, num_outputs=8),
}


@dataclass(frozen=True)
class Held:
    """The tensors of one rank at the end of a run."""

    history: History
    placements: Mapping[str, Placement]
    coordinates: Coordinates
    mesh: Mesh

    @property
    def share(self) -> tuple[int, ...]:
        return (self.coordinates.data, self.coordinates.z)


def factorizations(
    num_ranks: int, names: Sequence[str] = ("x", "y", "z", "data")
) -> Iterator[Plan]:
    """Yield every way to give so many ranks to the axes."""
    for sizes in _sizes(num_ranks, len(names)):
        yield Plan(**dict(zip(names, sizes, strict=True)))  # type: ignore[arg-type]


def _sizes(total: int, num_axes: int) -> Iterator[tuple[int, ...]]:
    if num_axes == 1:
        yield (total,)
        return
    for first in (n for n in range(1, total + 1) if total % n == 0):
        for rest in _sizes(total // first, num_axes - 1):
            yield (first, *rest)


def whole(
    held: Sequence[Held], tensors: Sequence[Mapping[str, Tensor]], what: str = ""
) -> dict[str, Tensor]:
    """Put the pieces of all ranks together; ranks that hold the same must hold equal values.

    `what` names the tensors in errors.
    """
    found: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    boxes: set[tuple[Any, ...]] = set()  # that are filled
    for rank, mine in zip(held, tensors, strict=True):
        for name, piece in mine.items():
            placement = rank.placements.get(name) or Placement(shape=tuple(piece.shape))
            target = found.setdefault(name, torch.zeros(placement.shape, dtype=piece.dtype))
            known = filled.setdefault(name, torch.zeros(placement.shape, dtype=torch.bool))
            for box in placement.boxes(rank.mesh, rank.coordinates):
                at, here = target[box.in_whole], piece[box.in_piece]
                if (key := (name, box.start, box.size)) in boxes:
                    same = torch.equal(at, here)
                else:
                    before = known[box.in_whole]
                    same = torch.equal(at[before], here[before])
                    at[...], before[...] = here, True
                    boxes.add(key)
                assert same, f"{what}{name} drifts apart"
    for name, known in filled.items():
        assert bool(known.all()), f"parts of {what}{name} are on no rank"
    return found


SETTINGS = {
    "overlapped": TensorSettings(),
    "waiting": WITHOUT_OVERLAP,
    "kept": TensorSettings(keep_gathered=True),
}


# --- models of a test's own ----------------------------------------------------------------------

_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True)
class Task:
    """A model of a test's own to train, by blocks; `make` is called on every rank."""

    make: Callable[[], dict[str, nn.Module]]
    loss_fn: LossFn
    batches: Sequence[Batch]
    cuts: ModelCuts | None = None
    tensor: TensorSettings | None = None
    dtype: torch.dtype = torch.float64
    max_grad_norm: float = 0.5

    def blocks(self) -> dict[str, nn.Module]:
        """Return the same model on every thread, although they share a random generator."""
        with _ONE_AT_A_TIME, torch.random.fork_rng():
            torch.manual_seed(1)
            return {name: block.to(self.dtype) for name, block in self.make().items()}

    def fit(self, plan: Plan, microbatch_size: int = 0) -> Plan:
        """Return the plan that cuts the global batches: into two microbatches if possible."""
        share = len(self.batches[0][0]) // plan.num_shares
        size = microbatch_size or max(1, share // 2)
        return dataclasses.replace(plan, microbatch_size=size, num_microbatches=share // size)

    def run(self, world: World, plan: Plan) -> Run:
        return parallelize(
            self.blocks(),
            self.loss_fn,
            partial(torch.optim.AdamW, lr=1e-2),
            dataclasses.replace(plan, bucket_mib=0.002),
            RunSettings(
                max_grad_norm=self.max_grad_norm,
                cuts=self.cuts,
                tensor=self.tensor,
            ),
            world=world,
        )


def train_task(world: World, plan: Plan, task: Task) -> Held:
    """Train under `plan` and return the tensors of this rank, with their places."""
    run, history = task.run(world, plan), History()
    share = world.coordinates.data * plan.z + world.coordinates.z
    part = slice(share * plan.share_size, (share + 1) * plan.share_size)
    for inputs, targets in task.batches:
        for result in run.steps([(inputs[part], targets[part])]):
            history.losses.append(result.loss)
            history.norms.append(result.grad_norm)
        history.gradients.append(copies(run.gradients()))
    run.drain()
    history.weights = copies(run.model_tensors())
    return Held(history, run.placements(), world.coordinates, world.mesh)


def train_twin(plan: Plan, task: Task) -> History:
    """Train in this process, the microbatches of each share one after the other.

    A share has running means of its own, as a replica has; those of the first are the model's.
    """
    model = nn.ModuleDict({name.replace(".", "_"): b for name, b in task.blocks().items()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    names = {id(tensor): name for name, tensor in _named(task, model).items()}
    seen = [copies(dict(model.named_buffers())) for _ in range(plan.num_shares)]
    history = History()
    for step, batch in enumerate(task.batches):
        optimizer.zero_grad()
        total = 0.0
        for share, buffers in enumerate(seen):
            model.load_state_dict(buffers, strict=False)
            total += _train_share(plan, task, model, batch, step, share)
            buffers.update(copies(dict(model.named_buffers())))
        clip = task.max_grad_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        history.losses.append(total / plan.num_shares)
        history.norms.append(norm.item())
        history.gradients.append(copies({names[id(p)]: p.grad for p in model.parameters()}))
        optimizer.step()
    model.load_state_dict(seen[0], strict=False)
    history.weights = copies(_named(task, model))
    return history


def _named(task: Task, model: nn.ModuleDict) -> dict[str, Tensor]:
    blocks = dict(zip(task.make(), model.values(), strict=True))
    return {**named_parameters(blocks), **named_buffers(blocks)}


def _train_share(
    plan: Plan, task: Task, model: nn.ModuleDict, batch: Batch, step: int, share: int
) -> float:
    """Leave the gradients of a share; return its mean loss."""
    stream = RandomStream(0, share * plan.num_microbatches)
    total = 0.0
    for microbatch in range(plan.num_microbatches):
        first = share * plan.share_size + microbatch * plan.microbatch_size
        hidden, target = (part[first : first + plan.microbatch_size] for part in batch)
        with autocast(plan.precision, torch.device("cpu")):
            for number, block in enumerate(model.values()):
                stream.seed_block(step, microbatch, number)
                hidden = block(hidden)
        loss = task.loss_fn(hidden, target)
        (loss / (plan.num_microbatches * plan.num_shares)).backward()
        total += loss.item()
    return total / plan.num_microbatches


def assert_equals_twin(plan: Plan, task: Task) -> list[Held]:
    """Train under a plan; everything must be as in one process."""
    held = run_threads(plan.mesh(), lambda world: train_task(world, plan, task))
    wanted = train_twin(plan, task)
    assert_same_histories(held, wanted, task.dtype)
    return held


def assert_same_histories(held: Sequence[Held], wanted: History, dtype: torch.dtype) -> None:
    """Compare gradients and weights put together by name; losses and norms of every rank."""
    relative, absolute = TOLERANCE[dtype]
    steps = enumerate(zip(*(rank.history.gradients for rank in held), strict=True))
    found = [whole(held, pieces, gradients_of(step)) for step, pieces in steps]
    assert_same_gradients(found, wanted.gradients)
    for rank in held:
        assert rank.history.losses == pytest.approx(wanted.losses, rel=relative, abs=absolute)
        assert rank.history.norms == pytest.approx(wanted.norms, rel=relative, abs=absolute)
    weights = whole(held, [rank.history.weights for rank in held])
    counts = {name: t for name, t in wanted.weights.items() if not t.is_floating_point()}
    assert_same_by_name({name: weights.pop(name) for name in counts}, counts, exactly=True)
    floating = {name: t for name, t in wanted.weights.items() if name not in counts}
    assert_same_by_name(weights, floating)


def assert_same_bits(held: Sequence[Held], other: Sequence[Held]) -> None:
    for mine, theirs in zip(held, other, strict=True):
        assert mine.history.losses == theirs.history.losses
        pairs = zip(mine.history.gradients, theirs.history.gradients, strict=True)
        for a, b in (*pairs, (mine.history.weights, theirs.history.weights)):
            assert_same_by_name(a, b, exactly=True)


def named(plan: Plan) -> str:
    """Name a layout by its axes, for the ids of tests."""
    sizes = {axis: size for axis, size in plan.mesh().sizes().items() if size > 1}
    return "-".join(f"{axis}{size}" for axis, size in sizes.items())


def own_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the dropout of each thread by itself, as processes do, with torch's own generator."""
    own, drawn = threading.local(), torch.dropout

    def seed(number: int) -> None:
        own.state = torch.Generator().manual_seed(number).get_state()

    def dropout(x: Tensor, p: float, train: bool, inplace: bool = False) -> Tensor:
        with _ONE_AT_A_TIME, torch.random.fork_rng():
            torch.default_generator.set_state(own.state)
            result = drawn(x, p, train)
            own.state = torch.default_generator.get_state()
        return result

    monkeypatch.setattr(random_stream, "_seed", seed)
    monkeypatch.setattr(torch, "dropout", dropout)
    monkeypatch.setattr(torch.nn.functional, "dropout", dropout)
