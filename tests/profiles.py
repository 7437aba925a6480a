"""Hypothesis profiles, and the size of every property test and machine in them.

`HYPOTHESIS_PROFILE` chooses one. ``ci`` is the default; ``nightly`` does 20 times as many examples.
Neither is derandomized: without ``--hypothesis-seed`` each run meets new examples, and failures are
kept in ``.hypothesis/examples``, from where the next run repeats them first.
"""

from __future__ import annotations

import os
from typing import Final

from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

EXAMPLES: Final = 100
"""Of a test that says nothing else, in CI."""

FACTORS: Final = {"ci": 1, "nightly": 20}

PROFILE: Final = os.environ.get("HYPOTHESIS_PROFILE", "ci")


def load_profile() -> None:
    """Register the profiles and load the chosen one."""
    for name, factor in FACTORS.items():
        settings.register_profile(
            name,
            max_examples=factor * EXAMPLES,
            derandomize=False,
            database=DirectoryBasedExampleDatabase(".hypothesis/examples"),
            print_blob=True,
            # The first call of a jitted function compiles, and how long it takes to draw an example
            # is a matter of the machine, and of what else runs there.
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        )
    settings.load_profile(PROFILE)


def scaled(examples: int, steps: int = 50) -> settings:
    """Return settings of so many examples in CI, and more in larger profiles.

    Args:
        examples: examples in the profile ``ci``.
        steps: steps per example of a state machine.
    """
    return settings(max_examples=FACTORS[PROFILE] * examples, stateful_step_count=steps)
