"""Fixtures of the kernel tests."""

from collections.abc import Iterator

import jaxtyping
import pytest


@pytest.fixture
def no_shape_hook() -> Iterator[None]:
    """Let wrong arguments through to the kernels' own checks, where a run checks shapes before."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
