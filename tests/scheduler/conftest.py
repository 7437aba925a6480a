"""What tests of several folders of the scheduler share."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let benchmarks collect no garbage: a test process has so much that it takes seconds."""
    monkeypatch.setattr(gc, "collect", lambda: 0)
