"""Our cache manager and its pool under the specification, and that the traffic is worth it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest

from radixkv.scheduler.fuzz import cache_adapter, pool_adapter
from radixkv.spec.harness.cache import admit, checks
from radixkv.spec.harness.cache.world import CacheSubject
from radixkv.spec.harness.engine import Trace, replay
from radixkv.spec.harness.pool_world import PoolSubject
from radixkv.spec.harness.random_engine import run
from radixkv.spec.model.promises import Promises
from radixkv.spec.rules.cache import CACHE_RULES
from radixkv.spec.rules.rule import Violation

from .floors import CACHE_FLOORS, too_rare
from .toys import Plain
from .violations import code


def test_our_pool_keeps_every_rule() -> None:
    result = run(PoolSubject(pool_adapter.make_factory()), 0, 20_000)
    assert result.finding is None, result.finding
    wanted = {"allocation refused", "wrong ids", "recycled many"}
    assert set(result.situations) == wanted and min(result.situations.values()) > 500


@pytest.mark.nightly
def test_every_situation_comes_up_often_enough() -> None:
    result = run(CacheSubject(cache_adapter.make_factory(), "full"), 7, 50_000)
    assert result.finding is None, result.finding
    assert not too_rare(result.situations, CACHE_FLOORS, result.num_steps)
    assert set(result.situations) == set(CACHE_FLOORS), "a situation has no floor"
    assert len(CACHE_FLOORS) >= 20


def test_what_is_rare_is_told() -> None:
    found = too_rare({"hit": 10, "full hit": 4}, {"hit": 10, "full hit": 5, "resumed": 1}, 200_000)
    assert found == {"full hit": (4, 5.0), "resumed": (0, 1.0)}
    assert not too_rare({"hit": 1}, {"hit": 10}, 20_000)


def test_a_run_is_determined_by_its_seed() -> None:
    subject = CacheSubject(cache_adapter.make_factory(), "full")
    first, again, other = (run(subject, seed, 3_000) for seed in (5, 5, 6))
    assert first == again != other and first.finding is other.finding is None


class SharesUnwritten(Plain):
    """Gives an equal prompt the blocks of the one before it, also one that is not full."""

    def admit(self, name: str, tokens: Sequence[int], namespace: bytes) -> int | None:
        if not self.tables:
            return super().admit(name, tokens, namespace)
        [other] = self.tables
        self.tables[name], self.lengths[name] = list(self.tables[other]), self.lengths[other]
        return 0


@pytest.mark.parametrize("block_size", [2, 3])
@pytest.mark.parametrize("num_tokens", range(1, 7))
def test_a_step_may_begin_in_no_block_that_another_request_reads(
    block_size: int, num_tokens: int
) -> None:
    config = {"num_blocks": 8, "block_size": block_size, "max_running": 2, "alphabet": 1}
    trace: Trace = [
        *(["submit", name, [0] * num_tokens, 1, 0] for name in ("r1", "r2")),
        ["admit", "r1"], ["forward", "r1", num_tokens], ["admit", "r2"],
        ["append", "r1", [0]], ["forward", "r1", 1],
    ]  # fmt: skip
    found = replay(CacheSubject(SharesUnwritten), config, trace)
    assert (found is not None and found.rule.code == "C2") == (num_tokens % block_size > 0)


def test_a_trace_replays_and_what_does_not_apply_is_skipped() -> None:
    subject = CacheSubject(cache_adapter.make_factory(), "full")
    config = {"num_blocks": 4, "block_size": 2, "max_running": 2, "alphabet": 1}
    trace: Trace = [
        ["admit", "r1"],
        ["submit", "r1", [1, 2, 3], 2, 0],
        ["admit", "r1"],
        ["forward", "r1", 3],
        ["append", "r1", [4, 5]],
        ["done", "r9.1"],
        ["drain"],
    ]
    assert replay(subject, config, trace) is None
    world = subject.world(config)
    assert [world.apply(operation) for operation in trace] == [False, *[True] * 4, False, True]


def test_there_are_enough_rules() -> None:
    assert len(CACHE_RULES) >= 45


def entry(last_use: int, depth: int) -> Any:
    return SimpleNamespace(last_use=last_use, depth=depth)


def test_idle_blocks_are_in_order_of_use_and_leaves_before_their_parents() -> None:
    unused = {1: entry(5, 0), 2: entry(5, 1), 3: entry(5, 2), 4: entry(7, 0)}
    model: Any = SimpleNamespace(unused=lambda: unused, promises=SimpleNamespace(lru=True))
    for idle in permutations(unused):
        shot: Any = SimpleNamespace(idle=list(idle))
        if idle == (3, 2, 1, 4):
            checks._check_idle(model, shot)
            continue
        with pytest.raises(Violation) as caught:
            checks._check_idle(model, shot)
        text = f"the idle blocks {shot.idle} are not in order"
        assert (caught.value.rule.code, caught.value.why) == ("W5", text)


class Exact(Plain):
    """It promises that it counts, frees, holds and refuses exactly."""

    promises = Promises(
        refuses_only_short=True, holds_exactly=True, frees_at_once=True, counts_available=True
    )


class LosesWhenItRefuses(Exact):
    def admit(self, name: str, tokens: Sequence[int], namespace: bytes) -> int | None:
        hit = super().admit(name, tokens, namespace)
        if hit is None and self.free:
            self.free.pop()
        return hit


class ShrinksWhenItRefuses(Exact):
    def append(self, name: str, tokens: Sequence[int]) -> bool:
        if super().append(name, tokens):
            return True
        if self.tables[name]:
            self.free.append(self.tables[name].pop())
        return False


class HoldsOneLess(Exact):
    def block_table(self, name: str) -> list[int]:
        return self.tables[name][:-1]


class HoldsOneMore(Exact):
    def append(self, name: str, tokens: Sequence[int]) -> bool:
        if not super().append(name, tokens):
            return False
        if self.free:
            self.tables[name].append(self.free.pop())
        return True


class HoldsOneTwice(Exact):
    def block_table(self, name: str) -> list[int]:
        table = self.tables[name]
        return [*table[:-1], table[0]]


class CountsOneMore(Exact):
    def available(self) -> int:
        return len(self.free) + bool(self.tables)


class CountsOneLess(Exact):
    def available(self) -> int:
        return max(len(self.free) - bool(self.tables), 0)


class RefusesTheLast(Exact):
    def admit(self, name: str, tokens: Sequence[int], namespace: bytes) -> int | None:
        if -(-len(tokens) // self.block_size) >= len(self.free):
            return None
        return super().admit(name, tokens, namespace)


class GivesTwice(Exact):
    def release(self, name: str) -> None:
        self.free += self.tables[name][:1]
        super().release(name)


RULE_OF: dict[type[Plain], set[str]] = {
    LosesWhenItRefuses: {"A8"}, ShrinksWhenItRefuses: {"A8"}, HoldsOneLess: {"A4"},
    HoldsOneMore: {"A5"}, HoldsOneTwice: {"A3", "C2"}, CountsOneMore: {"S2"},
    CountsOneLess: {"S2"}, RefusesTheLast: {"A6"}, GivesTwice: {"A3", "C1", "C2", "S2"},
}  # fmt: skip


def test_an_exact_manager_is_clean() -> None:
    assert run(CacheSubject(Exact), 0, 3_000).finding is None


@pytest.mark.parametrize("wrong", RULE_OF, ids=lambda wrong: wrong.__name__)
def test_a_wrong_manager_of_a_few_lines_breaks_its_rule(wrong: type[Plain]) -> None:
    for seed in range(3):
        finding = run(CacheSubject(wrong), seed, 20_000).finding
        assert finding is not None and finding.rule.split()[0] in RULE_OF[wrong], finding


class ForgetsItsTable(Exact):
    """As soon as it is told to, it has no blocks of a request any more."""

    forgets = False

    def block_table(self, name: str) -> list[int]:
        return [] if self.forgets else super().block_table(name)


@pytest.mark.parametrize("word", ["launch", "forward"])
def test_a_step_is_launched_only_with_enough_blocks(word: str) -> None:
    adapters: list[ForgetsItsTable] = []

    def make(num_blocks: int, block_size: int) -> ForgetsItsTable:
        adapters.append(ForgetsItsTable(num_blocks, block_size))
        return adapters[-1]

    config = {"num_blocks": 4, "block_size": 2, "max_running": 1, "alphabet": 1}
    world = CacheSubject(make).world(config)
    for operation in (["submit", "r1", [1, 2, 3], 0, 0], ["admit", "r1"]):
        assert world.apply(operation)
    adapters[0].forgets = True
    with pytest.raises(Violation, match=r"\[A4 .*r1 has 0 blocks for 3 tokens"):
        world.apply([word, "r1", 3, *(["r1.1"] if word == "launch" else [])])


class FreesWhatItAdmits(Exact):
    """The first block of a request stays free; a probe gets all that are free."""

    def admit(self, name: str, tokens: Sequence[int], namespace: bytes) -> int | None:
        hit = super().admit(name, tokens, namespace)
        if hit is not None:
            self.free.append(self.tables[name][0])
        return hit


class RefusesProbes(FreesWhatItAdmits):
    def admit(self, name: str, tokens: Sequence[int], namespace: bytes) -> int | None:
        return None if name == "probe" else super().admit(name, tokens, namespace)


@pytest.mark.parametrize("block_size", [1, 2, 3])
@pytest.mark.parametrize("manager", [FreesWhatItAdmits, RefusesProbes])
def test_a_block_that_is_held_and_free_is_named(manager: type[Exact], block_size: int) -> None:
    config = {"num_blocks": 5, "block_size": block_size, "max_running": 2, "alphabet": 1}
    trace: Trace = [["submit", "r1", [1] * 2 * block_size, 0, 0], ["admit", "r1"]]
    violation = replay(CacheSubject(manager), config, trace)
    assert violation is not None and violation.rule.code == "S2"
    wanted = "4 of 5 available, should be 3, r1 holds [4, 3]"
    if manager is FreesWhatItAdmits:
        wanted += "; free as well: block 4 of r1"
    assert violation.why == wanted


@pytest.mark.parametrize("hits_last", [True, False])
@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_a_hit_is_of_whole_blocks_of_the_prompt(block_size: int, hits_last: bool) -> None:
    class Claims(Plain):
        promises = Promises(hits_last=hits_last)

    for hit in range(-1, 9):
        world = CacheSubject(Claims).world({"num_blocks": 7, "block_size": block_size})
        assert world.apply(["submit", "r1", [1] * 6, 0, 0])
        is_whole = hit % block_size == 0 and 0 <= hit <= 6
        wanted = "" if is_whole and (hits_last or hit < 6) else "H4" if is_whole else "H3"
        assert code(admit._check_hit, world, world.requests["r1"], hit) == wanted, hit
