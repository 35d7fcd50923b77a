"""Any torch optimizer, over slices of its parameters: the same settings, other tensors.

For each bucket an update takes a shallow copy of the optimizer, gives it slices as parameters and
their state from a slot, and steps it. An optimizer that treats each element by itself may be given
slices; any other gets whole parameters, which it must treat one by one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

# Exactly these types: a subclass may treat its elements differently.
_ELEMENTWISE = (SGD, Adam, AdamW, RMSprop, Adagrad)
_OF_PARAMETERS = ("params", "param_names")

State = dict[str, Any]
Named = tuple[str, nn.Parameter]


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether slices of parameters are updated as the whole would be, bit for bit."""
    return type(optimizer) in _ELEMENTWISE


def over_pieces(
    optimizer: Optimizer,
    groups: Mapping[int, Sequence[Named]],
    state: Mapping[nn.Parameter, State],
) -> Optimizer:
    """Return a copy of an optimizer with some groups over other parameters and their state.

    Groups keep the names of parameters, if they had any: an optimizer may need them.
    """
    copy = object.__new__(type(optimizer))
    copy.__dict__.update(optimizer.__dict__)
    copy.param_groups = [
        _over(optimizer.param_groups[number], pieces) for number, pieces in groups.items()
    ]
    copy.state = defaultdict(dict)
    for parameter, entries in state.items():
        copy.state[parameter] = entries
    return copy


def _over(group: Mapping[str, Any], pieces: Sequence[Named]) -> dict[str, Any]:
    made = {**settings(group), "params": [parameter for _, parameter in pieces]}
    if "param_names" in group:
        made["param_names"] = [name for name, _ in pieces]
    return made


def own_numbers(copy: Optimizer) -> State:
    """Return the attributes of an optimizer other than groups and state."""
    return {k: v for k, v in copy.__dict__.items() if k not in ("param_groups", "state")}


def settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a group other than its parameters."""
    return {key: value for key, value in group.items() if key not in _OF_PARAMETERS}


def is_moved(entry: str, value: object, like: Tensor) -> bool:
    """Return whether an entry of a parameter's state lives on the tier.

    Counts of steps stay in memory, as do entries of other shapes or dtypes than the parameter.
    """
    if entry == "step" or not isinstance(value, Tensor):
        return False
    return value.shape == like.shape and value.dtype == like.dtype


def copied(value: Any) -> Any:
    """Return a copy of an entry, which a step may change."""
    return value.clone() if isinstance(value, Tensor) else value


def foreseen_entries(optimizer: Optimizer) -> list[str]:
    """Return the entries an elementwise optimizer will make, found by a trial step; else []."""
    if not is_elementwise(optimizer):
        return []
    found: dict[str, None] = {}
    for number, group in enumerate(optimizer.param_groups):
        like = group["params"][0]
        dummy = nn.Parameter(torch.zeros(2, dtype=like.dtype, device=like.device))
        dummy.grad = torch.zeros_like(dummy)
        given = {} if not optimizer.state.get(like) else {dummy: _ones(optimizer.state[like], like)}
        probe = over_pieces(optimizer, {number: [("", dummy)]}, given)
        probe.step()
        for entry, value in probe.state[dummy].items():
            if is_moved(entry, value, dummy):
                found[entry] = None
    return list(found)


def _ones(state: State, like: Tensor) -> State:
    """Return state for the dummy, if the optimizer makes its state in its constructor."""
    return {
        entry: torch.ones(2, dtype=value.dtype, device=like.device)
        if is_moved(entry, value, like)
        else copied(value)
        for entry, value in state.items()
    }
