"""The pure tier passes where torch cannot be imported: run it so, once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_pure_tier_passes_with_torch_forbidden() -> None:
    here = Path(__file__)
    command = [sys.executable, "-m", "pytest", "--forbid-torch", "-p", "no:cacheprovider"]
    # Thousands of random cases find nothing more by running twice.
    selection = [str(here.parent), f"--ignore={here}", "-m", "not many_cases"]
    result = subprocess.run(
        command + selection, capture_output=True, text=True, cwd=here.parents[2], timeout=110
    )
    assert result.returncode == 0, result.stdout[-3000:]
    assert " passed" in result.stdout
