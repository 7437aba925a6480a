"""Fixtures of the kernel tests."""

from collections.abc import Iterator

import jaxtyping
import pytest

from . import lowering


@pytest.fixture
def no_shape_hook() -> Iterator[None]:
    """Disable jaxtyping's checks, so that wrong arguments reach the checks of the kernels."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture(autouse=True)
def _marked_tests_compile(request: pytest.FixtureRequest) -> None:
    """Only tests marked `sm_90a`, which `.ci/run` selects, may compile."""
    lowering.marked = request.node.get_closest_marker("sm_90a") is not None
