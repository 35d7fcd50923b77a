"""This tier is imported and run where torch does not exist: it can be seen from inside."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

import ganglion

ROOT = Path(ganglion.__file__).parents[1]
# What a command line needs before it knows that it will train.
FRONT = ["ganglion.cli.main", "ganglion.cli.train"]


def deciding_modules() -> list[str]:
    paths = [path.relative_to(ROOT).with_suffix("") for path in ROOT.glob("ganglion/**/*.py")]
    return [".".join(path.parts) for path in sorted(paths) if path.parts[1] in ("decide", "trace")]


@pytest.mark.parametrize(
    "name", ["torch", "torch.nn", "ganglion.execute.comm.local.group", "ganglion.execute.train"]
)
def test_torch_and_what_needs_it_cannot_be_imported(name: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"torch.* is absent here"):
        importlib.import_module(name)


def test_all_that_decides_is_imported_without_torch() -> None:
    modules = deciding_modules()
    assert {"ganglion.decide.plan", "ganglion.decide.costs.memory"} <= set(modules)
    for name in [*modules, *FRONT]:
        importlib.import_module(name)
    assert not [name for name in sys.modules if name.partition(".")[0] == "torch"]
