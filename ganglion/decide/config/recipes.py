"""The built-in run files: shipped inside the package, used by name."""

from __future__ import annotations

import tomllib
from importlib import resources
from typing import Any

QUICKSTART = "quickstart"


def recipe(name: str) -> dict[str, Any]:
    """Return the tables of a built-in run file."""
    file = resources.files("ganglion.decide.config").joinpath("recipes", f"{name}.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))
