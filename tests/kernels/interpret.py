"""Mosaic kernels run on a CPU, thread by thread, by JAX's interpret mode."""

import contextlib
import re
from collections.abc import Callable, Iterator
from importlib import import_module

import jax
import pytest

from radixkv.kernels import mosaic_compat as mosaic

SEES_ASYNC_RACES = jax.__version_info__ >= (0, 11)
"""JAX 0.10 sees a missing barrier wait, but no race with a copy that runs by itself."""

PARAMS = mosaic.interpret_params()


class RaceError(AssertionError):
    """The race detector found two accesses that nothing orders."""


def _module():
    return import_module("jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call")


@contextlib.contextmanager
def races_detected() -> Iterator[mosaic.Interpret]:
    """Parameters of a run that looks for races; RaceError at the end if it found one.

    0.10 and 0.11 print what they find and set a flag, 0.12 raises; a copy whose end nobody waits
    for is a ValueError in all of them.
    """
    module = _module()
    module.gpu_callbacks.reset_gpu_interpret_mode_state()
    try:
        # Copies that share one of the simulated copy threads, of which there are 5, are in order.
        yield mosaic.interpret_params(detect_races=True, num_tma_threads_per_device=64)
        if module.get_races().races_found:
            raise RaceError("the race detector found a race")
    finally:
        module.gpu_callbacks.reset_gpu_interpret_mode_state()


CAUGHT = "|".join(
    (
        "RACE DETECTED",
        "the race detector found a race",
        "completed again before previous completion was observed",  # 0.10
        "but no threads observed phase",  # 0.11
        "read-side operations completed before kernel finished",
    )
)


def assert_caught(run: Callable[[mosaic.Interpret], object]) -> None:
    """That `run` has a race, or ends before its copies do, and the simulation says so."""
    failures = RaceError, ValueError, jax.errors.JaxRuntimeError
    with pytest.raises(failures) as failure, races_detected() as params:
        run(params)
    assert re.search(CAUGHT, str(failure.value)), failure.value
