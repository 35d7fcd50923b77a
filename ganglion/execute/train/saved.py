"""A run on disk: which tensors and numbers a checkpoint of a run holds."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor

from ganglion.decide.plan import Plan
from ganglion.decide.topology import TENSOR_AXES
from ganglion.errors import CheckpointError
from ganglion.execute.checkpoint import (
    JSON,
    RankPlacements,
    Saveable,
    SavedState,
    changed_settings,
    check_state_shapes,
    gather_whole,
    latest_checkpoint,
    load,
    optimizer_pieces,
    optimizer_record,
    prepare_optimizers,
    read_state,
    remove_incomplete,
    save,
)
from ganglion.execute.comm import World
from ganglion.execute.train.parts import RunParts
from ganglion.execute.update import wide

logger = logging.getLogger(__name__)

_MODEL = "model."
_OLDER = "older."
_WORKER = "worker"  # and its number: what belongs to one worker of elastic averaging
_FEEDBACK = "feedback."
_OUTER = "outer."  # the momentum of a centre
_HAS_FEEDBACK = "error_feedback"
_NUM_EXCHANGES = "exchanges"
_LOSS_SCALE = "loss_scale"


def save_run(
    folder: Path, parts: RunParts, step: int, keep: int, extra: Mapping[str, JSON]
) -> Path:
    """Write the run's state below `folder`; called by all ranks."""
    if parts.plan.drifts:  # workers that were stopped are at steps of their own: the first's counts
        step = int(parts.world.broadcast_text(str(step)))
    state = SavedState(
        step=step,
        plan=parts.plan,
        optimizer=optimizer_record(parts.optimizers),
        extra={
            **extra,
            "seed": parts.seed,
            _HAS_FEEDBACK: parts.feedback is not None,
            _NUM_EXCHANGES: max((a.metrics().num_exchanges for a in parts.averaged), default=0),
            **_saved_scale(parts),
        },
    )
    check_state_shapes(parts.optimizers, _places(parts))
    if parts.world.rank == 0:
        remove_incomplete(folder)
    saved = save(
        folder,
        _tensors(parts, _wide_older(parts), by_worker=parts.plan.averages),
        state,
        parts.world,
        process_group=_process_group(parts.world),
        keep=keep,
        export=_whole_model(parts),
    )
    parts.on_saved()
    return saved


def load_run(folder: Path, parts: RunParts) -> int | None:
    """Fill the run from the newest checkpoint below `folder`; return its step, if there is one."""
    path = _agree_on_newest(folder, parts.world)
    if path is None:
        return None
    _check_feedback(parts, path)
    saved = read_state(path).plan
    by_worker = saved.averages and parts.plan.averages and saved.data == parts.plan.data
    _prepare_optimizers(parts, path, saved, by_worker)
    has_outer = saved.averaging == parts.plan.averaging
    older = _wide_older(parts)
    tensors = _tensors(parts, older, by_worker=by_worker, has_outer=has_outer)
    group, leaving = _process_group(parts.world), () if by_worker else (_WORKER,)
    leaving = leaving if has_outer else (*leaving, _OUTER)
    state = load(path, tensors, process_group=group, leaving=leaving)
    for name, tensor in parts.executor.older_weights().items():
        tensor.copy_(older[name])
    parts.on_load()
    _restart_scale(parts, state)
    check_state_shapes(parts.optimizers, _places(parts))
    for averaged in parts.averaged:
        if not has_outer:
            averaged.forget_outer()
        num_exchanges = int(cast(int, state.extra.get(_NUM_EXCHANGES, 0)))
        averaged.restart(state.step, num_exchanges, at_weights=not by_worker)
    logger.info("resumed from %s at step %d", path, state.step)
    for line in (*_changes(parts, state), *changed_settings(parts.optimizers, state.optimizer)):
        logger.warning("resumed from %s with other settings: %s", path, line)
    return state.step


def _saved_scale(parts: RunParts) -> dict[str, JSON]:
    if parts.scaling is None:
        return {}
    scales, num_fine = parts.scaling.state()
    return {_LOSS_SCALE: {"scales": list(scales), "num_fine": num_fine}}


def _restart_scale(parts: RunParts, state: SavedState) -> None:
    """Go on with the saved loss scale; a run that had none begins with a new one."""
    if parts.scaling is not None:
        saved = cast(dict[str, Any], state.extra.get(_LOSS_SCALE, {}))
        parts.scaling.restart(state.step, **saved)


def with_saved_cut(plan: Plan, folder: Path, world: World) -> Plan:
    """Return the plan, cut where the newest checkpoint below `folder` was, if it leaves that open.

    Measured anew, the cut might move, and with it the order in which norms are summed. Called by
    all ranks; a checkpoint that cannot be read is left to `load_run` to report.
    """
    if plan.pipe == 1 or plan.stage_boundaries:
        return plan
    cuts = json.loads(world.broadcast_text(_saved_cut(plan, folder) if world.rank == 0 else ""))
    return replace(plan, stage_boundaries=tuple(cuts))


def _saved_cut(plan: Plan, folder: Path) -> str:
    path = latest_checkpoint(folder)
    try:
        saved = None if path is None else read_state(path).plan
    except CheckpointError:
        saved = None
    if saved is None or _stages_of(saved) != _stages_of(plan):
        return json.dumps(())
    return json.dumps(saved.stage_boundaries)


def _stages_of(plan: Plan) -> tuple[int, str, int]:
    """Return what decides how many stages a plan has."""
    return plan.pipe, plan.schedule, plan.chunks


def _prepare_optimizers(parts: RunParts, path: Path, saved: Plan, by_worker: bool) -> None:
    """Make room for the state that continues; that of workers is of no use to other workers."""
    if by_worker or not saved.averages:
        owner = _worker(parts) if by_worker else ""
        prepare_optimizers(parts.optimizers, path, _places(parts), owner, parts.room)
        return
    for optimizer in parts.optimizers:
        optimizer.state.clear()
    logger.warning(
        "%s holds %d workers of elastic averaging, not those of this run: it begins at their "
        "centre, with new optimizer state",
        *(path, saved.data),
    )


def _worker(parts: RunParts) -> str:
    """Return what the names of this worker's own tensors begin with."""
    return f"{_WORKER}{parts.world.coordinates.data}."


def _wide_older(parts: RunParts) -> dict[str, Tensor]:
    """Return the weights before the newest in fp32 at least: a run of any precision takes them."""
    return {name: wide(tensor) for name, tensor in parts.executor.older_weights().items()}


def _tensors(
    parts: RunParts, older: Mapping[str, Tensor], *, by_worker: bool, has_outer: bool = True
) -> dict[str, Saveable]:
    """Return everything of the run that is a tensor, with where pieces belong.

    `by_worker`: the model is the centre, and each worker has weights and optimizer of its own;
    `has_outer`: also what moves the centre.
    """
    places, owner = _places(parts), _worker(parts) if by_worker else ""
    kinds: dict[str, Mapping[str, Tensor]] = {
        _MODEL: parts.shared_tensors() if by_worker else parts.model_tensors(),
        _OLDER: older,
        _FEEDBACK: parts.feedback or {},
        _OUTER: _outer_state(parts) if has_outer else {},
    }
    if by_worker:
        kinds[owner + _MODEL] = parts.model_tensors()
    named = {
        kind + name: places.piece(name, tensor)
        for kind, tensors in kinds.items()
        for name, tensor in tensors.items()
    }
    return {**named, **optimizer_pieces(parts.optimizers, places, owner)}


def _outer_state(parts: RunParts) -> dict[str, Tensor]:
    return {name: t for each in parts.averaged for name, t in each.outer_state().items()}


def _places(parts: RunParts) -> RankPlacements:
    assert not parts.placements or set(parts.parameters) <= set(parts.placements)
    return RankPlacements(parts.placements, parts.world.mesh, parts.world.coordinates)


def _check_feedback(parts: RunParts, path: Path) -> None:
    """Refuse to begin or end error feedback half-way: the update before would be unknown."""
    then, now = bool(read_state(path).extra.get(_HAS_FEEDBACK)), parts.feedback is not None
    if then != now:
        raise CheckpointError(
            f"{path} was saved with optimizer.error_feedback = {str(then).lower()}, but it is "
            f"{str(now).lower()} now: set it back, or set output.dir to a new folder"
        )


def _whole_model(parts: RunParts) -> dict[str, Tensor] | None:
    """Return the whole model to rank 0, put together from the ranks of the first replica."""
    world, places = parts.world, _places(parts)
    group = world.group(*TENSOR_AXES, "pipe")
    if world.coordinates.data > 0:
        return None
    held = {name: places.piece(name, tensor) for name, tensor in parts.shared_tensors().items()}
    return gather_whole(held, group, parts.device)


def _changes(parts: RunParts, state: SavedState) -> list[str]:
    """Name what makes a resumed run see other batches than the one that was saved."""
    pairs = {
        "global batch size": (state.plan.global_batch_size, parts.plan.global_batch_size),
        "seed": (state.extra.get("seed"), parts.seed),
    }
    return [f"{name}: {then} -> {now}" for name, (then, now) in pairs.items() if then != now]


def _agree_on_newest(folder: Path, world: World) -> Path | None:
    """Let rank 0 choose: a file system may show the ranks different things at one moment."""
    found = ""
    if world.rank == 0:
        remove_incomplete(folder)
        found = str(latest_checkpoint(folder) or "")
    found = world.broadcast_text(found)
    return Path(found) if found else None


def _process_group(world: World) -> dist.ProcessGroup | None:
    if world.num_ranks > 1 and not dist.is_initialized():
        raise CheckpointError(
            f"{world.num_ranks} ranks that are threads cannot save or load together: use processes"
        )
    return dist.group.WORLD if world.num_ranks > 1 else None
