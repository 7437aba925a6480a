"""Mosaic kernels run on a CPU, thread by thread, by JAX's interpret mode."""

import contextlib
from collections.abc import Iterator
from importlib import import_module

import jax

from radixkv.kernels import mosaic

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
        yield mosaic.interpret_params(detect_races=True)
        if module.get_races().races_found:
            raise RaceError("the race detector found a race")
    finally:
        module.gpu_callbacks.reset_gpu_interpret_mode_state()
