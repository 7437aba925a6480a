"""What all tests share: Hypothesis profiles, and a JAX that several test processes can share."""

import os

from hypothesis import HealthCheck, settings

# Each test process would otherwise reserve most of a GPU's memory. Set before anything imports JAX.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# No deadline anywhere: the first call of a jitted function compiles.
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.register_profile(
    "nightly",
    deadline=None,
    print_blob=True,
    max_examples=2_000,
    stateful_step_count=100,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
