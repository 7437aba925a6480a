"""Fixtures for the tests of several folders."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable garbage collection in benchmarks, which takes seconds in a test process."""
    monkeypatch.setattr(gc, "collect", lambda: 0)
