"""Optimizer state independent of layout: every entry under the name of its parameter.

    optimizer.exp_avg.layers.0.mlp.up.weight      a tensor like the others, in the shards
    groups, and entries that are plain numbers    in state.json

To resume, `prepare_optimizers` makes exactly the entries of the checkpoint, so that `load` can fill
them. No step is taken: even with zero gradients and learning rate it may decay weights and counts.

The state of a split parameter is split like it; entries of one number, such as a count of steps,
are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from ganglion.errors import CheckpointError
from ganglion.execute.checkpoint.pieces import RankPlacements, Saveable
from ganglion.execute.checkpoint.reading import read_specs, read_state
from ganglion.execute.checkpoint.state import JSON
from ganglion.execute.checkpoint.storage import TensorSpec

PREFIX = "optimizer."
Room = Callable[[str, str], Tensor | None]  # of a parameter's entry
_NOT_SETTINGS = ("params", "param_names")


def optimizer_tensors(optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """Return the state tensors, without copies, as `optimizer.ENTRY.PARAMETER`."""
    return {key: value for key, _, _, value in _tensor_entries(optimizers)}


def optimizer_pieces(
    optimizers: Sequence[Optimizer], places: RankPlacements, owner: str = ""
) -> dict[str, Saveable]:
    """Return the state tensors as pieces: those shaped like their parameter are cut like it.

    `owner` is a prefix of the names, for a worker with state of its own.
    """
    return {
        owner + key: places.piece(name, value) if value.shape == parameter.shape else value
        for key, name, parameter, value in _tensor_entries(optimizers)
    }


def check_state_shapes(optimizers: Sequence[Optimizer], places: RankPlacements) -> None:
    """Refuse state of split parameters whose position in the whole is unknown."""
    for key, name, parameter, value in _tensor_entries(optimizers):
        if places.is_cut(name) and value.shape != parameter.shape and value.numel() > 1:
            raise CheckpointError(
                f"{key} has shape {list(value.shape)}, but its parameter is split and has shape "
                f"{list(parameter.shape)} here: state that is neither shaped like the parameter "
                f"nor one number cannot be saved; choose another optimizer.name"
            )


def optimizer_scalars(optimizers: Sequence[Optimizer]) -> dict[str, JSON]:
    """Return the state entries that are plain numbers or None; refuse other kinds."""
    scalars: dict[str, JSON] = {}
    for key, _, _, value in _entries(optimizers):
        if isinstance(value, Tensor):
            continue
        if not isinstance(value, bool | int | float | None):
            raise CheckpointError(
                f"{key} is a {type(value).__name__}: optimizer state must be tensors or numbers "
                f"to be saved; choose another optimizer.name"
            )
        scalars[key] = value
    return scalars


def optimizer_settings(optimizers: Sequence[Optimizer]) -> list[dict[str, JSON]]:
    """Return kind, hyper-parameters and parameter names of every group."""
    return [
        {
            "kind": type(optimizer).__name__,
            "settings": {
                key: _plain(value) for key, value in group.items() if key not in _NOT_SETTINGS
            },
            "parameters": [name for name, _ in _named(optimizer, group)],
        }
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]


def optimizer_record(optimizers: Sequence[Optimizer]) -> dict[str, JSON]:
    """Return the groups and the scalar entries, for `SavedState.optimizer`."""
    return {"groups": optimizer_settings(optimizers), "scalars": optimizer_scalars(optimizers)}


def in_memory(name: str, entry: str) -> Tensor | None:
    """Return None: state lives where torch's optimizers keep it."""
    return None


def prepare_optimizers(
    optimizers: Sequence[Optimizer],
    path: Path,
    places: RankPlacements | None = None,
    owner: str = "",
    room: Room = in_memory,
) -> None:
    """Give each parameter the state entries the checkpoint has for it, tensors as zeros.

    Scalar entries get their saved values; tensors get theirs when `load` fills
    `optimizer_tensors(optimizers)`. `places` gives the placements of split parameters, `owner` a
    prefix of names. `room(parameter, entry)` returns the tensor of an entry that is shaped like its
    parameter and must not be made in memory. Weights and hyper-parameters do not change. Refuse a
    parameter whose saved state is of another kind of optimizer.
    """
    record = read_state(path).optimizer
    _check_kinds(optimizers, record, path)
    specs = read_specs(path).items()
    saved: dict[str, TensorSpec | JSON] = {
        key.removeprefix(owner): spec for key, spec in specs if key.startswith(owner + PREFIX)
    }
    # Scalars are the same for all owners.
    saved.update(cast(Mapping[str, JSON], record.get("scalars", {})))
    by_parameter: dict[str, dict[str, TensorSpec | JSON]] = {}
    for key, value in saved.items():
        entry, _, name = key.removeprefix(PREFIX).partition(".")
        by_parameter.setdefault(name, {})[entry] = value
    for optimizer, group, name, parameter in _parameters(optimizers):
        optimizer.state.pop(parameter, None)
        whole = tuple(parameter.shape) if places is None else places.whole_shape(name, parameter)
        for entry, value in by_parameter.get(name, {}).items():
            if isinstance(value, TensorSpec):
                is_alike = entry != "step" and value == TensorSpec(whole, parameter.dtype)
                made = room(name, entry) if is_alike else None
                if made is None:
                    made = _zeros(parameter, whole, group, entry, value)
                optimizer.state[parameter][entry] = made
            else:
                optimizer.state[parameter][entry] = value


def changed_settings(optimizers: Sequence[Optimizer], record: Mapping[str, JSON]) -> list[str]:
    """Return one line for each hyper-parameter that differs from a saved record.

    For information only: the run file decides, so the current value is used.
    """
    saved = cast(Sequence[Mapping[str, Any]], record.get("groups", ()))
    lines = []
    for now, then in zip(optimizer_settings(optimizers), saved, strict=False):
        current, before = cast(Mapping[str, JSON], now["settings"]), then["settings"]
        # Where the base rate is known, the rate itself changes at every step.
        moving = {"lr"} if "initial_lr" in current else set()
        for key in sorted((set(current) & set(before)) - moving):
            if current[key] != before[key]:
                lines.append(f"{now['kind']} {key}: {before[key]} -> {current[key]}")
    return lines


def _check_kinds(optimizers: Sequence[Optimizer], record: Mapping[str, JSON], path: Path) -> None:
    groups = cast(Sequence[Mapping[str, Any]], record.get("groups", ()))
    saved = {name: group["kind"] for group in groups for name in group["parameters"]}
    for optimizer, _, name, _ in _parameters(optimizers):
        kind = type(optimizer).__name__
        if saved.get(name, kind) != kind:
            raise CheckpointError(
                f"{path} holds {saved[name]} state for {name}, but the run uses {kind}: set "
                f"optimizer.name back, or set output.dir to a new folder"
            )


def _zeros(
    parameter: Tensor,
    whole: tuple[int, ...],
    group: Mapping[str, Any],
    entry: str,
    spec: TensorSpec,
) -> Tensor:
    """Return a zero state tensor where torch's optimizers would keep it."""
    if entry == "step":
        # torch keeps step counts on the host unless the update itself runs on the device.
        on_device = group.get("capturable") or group.get("fused")
        device = parameter.device if on_device else torch.device("cpu")
        return torch.zeros(spec.shape, dtype=spec.dtype, device=device)
    if spec.shape == whole:
        # zeros_like also takes over strides, and the cuts of a DTensor.
        return torch.zeros_like(parameter, dtype=spec.dtype, requires_grad=False)
    return torch.zeros(spec.shape, dtype=spec.dtype, device=parameter.device)


def _tensor_entries(
    optimizers: Sequence[Optimizer],
) -> Iterator[tuple[str, str, Tensor, Tensor]]:
    for key, name, parameter, value in _entries(optimizers):
        if isinstance(value, Tensor):
            yield key, name, parameter, value


def _entries(optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, str, Tensor, object]]:
    """Yield the key of every entry, its parameter with name, and its value."""
    for optimizer, _, name, parameter in _parameters(optimizers):
        for entry, value in optimizer.state.get(parameter, {}).items():
            assert "." not in entry, f"state entry {entry!r} would not be told from a name"
            yield f"{PREFIX}{entry}.{name}", name, parameter, value


def _parameters(
    optimizers: Sequence[Optimizer],
) -> Iterator[tuple[Optimizer, dict[str, Any], str, Tensor]]:
    seen: set[str] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for name, parameter in _named(optimizer, group):
                if name in seen:
                    raise CheckpointError(
                        f"two optimizer groups hold a parameter named {name}: give every "
                        f"parameter to one optimizer, under its own name"
                    )
                seen.add(name)
                yield optimizer, group, name, parameter


def _named(optimizer: Optimizer, group: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    if "param_names" not in group:
        raise CheckpointError(
            f"{type(optimizer).__name__} was built without parameter names, which its state is "
            f"saved under: build it from model.named_parameters()"
        )
    return list(zip(group["param_names"], group["params"], strict=True))


def _plain(value: object) -> JSON:
    if isinstance(value, Tensor):
        return cast(JSON, value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else repr(value)
