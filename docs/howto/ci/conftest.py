"""Hypothesis profiles for CI: copy to tests/kvspec/conftest.py."""

import os

from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

for name, max_examples in {"kvspec": 100, "kvspec-nightly": 2_000}.items():
    settings.register_profile(
        name,
        max_examples=max_examples,
        stateful_step_count=100,
        deadline=None,
        # Hypothesis' own profile for CI repeats the same examples for ever, and keeps none.
        derandomize=False,
        database=DirectoryBasedExampleDatabase(".hypothesis/examples"),
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "kvspec"))
