"""Managers of other designs run clean under their promises, and their planted bugs are found."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.spec.adapters.cache_target import Depth
from radixkv.spec.harness.cache.world import CacheSubject
from radixkv.spec.harness.random_engine import run

from ..profiles import PROFILE
from .designs.bugs import DESIGN_BUGS, Bug, planted
from .designs.hashed import Dictionary, Hashed, LastCopy, PrivateCopy
from .designs.radix import LazySGLang, LightLLM, MiniSGLang, SGLang
from .designs.trie import Ahead, LMDeploy

DESIGNS = [
    Dictionary, Hashed, LastCopy, PrivateCopy, SGLang, MiniSGLang, LightLLM, LazySGLang, LMDeploy,
    Ahead,
]  # fmt: skip

LONG_STEPS = 1_000_000 if PROFILE == "nightly" else 100_000

every_design = pytest.mark.parametrize("design", DESIGNS, ids=lambda design: design.__name__)
every_depth = pytest.mark.parametrize("depth", ["api", "events"])


@every_depth
@every_design
def test_a_design_is_clean_under_its_promises(design: Any, depth: Depth) -> None:
    for seed in range(2):
        result = run(CacheSubject(design, depth), seed, 5_000)
        assert result.finding is None, result.finding
        assert min(result.situations[each] for each in ("hit", "refused", "resumed")) > 10


@pytest.mark.nightly
@every_depth
@every_design
def test_a_design_is_clean_for_long(design: Any, depth: Depth) -> None:
    assert run(CacheSubject(design, depth), 100, LONG_STEPS).finding is None


@pytest.mark.parametrize("bug", DESIGN_BUGS, ids=lambda bug: f"{bug.design}: {bug.name}")
def test_a_bug_of_a_design_is_found(bug: Bug) -> None:
    result = run(CacheSubject(planted(bug), bug.depth), 0, 20_000)
    assert result.finding is not None, f"survives {result.num_steps} steps"


def test_every_design_has_bugs() -> None:
    assert {bug.design for bug in DESIGN_BUGS} == {design.__name__ for design in DESIGNS}
