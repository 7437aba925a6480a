"""Mosaic kernels in JAX's interpret mode: on a CPU, thread by thread, with race detection."""

import contextlib
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any
from unittest import mock

import jax
import pytest

from radixkv.kernels import mosaic_compat as mosaic

SEES_ASYNC_RACES = jax.__version_info__ >= (0, 11)
"""JAX 0.10 detects a missing barrier wait, but no race with an asynchronous copy."""

PARAMS = mosaic.interpret_params()


class RaceError(AssertionError):
    """The race detector found two unordered accesses."""


def _module():
    return import_module("jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call")


@contextlib.contextmanager
def races_detected() -> Iterator[mosaic.Interpret]:
    """Yield parameters that detect races; raise RaceError at the end if there was one.

    JAX 0.10 and 0.11 print a race and set a flag, 0.12 raises. Each kernel has a new flag, so
    all are kept. A copy without a wait for its end is a ValueError in all versions.
    """
    callbacks = _module().gpu_callbacks
    name = "GPURaceDetectionState" if SEES_ASYNC_RACES else "RaceDetectionState"
    make, made = getattr(callbacks, name), []

    def make_and_keep(*args: Any, **options: Any) -> Any:
        made.append(make(*args, **options))
        return made[-1]

    callbacks.reset_gpu_interpret_mode_state()
    try:
        with mock.patch.object(callbacks, name, make_and_keep):
            # Copies on the same simulated copy thread are ordered; the default of 5 hides races.
            yield mosaic.interpret_params(detect_races=True, num_tma_threads_per_device=64)
        assert made, "no kernel was simulated"
        if any(state.races_found for state in made):
            raise RaceError("the race detector found a race")
    finally:
        callbacks.reset_gpu_interpret_mode_state()


CAUGHT = "|".join(
    (
        "RACE DETECTED",
        "the race detector found a race",
        # A barrier has completed again before all who wait at it had seen that. Who notices this
        # first depends on the order of the threads: who arrives, who waits, or who ends.
        "completed again before previous completion was observed",  # 0.10; so are the next two
        "has not participated in all completions of the barrier",
        "did not observe all phases",
        "but no threads observed phase",  # 0.11; so are the next four
        "missed observing phase",
        "threads must observe each barrier completion",
        "for the first time, but barrier is already at phase",
        "had only observed barrier up to phase",
        "must observe all of its completions",  # 0.12
        "read-side operations completed before kernel finished",
    )
)


def assert_caught(run: Callable[[mosaic.Interpret], object]) -> None:
    """Assert that the simulation reports a race in `run`, or copies that outlive the kernel."""
    failures = RaceError, ValueError, jax.errors.JaxRuntimeError
    with pytest.raises(failures) as failure, races_detected() as params:
        run(params)
    assert re.search(CAUGHT, str(failure.value)), failure.value
