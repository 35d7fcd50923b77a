"""The import table of the project: who may import whom. The test beside it holds everyone to it."""

from __future__ import annotations

OPEN_TO_ALL = {"errors", "lazy", "reference", "units"}
DECIDERS = {
    "errors",
    "lazy",
    "reference",
    "units",
    "plan",
    "topology",
    "config",
    "trace",
    "schedules",
    "costs",
    "simulator",
    "planner",
}

_DOERS = {
    "comm",
    "tensor",
    "gradients",
    "offload",
    "averaging",
    "models",
    "data",
    "pipeline",
    "checkpoint",
}

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "lazy": set(),
    "reference": set(),
    "units": set(),
    "topology": set(),
    "trace": set(),
    "schedules": set(),
    "plan": {"topology"},
    "costs": {"plan", "topology"},
    "config": {"plan", "topology", "schedules", "costs"},
    "simulator": {"schedules", "costs", "plan", "topology", "trace"},
    "planner": {"simulator", "costs", "plan", "config", "topology"},
    "report": {"trace", "plan"},
    "comm": {"topology", "trace"},
    "data": {"topology"},
    "models": {"topology", "costs", "config"},
    "tensor": {"comm", "topology", "schedules", "trace"},
    "gradients": {"comm", "topology", "schedules", "trace"},
    "offload": {"comm", "topology", "schedules", "trace"},
    "averaging": {"comm", "topology", "schedules", "trace"},
    "pipeline": {"schedules", "comm", "offload", "trace", "topology", "plan"},
    "checkpoint": {"comm", "topology", "plan"},
    "profile": {"comm", "offload", "models", "costs", "trace", "topology"},
    "train": _DOERS | {"plan", "config", "costs", "trace", "topology", "schedules"},
}
ANYTHING = {"cli", "__init__", "__main__"}
