"""What all tests share: Hypothesis profiles, and a JAX that several test processes can share."""

import os
import tempfile

from hypothesis import HealthCheck, settings

# Each test process would otherwise reserve most of a GPU's memory. Set before anything imports JAX.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# JAX's CUDA plugin compiles for a GPU that is not there, and needs no cuDNN or cuBLAS for that.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

# Engines of equal shapes are made again and again: compile each step once per test process. Not
# once for all of them: JAX does not write the entries of this cache atomically.
_compiled = tempfile.TemporaryDirectory(prefix="radixkv-tests-", ignore_cleanup_errors=True)
os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def pytest_unconfigure() -> None:
    """Remove what this process compiled."""
    _compiled.cleanup()


# No deadline anywhere: the first call of a jitted function compiles. And nothing is too slow: how
# long it takes to draw an example is a matter of the machine, and of what else runs there.
settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "nightly",
    deadline=None,
    print_blob=True,
    max_examples=2_000,
    stateful_step_count=100,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
