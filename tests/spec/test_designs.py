"""Managers of other designs run clean under their promises, and their planted bugs are found."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.spec.adapters.cache_target import Depth
from radixkv.spec.harness.cache.world import CacheSubject
from radixkv.spec.harness.random_engine import run

from .designs.hashed import Dictionary, Hashed, LastCopy, PrivateCopy

DESIGNS = [Dictionary, Hashed, LastCopy, PrivateCopy]


@pytest.mark.parametrize("depth", ["api", "events"])
@pytest.mark.parametrize("design", DESIGNS, ids=lambda design: design.__name__)
def test_a_design_is_clean_under_its_promises(design: Any, depth: Depth) -> None:
    for seed in range(2):
        result = run(CacheSubject(design, depth), seed, 5_000)
        assert result.finding is None, result.finding
        assert min(result.situations[each] for each in ("hit", "refused", "resumed")) > 10
