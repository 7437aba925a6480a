"""What all tests share: Hypothesis profiles, and a JAX that several test processes can share."""

import os
import tempfile

import pytest

from .profiles import FACTORS, PROFILE, load_profile

# Each test process would otherwise reserve most of a GPU's memory. Set before anything imports JAX.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# JAX's CUDA plugin compiles for a GPU that is not there, and needs no cuDNN or cuBLAS for that.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

# Engines of equal shapes are made again and again, in each process: compile each step once for all
# of them. Only with a maximum size does JAX lock the entries of this cache (with filelock).
os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(2**34))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
_compiled: tempfile.TemporaryDirectory[str] | None = None
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # as it is in the controller of all processes
    _compiled = tempfile.TemporaryDirectory(prefix="radixkv-tests-", ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled.name


def pytest_unconfigure() -> None:
    """Remove what was compiled."""
    if _compiled is not None:
        _compiled.cleanup()


load_profile()


def pytest_configure(config: pytest.Config) -> None:
    """Enlarge the runs of every kvspec.toml as the profile enlarges property tests."""
    if not hasattr(config, "workerinput"):  # which has the options of its controller
        config.option.kv_scale *= FACTORS[PROFILE]
