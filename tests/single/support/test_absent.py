"""What is put aside, as torch is for the tests of the deciding half, comes back as it was."""

from __future__ import annotations

import sys

import pytest
import torch

import ganglion.execute.comm.local.group
from tests.support.absent import Absent, without_torch


def test_every_module_comes_back_the_same() -> None:
    before = dict(sys.modules)
    with without_torch():
        assert "torch" not in sys.modules
        assert "ganglion" not in sys.modules
    assert all(sys.modules[name] is module for name, module in before.items())
    assert torch.ones(2).sum() == 2


def test_inside_everything_is_imported_anew_and_torch_is_not() -> None:
    apart, outside = without_torch(), sys.modules["ganglion.decide.topology"]
    with apart:
        import ganglion.decide.topology as inside

        assert inside is not outside
        with pytest.raises(ModuleNotFoundError, match="torch is absent here"):
            import ganglion.execute.comm.local.group  # noqa: F401
    with apart:
        import ganglion.decide.topology as again

        assert again is inside
    assert sys.modules["ganglion.decide.topology"] is outside


def test_whoever_asks_is_told_of_even_if_it_would_do_without() -> None:
    apart = Absent("json.tool")
    with apart:
        try:
            import json.tool
        except ImportError:
            import json
    assert json.loads("1") == 1
    assert apart.refused == ["json.tool"]


def test_it_is_not_entered_twice() -> None:
    apart = without_torch()
    with apart, pytest.raises(AssertionError, match="entered twice"), apart:
        pass
    assert sys.modules["torch"] is torch
    assert sys.modules["ganglion.execute.comm.local.group"] is ganglion.execute.comm.local.group
