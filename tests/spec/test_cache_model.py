"""The model of the cache, driven by hand: copies, lazy frees, recency by access, resets."""

from __future__ import annotations

import pytest

from radixkv.spec.model.cache import EVICTED, FREE, IN_FLIGHT, LEFT, CacheModel, Holding
from radixkv.spec.model.promises import Promises

from .violations import code

ROOT = 0


def running(promises: Promises, *names: str, path: list[int] | None = None) -> CacheModel:
    """A model of 6 blocks of a token; each request holds and has computed two blocks."""
    model = CacheModel(6, 1, promises)
    for first, name in enumerate(names):
        model.arrive(name, Holding(path or [1, 2], ROOT), [], 2)
        model.allocated(name, [2 * first, 2 * first + 1])
        model.hit(name, 0)
        model.holdings[name].computed = 2
    return model


def test_copies_are_a_design() -> None:
    model = running(Promises(), "r1", "r2")
    model.published("r1", [0, 1])
    model.published("r2", [2, 3])
    assert model.copies == {1: [0, 2], 2: [1, 3]}
    strict = running(Promises(one_copy=True), "r1", "r2")
    strict.published("r1", [0])
    assert code(strict.published, "r2", [2]) == "P2"


def test_only_the_table_tells_which_copy_is_hit() -> None:
    model = running(Promises(leaves_first=True), "r1", "r2")
    model.published("r1", [0, 1])
    model.published("r2", [2, 3])
    model.arrive("r3", Holding([1, 2], ROOT), [1], 1)
    model.allocated("r3", [4])
    model.hit("r3", 1)
    model.look("r3", [2, 4])
    assert model.holdings["r3"].table == [2, 4] and model.in_use() == {0, 1, 2, 3, 4}
    assert code(model.look, "r3", [1, 4]) == "R1"
    for name in ("r1", "r2"):
        model.ended(name)
    assert set(model.unused()) == {0, 1, 3}
    assert code(model.evicted, [2]) == "E2"
    model.evicted([0])  # a copy of it remains
    model.evicted([1, 3])


def test_the_last_copy_is_evicted_after_what_follows_it() -> None:
    model = running(Promises(leaves_first=True, frees_at_once=True), "r1")
    model.published("r1", [0, 1])
    model.ended("r1")
    assert code(model.evicted, [0]) == "E3"
    running_free = running(Promises(), "r1")
    running_free.published("r1", [0, 1])
    running_free.ended("r1")
    running_free.evicted([0])


def test_blocks_that_are_freed_later_may_be_counted_or_not() -> None:
    assert code(running(Promises(frees_at_once=True), "r1").ended, "r1") == "S1"
    model = running(Promises(counts_available=True), "r1")
    model.ended("r1")
    assert [model.owner[block] for block in (0, 1)] == [LEFT, LEFT]
    for number in (4, 5, 6):
        model.check_available(number)
    assert code(model.check_available, 3) == "S2" and code(model.check_available, 7) == "S2"
    model.actor = "r2"
    model.freed([0])
    model.check_available(5)
    assert code(model.freed, [0]) == "F1"


def test_a_lazy_manager_repoints_a_table_before_it_frees() -> None:
    for promises in (Promises(), Promises(frees_at_once=True)):
        model = running(promises, "r1", "r2")
        model.published("r1", [0])
        if promises.frees_at_once:
            assert code(model.look, "r2", [0, 3]) == "R1"
        else:
            model.look("r2", [0, 3])
            assert model.owner[2] == LEFT and model.holdings["r2"].shared == [1]


def test_recency_by_access_is_reported() -> None:
    promises = Promises(lru=True, leaves_first=True)
    model = running(promises, "r1", path=[1, 2])
    model.published("r1", [0, 1])
    model.arrive("r2", Holding([3], ROOT), [], 1)
    model.allocated("r2", [2])
    model.hit("r2", 0)
    model.holdings["r2"].computed = 1
    model.published("r2", [2])
    model.ended("r2")
    model.ended("r1")  # the last release, and not the last access
    model.actor = ""
    model.used([0, 1])
    assert code(model.evicted, [1]) == "E4"
    model.evicted([2])
    assert code(model.used, [2]) == "H1"


def test_a_reset_may_report_what_it_frees_once() -> None:
    model = running(Promises.all(), "r1", "r2")
    model.published("r1", [0])
    model.actor, model.resetting = "", True
    model.freed([0, 1, 2])
    model.evicted([])
    assert model.owner == {0: FREE, 1: FREE, 2: FREE, 3: "r2"}
    assert code(model.freed, [0]) == "F1"
    model.reset()
    assert model.available() == 6


def test_a_duplicate_belongs_to_the_steps_in_flight() -> None:
    model = running(Promises.all(), "r1", "r2")
    model.published("r1", [0, 1])
    model.actor = "r2"
    for _ in range(2):
        model.begin_step()
    model.replaced("r2", [2])
    assert model.owner[2] == IN_FLIGHT and model.holdings["r2"].table == [0, 3]
    assert code(model.freed, [2]) == "F6"
    assert code(model.allocated, "r1", [2]) == "A1"
    assert code(model.freed, [3]) == "F6"  # a duplicate too, and not even reported as replaced
    model.check_available(2)
    assert code(model.check_available, 3) == "S2"
    model.end_step()
    assert code(model.freed, [2]) == "F6"
    model.settled()
    model.end_step()
    assert code(model.settled) == "S1"
    model.freed([2])
    model.settled()
    assert model.num_free == 3


def test_a_duplicate_beside_no_step_is_freed_at_once() -> None:
    model = running(Promises.all(), "r1", "r2")
    model.published("r1", [0, 1])
    model.actor = "r2"
    assert code(model.replaced, "r1", [2]) == "F1"
    model.replaced("r2", [2])
    assert model.owner[2] == EVICTED and code(model.settled) == "S1"


def test_a_duplicate_that_no_step_read_may_be_freed_or_kept() -> None:
    for keeps in (False, True):
        model = running(Promises.all(), "r1")
        model.published("r1", [0, 1])
        model.begin_step()
        model.arrive("r2", Holding([1, 2], ROOT), [], 2)
        model.allocated("r2", [2])  # after the step began: its table does not name it
        model.hit("r2", 0)
        if keeps:
            model.replaced("r2", [2])
            assert code(model.freed, [2]) == "F6"
            model.end_step()
        model.freed([2])
        model.settled()


def test_a_request_that_ends_needs_no_step_in_flight() -> None:
    model = running(Promises.all(), "r1", "r2")
    model.begin_step()
    model.ends("r1")
    model.freed([0, 1])
    model.ended("r1")
    model.allocated("r2", [0])
    assert model.flights == [{1, 2, 3}]
    model.reset()
    assert model.flights == []


def test_a_block_is_evicted_once() -> None:
    model = running(Promises(frees_at_once=True), "r1")
    model.published("r1", [0, 1])
    model.ended("r1")
    assert code(model.evicted, [1, 1]) == "E1"


def test_a_refused_request_gets_no_block() -> None:
    for blocks in ([], [0]):
        model = CacheModel(6, 1, Promises())
        model.arrive("r1", Holding([1], ROOT), [], 1)
        model.allocated("r1", blocks)
        if blocks:
            assert code(model.refuse, "r1") == "A8"
        else:
            model.refuse("r1")
            assert not model.holdings


def test_private_blocks_are_taken_from_a_table_in_order() -> None:
    model = running(Promises(), "r1")
    model.published("r1", [0])
    model.allocated("r1", [4])
    holding = model.holdings["r1"]
    assert holding.take_private() == [1, 4] and holding.table == [0]
    assert holding.take_private() == []


@pytest.mark.parametrize("hits_all", [True, False])
def test_a_hit_is_due_only_if_it_is_promised(hits_all: bool) -> None:
    for num_hit in range(4):
        model = running(Promises(hits_all=hits_all), "r1", path=[1, 2, 3])
        model.published("r1", [0, 1])
        model.arrive("r2", Holding([1, 2, 3], ROOT), [1, 2], 1)
        model.allocated("r2", [4])
        if num_hit > 2 or (hits_all and num_hit < 2):
            assert code(model.hit, "r2", num_hit) == ("H1" if num_hit > 2 else "H2")
            continue
        model.hit("r2", num_hit)
        holding = model.holdings["r2"]
        assert holding.table == [*range(num_hit), 4] and holding.computed == num_hit


@pytest.mark.parametrize("num_computed", range(5))
def test_a_block_is_published_when_all_of_its_tokens_are_computed(num_computed: int) -> None:
    model = CacheModel(6, 2, Promises())
    model.arrive("r1", Holding([1, 2], ROOT), [], 2)
    model.allocated("r1", [0, 1])
    model.hit("r1", 0)
    model.holdings["r1"].computed = num_computed
    for depth in (0, 1):
        if num_computed < 2 * (depth + 1):
            assert code(model.published, "r1", [depth]) == "P3"
        else:
            model.published("r1", [depth])
            assert code(model.published, "r1", [depth]) == "P1"


def test_an_eviction_takes_what_is_missing() -> None:
    """The free blocks count, and those that the same call has evicted before."""
    for needed in range(8):
        model = running(Promises(evicts_exactly=True, frees_at_once=True), "r1")
        model.published("r1", [0, 1])
        model.ended("r1")
        model.needed = needed
        for number, block in enumerate((1, 0)):
            if needed <= 4 + number:
                assert code(model.evicted, [block]) == "E5"
                break
            model.evicted([block])


def test_the_steps_in_flight_end_in_order() -> None:
    model = running(Promises(), "r1")
    model.begin_step()
    model.allocated("r1", [4])
    model.begin_step()
    assert model.flights == [{0, 1}, {0, 1, 4}]
    model.end_step()
    assert model.flights == [{0, 1, 4}]


def test_the_later_use_is_the_more_recent_one() -> None:
    for order in ([0, 2], [2, 0]):
        model = CacheModel(6, 1, Promises(lru=True))
        for name, block in (("r1", 0), ("r2", 2)):
            model.arrive(name, Holding([block + 1], ROOT), [], 1)
            model.allocated(name, [block])
            model.hit(name, 0)
            model.holdings[name].computed = 1
            model.published(name, [block])
        for name in ("r1", "r2"):
            model.ended(name)
        for block in order:
            model.used([block])
        model.actor = ""
        assert code(model.evicted, [order[1]]) == "E4"
        model.evicted([order[0]])
