"""How many examples Hypothesis tries: few and always the same, or many at random when asked.

`GANGLION_HYPOTHESIS=thorough`, which `make test-all` sets, asks for many.
"""

from __future__ import annotations

import os

from hypothesis import settings
from hypothesis.internal.conjecture import providers

VARIABLE = "GANGLION_HYPOTHESIS"
SMALL, THOROUGH = "ganglion", "thorough"
SHARE = 20  # the small profile tries one example of so many
FEWEST = 20  # and this many at least


def load_profile() -> None:
    """Set Hypothesis up for a process of tests."""
    # Machines are shared and noisy: no test may fail because it was slow.
    settings.register_profile(
        SMALL, deadline=None, derandomize=True, database=None, max_examples=FEWEST
    )
    settings.register_profile(THOROUGH, deadline=None, max_examples=100)
    settings.load_profile(chosen())
    if chosen() == SMALL:
        _draw_the_same_whatever_is_imported()


def chosen() -> str:
    """Return the name of the profile that the environment asks for."""
    return os.environ.get(VARIABLE, SMALL)


def examples(thorough: int) -> int:
    """Return how many examples a test tries that tries `thorough` of them when asked for many."""
    return thorough if chosen() == THOROUGH else min(thorough, max(FEWEST, thorough // SHARE))


def _draw_the_same_whatever_is_imported() -> None:
    """Leave constants of our own modules out of the examples.

    Hypothesis mixes them in as far as modules are imported by then, so that the examples of a test
    would depend on which others the process holds. It has no setting for that.
    """
    if hasattr(providers, "_get_local_constants"):
        none = providers.Constants()
        providers._get_local_constants = lambda: none
