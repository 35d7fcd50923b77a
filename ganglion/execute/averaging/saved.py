"""Checkpoints of a worker.

| kind        | holds                                                    | fits                  |
|-------------|----------------------------------------------------------|-----------------------|
| full        | weights, optimizer, centre, counts, residuals, in flight | this worker, as many  |
| center_only | the centre by name, counts, the outer optimizer          | any number of workers |

Everything is a copy: after saving and loading, each tensor has one owner. Random state, the
position in the data and learning rate schedulers are left to the caller.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from ganglion.errors import CheckpointError
from ganglion.execute.averaging.methods import Method, Packed, State

FULL, CENTER_ONLY = "full", "center_only"
_FORMAT = 1
PORTABLE = ("step", "version", "outer")
"""Entries of a method's state that belong to the centre, for any number of workers."""


def save_full(
    packed: Packed, optimizer: torch.optim.Optimizer, method: Method, worker: int, num_workers: int
) -> State:
    """Return everything that a bit-exact continuation of this worker needs."""
    state = method.state_dict()
    return {
        "format": _FORMAT,
        "kind": FULL,
        "worker": worker,
        "num_workers": num_workers,
        "layout": _layout(packed),
        "weights": packed.gather().clone(),
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "method": state,
    }


def save_center(packed: Packed, method: Method) -> State:
    """Return the centre by name, with its portable state."""
    state = method.state_dict()
    tensors = {name: view.clone() for name, view in packed.views(state["center"]).items()}
    kept = {key: state[key] for key in PORTABLE if key in state}
    return {"format": _FORMAT, "kind": CENTER_ONLY, "center": tensors, "method": kept}


def load_full(
    packed: Packed,
    optimizer: torch.optim.Optimizer,
    method: Method,
    state: State,
    worker: int,
    num_workers: int,
) -> None:
    """Continue as the worker that saved `state`."""
    saved = (state["worker"], state["num_workers"])
    if saved != (worker, num_workers):
        raise CheckpointError(
            f"the checkpoint is that of worker {saved[0]} of {saved[1]}, this is worker {worker} "
            f'of {num_workers}: load one that state_dict("{CENTER_ONLY}") made'
        )
    _check_layout(packed, state["layout"])
    _set_weights(packed, state["weights"])
    optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
    method.load_state_dict(copy.deepcopy(state["method"]))


def load_center(packed: Packed, method: Method, state: State) -> None:
    """Start at a saved centre, with any number of workers."""
    flat = saved_center(packed, state)
    _set_weights(packed, flat)
    present = method.state_dict()  # has the entries of this method, as at a start
    if "base" in present:
        present["base"] = flat.clone()
    method.load_state_dict({**present, "center": flat, **copy.deepcopy(state["method"])})


def saved_center(packed: Packed, state: State) -> Tensor:
    """Return the centre of a checkpoint of either kind as a flat vector."""
    if state["kind"] == FULL:
        center: Tensor = state["method"]["center"]
        return center
    _check_layout(packed, {name: tensor.numel() for name, tensor in state["center"].items()})
    flat = torch.zeros_like(packed.gather())
    views = packed.views(flat)
    for name, tensor in state["center"].items():
        views[name].copy_(tensor)
    return flat


def saved_velocity(state: State) -> Tensor | None:
    """Return the velocity of a served centre, if a full checkpoint has it."""
    return state["method"].get("velocity") if state["kind"] == FULL else None


def check_state(state: Any) -> str:
    """Return the kind of a saved state; raise CheckpointError if it is not one."""
    if not isinstance(state, dict) or state.get("kind") not in (FULL, CENTER_ONLY):
        raise CheckpointError(
            "this is no state of an ElasticAverage: give what its state_dict() returned"
        )
    if state.get("format") != _FORMAT:
        raise CheckpointError(
            f"the state has format {state.get('format')}, this version reads {_FORMAT}: load it "
            f"with the version that wrote it"
        )
    return str(state["kind"])


def _layout(packed: Packed) -> dict[str, int]:
    return dict(zip(packed.names, packed.numels, strict=True))


def _check_layout(packed: Packed, saved: dict[str, int]) -> None:
    own = _layout(packed)
    for name in sorted({*own, *saved}):
        if own.get(name) != saved.get(name):
            raise CheckpointError(
                f"{name} has {own.get(name, 0)} elements in the model and {saved.get(name, 0)} in "
                f"the checkpoint: load one of the same model"
            )


def _set_weights(packed: Packed, flat: Tensor) -> None:
    packed.gather().copy_(flat)
    packed.scatter()
