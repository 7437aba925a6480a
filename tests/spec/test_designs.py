"""Managers of other designs run clean under their promises, and their planted bugs are found."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import pytest

from radixkv.spec.adapters.cache import Snapshot
from radixkv.spec.adapters.cache_target import Depth
from radixkv.spec.harness.cache.world import CacheSubject
from radixkv.spec.harness.engine import Trace, replay
from radixkv.spec.harness.random_engine import run

from ..profiles import PROFILE
from .designs.bugs import DESIGN_BUGS, Bug, planted
from .designs.hashed import Dictionary, Hashed, LastCopy, PrivateCopy
from .designs.radix import LazySGLang, LightLLM, MiniSGLang, SGLang
from .designs.trie import Ahead, LMDeploy, Lookahead

DESIGNS = [
    Dictionary, Hashed, LastCopy, PrivateCopy, SGLang, MiniSGLang, LightLLM, LazySGLang, LMDeploy,
    Ahead, Lookahead,
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


class TakesSlotsLater(Lookahead):
    """Takes slots only when a request grows."""

    def admit(self, name: str, tokens: Sequence[int], namespace: bytes) -> int | None:
        self.slots = 0
        return super().admit(name, tokens, namespace)

    def append(self, name: str, tokens: Sequence[int]) -> bool:
        self.slots = Lookahead.slots
        return super().append(name, tokens)


GROWS: Trace = [["forward", "r2", 1], ["append", "r2", [3]]]


@pytest.mark.parametrize(
    ("design", "num_blocks", "grows"), [(Lookahead, 7, []), (TakesSlotsLater, 8, GROWS)]
)
def test_what_is_evicted_beside_lookahead_slots_need_not_be_hit(
    design: Any, num_blocks: int, grows: Trace
) -> None:
    """The slots of the second request fill the pool, so that the third one evicts the first."""
    config = {"num_blocks": num_blocks, "block_size": 1, "max_running": 4, "alphabet": 3}
    trace: Trace = [
        ["submit", "r1", [0, 3], 0, 0], ["admit", "r1"], ["forward", "r1", 2], ["finish", "r1"],
        ["submit", "r2", [3], 8, 0], ["admit", "r2"], *grows,
        ["submit", "r3", [65536, 65536], 0, 0], ["admit", "r3"], ["finish", "r3"],
        ["submit", "r4", [0, 3], 0, 0], ["admit", "r4"],
    ]  # fmt: skip
    assert replay(CacheSubject(design), config, trace) is None


class Shown(PrivateCopy):
    """Shows all, and how many blocks are available after each match."""

    keeps = 1  # last tokens, of which a match leaves the block

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.waiting: dict[str, tuple[list[int], bytes]] = {}

    def found(self, tokens: list[int], namespace: bytes) -> list[int]:
        cached = [self.blocks_of.get(prefix) for prefix in self.hashes(namespace, tokens)]
        return [blocks[0] for blocks in takewhile(bool, cached) if blocks]

    def match(self, name: str, tokens: list[int], namespace: bytes) -> int:
        self.waiting[name] = tokens, namespace
        return len(self.found(tokens[:-1], namespace)) * self.block_size

    def admit(self, name: str, tokens: Sequence[int], namespace: bytes) -> int | None:
        self.waiting.pop(name, None)
        return super().admit(name, tokens, namespace)

    def available_after(self, tokens: list[int], namespace: bytes) -> int:
        found = self.found(tokens[: len(tokens) - self.keeps], namespace)
        return self.available() - sum(not self.users[block] for block in found)

    def snapshot(self) -> Snapshot:
        cached = {prefix: block for prefix, [block] in self.blocks_of.items()}
        return Snapshot(
            free=[block for block in self.queue if block not in self.hash_of],
            cached=cached,
            users={prefix: self.users[block] for prefix, block in cached.items()},
            idle=[block for block in self.queue if block in self.hash_of],
            available_after={
                name: self.available_after(*request) for name, request in self.waiting.items()
            },
        )


class PinsTheLast(Shown):
    """Counts the block of the last token as pinned, too, which no match hits."""

    keeps = 0


def test_a_match_without_the_last_token_pins_no_block_of_it() -> None:
    for seed in range(2):
        assert run(CacheSubject(Shown, "full"), seed, 5_000).finding is None
        finding = run(CacheSubject(PinsTheLast, "full"), seed, 5_000).finding
        assert finding is not None and finding.rule.startswith("S2 ")
        assert re.fullmatch(r"\d+ available after r\d+, not \d+", finding.why)


@pytest.mark.parametrize("bug", DESIGN_BUGS, ids=lambda bug: f"{bug.design}: {bug.name}")
def test_a_bug_of_a_design_is_found(bug: Bug) -> None:
    result = run(CacheSubject(planted(bug), bug.depth), 0, 20_000)
    assert result.finding is not None, f"survives {result.num_steps} steps"


def test_every_design_has_bugs() -> None:
    assert {bug.design for bug in DESIGN_BUGS} == {design.__name__ for design in DESIGNS}
