"""Fixtures of the kernel tests."""

from collections.abc import Iterator

import jaxtyping
import pytest

from . import lowering


@pytest.fixture
def no_shape_hook() -> Iterator[None]:
    """Let wrong arguments through to the kernels' own checks, where a run checks shapes before."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture(autouse=True)
def _marked_tests_compile(request: pytest.FixtureRequest) -> None:
    """`.ci/run` finds the tests that need compilers by their marker."""
    lowering.marked = request.node.get_closest_marker("sm_90a") is not None
