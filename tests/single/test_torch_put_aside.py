"""torch is put aside for the tests of the deciding half and comes back as it was."""

from __future__ import annotations

import sys

import pytest
import torch

import ganglion.comm.local
from tests.without_torch import WithoutTorch


def test_every_module_comes_back_the_same() -> None:
    before = dict(sys.modules)
    with WithoutTorch():
        assert "torch" not in sys.modules
        assert "ganglion" not in sys.modules
    assert all(sys.modules[name] is module for name, module in before.items())
    assert torch.ones(2).sum() == 2


def test_inside_everything_is_imported_anew_and_torch_is_not() -> None:
    apart, outside = WithoutTorch(), sys.modules["ganglion.topology"]
    with apart:
        import ganglion.topology as inside

        assert inside is not outside
        with pytest.raises(ModuleNotFoundError, match="must do without torch"):
            import ganglion.comm.local  # noqa: F401
    with apart:
        import ganglion.topology as again

        assert again is inside
    assert sys.modules["ganglion.topology"] is outside


def test_it_is_not_entered_twice() -> None:
    apart = WithoutTorch()
    with apart, pytest.raises(AssertionError, match="entered twice"), apart:
        pass
    assert sys.modules["torch"] is torch
    assert sys.modules["ganglion.comm.local"] is ganglion.comm.local
