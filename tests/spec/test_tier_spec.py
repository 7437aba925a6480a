"""Our tiers under the specification, and that the traffic is worth it."""

from __future__ import annotations

from itertools import product
from typing import Any, Final, cast, get_args

import pytest

from radixkv.scheduler.fuzz.tiers import adapter as tier_adapter
from radixkv.spec.adapters.cache import Manager
from radixkv.spec.adapters.tiers import Copy, CopyKind, TierManager
from radixkv.spec.harness.engine import Config, Operation, Trace, replay
from radixkv.spec.harness.random_engine import run
from radixkv.spec.harness.tiers.executor import Executor
from radixkv.spec.harness.tiers.operations import TIER_TABLE
from radixkv.spec.harness.tiers.world import TierSubject, TierWorld
from radixkv.spec.model.ghost import POISON, GhostMemory, prefix_tags
from radixkv.spec.model.two_tier_law import TwoTierLaw
from radixkv.spec.rules.tiers import TIER_RULES

from .floors import TIER_FLOORS, too_rare
from .planted.matrix import subject_of
from .planted.plant import bug
from .violations import code

CONFIG = {
    "num_blocks": 4, "block_size": 2, "max_running": 2, "alphabet": 1, "host_blocks": 3,
    "write": "back", "hits": 0, "storage": 1, "law": 0, "at_once": 0,
}  # fmt: skip


def subject() -> TierSubject:
    return TierSubject(tier_adapter.make_factory())


@pytest.mark.nightly
def test_every_situation_comes_up_often_enough() -> None:
    result = run(subject(), 1, 50_000)
    assert result.finding is None, result.finding
    assert not too_rare(result.situations, TIER_FLOORS, result.num_steps)
    assert len(TIER_FLOORS) >= 25


def test_prompts_of_one_namespace_alone_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = "two namespaces share tokens"
    good = run(subject(), 8, 5_000)
    assert shared not in too_rare(good.situations, TIER_FLOORS, good.num_steps)
    for word in ("submit", "serve"):
        monkeypatch.setitem(
            cast(dict[str, Any], TIER_TABLE.by_word[word].arguments), "namespace", lambda *_: 0
        )
    bad = run(subject(), 8, 5_000)
    assert too_rare(bad.situations, TIER_FLOORS, bad.num_steps)[shared][0] == 0


def test_a_run_is_determined_by_its_seed() -> None:
    first, again, other = (run(subject(), seed, 1_500) for seed in (5, 5, 6))
    assert first == again != other and first.finding is other.finding is None


def test_only_operations_of_optional_methods_are_left_out() -> None:
    needed = {*vars(TierManager), *vars(Manager), "promises", "report_to", "snapshot"}
    make = tier_adapter.make_factory()

    class Least:
        def __init__(self, config: Config) -> None:
            self.adapter = make(config)

        def __getattr__(self, name: str) -> Any:
            if name not in needed:
                raise AttributeError(name)
            return getattr(self.adapter, name)

    least = TierSubject(Least)
    words = {each.word for each in least.world(CONFIG).table}
    assert words == TIER_TABLE.by_word.keys() - {"match", "append_batch", "misuse", "check"}
    result = run(least, 1, 2_000)
    assert result.finding is None and result.situations["reset with live leases"] > 0


def test_a_trace_replays_and_what_does_not_apply_is_skipped() -> None:
    trace: Trace = [
        ["submit", "r1", [0, 3, 0], 2, 0],
        ["result", "out1", [], 1],
        ["admit", "r1"],
        ["unpark", "r1"],
        ["forward", "r1", 3],
        ["park", "r1", "host"],
        ["admit", "r1"],
        ["take"],
        ["result", "out1", [], 1],
        ["fence", "out1"],
        ["admit", "r1"],
        ["take"],
        ["result", "in1", [], 1],
        ["drain"],
    ]
    assert replay(subject(), CONFIG, trace) is None
    world = subject().world(dict(CONFIG))
    assert [world.apply(operation) for operation in trace] == [
        True, False, True, False, True, True, False, True, True, False, True, True, True, True,
    ]  # fmt: skip
    assert world.situations["resumed, and all is there"] == 1
    assert world.situations["tail loaded"] == 1


@pytest.mark.parametrize("takes_first", [True, False])
def test_what_was_moved_for_a_request_that_ends_is_not_lost(takes_first: bool) -> None:
    config = {**CONFIG, "write": "exclusive", "storage": 0}
    trace: Trace = [
        ["submit", "r1", [0, 3, 0, 3], 0, 0],
        ["admit", "r1"],
        ["forward", "r1", 4],
        ["finish", "r1"],
        ["evict", 2],
        ["take"],
        ["result", "out1", [], 1],
        ["submit", "r2", [0, 3, 0, 3], 0, 0],
        ["admit", "r2"],
        *([["take"]] if takes_first else []),
        ["finish", "r2"],
        *([] if takes_first else [["take"]]),
        ["result", "in1", [], 1],
        ["drain"],
    ]
    world = subject().world(config)
    assert all([world.apply(operation) for operation in trace])
    assert world.situations["loaded for an ended request"] == 1
    publishes = "loader.publish_loaded(self, self._num_good, self._tail_tokens)\n"
    lost = bug("lost", "tiers/load.py", (publishes, publishes.replace("self._num_good", "0")),
               world="tiers")  # fmt: skip
    violation = replay(subject_of(lost, "full"), config, trace)
    assert violation is not None and violation.rule.name == "T8 moved-blocks-are-not-lost"


def test_copies_that_come_late_may_warm_what_was_evicted_with_them() -> None:
    """A soak of 3.1 million steps met it."""
    config = {**CONFIG, "num_blocks": 7, "max_running": 1, "host_blocks": 6}
    trace: Trace = [
        ["submit", "r1", [0, 0, 0, 0, 0], 0, 0],
        ["submit", "r2", [0, 0, 0, 0, 0, 0, 0, 0], 0, 1],
        ["admit", "r2"],
        ["forward", "r2", 8],
        ["admit", "r1"],
        ["submit", "r3", [0], 0, 0],
        ["park", "r2", "storage"],
        ["forward", "r1", 5],
        ["result", "out1", [], 1],
        ["admit", "r2"],
        ["park", "r2", "storage"],
        ["result", "store1", [], 1],
        ["park", "r1", "host"],
        ["admit", "r3"],
        ["forward", "r3", 1],
        ["finish", "r3"],
        ["result", "out1", [], 1],
        ["admit", "r2"],
        ["admit", "r1"],
        ["finish", "r2"],
        ["evict", 3],
        ["finish", "r1"],
        ["take"],
        ["result", "store1", [], 1],
        ["evict", 1],
        ["result", "out1", [], 1],
    ]
    assert replay(subject(), config, trace) is None


def test_a_load_that_ends_late_has_not_moved_what_another_moves_again() -> None:
    config = {**CONFIG, "num_blocks": 2, "host_blocks": 2, "write": "exclusive", "storage": 0}
    trace: Trace = [
        ["submit", "r1", [0, 0], 0, 1],
        ["submit", "r2", [0, 0], 0, 0],
        ["admit", "r2"],
        ["admit", "r1"],
        ["forward", "r2", 1],
        ["forward", "r1", 2],
        ["submit", "r3", [0, 0], 0, 1],
        ["park", "r1", "host"],
        ["park", "r2", "host"],
        ["admit", "r3"],
        ["park", "r3", "host"],
        ["result", "out2", [], 0],
        ["admit", "r2"],
        ["result", "out1", [0], 1],
        ["take"],
        ["result", "in1", [], 1],
        ["evict", 1],
        ["forward", "r2", 1],
        ["result", "out2", [], 0],
        ["admit", "r1"],
        ["park", "r2", "host"],
        ["result", "in1", [0], 0],
        ["unpark", "r2"],
        ["admit", "r3"],
        ["forward", "r3", 2],
        ["park", "r3", "host"],
        ["take"],
        ["result", "out4", [], 1],
        ["evict", 1],
        ["admit", "r3"],
        ["fence", "in1"],
    ]
    assert replay(subject(), config, trace) is None


def test_a_lookup_without_an_answer_is_no_news_of_storage() -> None:
    config = {**CONFIG, "num_blocks": 2}  # it reports events
    ask: Trace = [["prefetch", "r1"], ["take"]]
    trace: Trace = [
        ["submit", "r1", [0, 3], 0, 0],
        ["elsewhere", "r1", 1],
        *ask,
        ["result", "lookup1", [], 1],
        ["cancel", "r1"],
        *ask,
        ["result", "lookup1", [-1], 1],
        *ask,
        ["result", "lookup1", [0], 1],
        ["drain"],
    ]
    world = subject().world(dict(config))
    assert all([world.apply(operation) for operation in trace])
    assert world.situations["a lookup is not answered"] == 1
    miss = bug("miss", "events.py", ("if good is not None and not good]", "if not good]"),
               world="tiers")  # fmt: skip
    finding = replay(subject_of(miss, "full"), config, trace)
    assert finding is not None and finding.rule.name == "K1 consumer-equals-manager"


def test_a_prefetch_that_was_cancelled_holds_nothing() -> None:
    config = {**CONFIG, "num_blocks": 3, "block_size": 3, "max_running": 1, "host_blocks": 1,
              "write": "exclusive"}  # fmt: skip
    trace: Trace = [
        ["submit", "r1", [0, 0, 0], 0, 1],
        ["submit", "r2", [0, 0, 0], 0, 0],
        ["submit", "r3", [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], 0, 0],
        ["submit", "r4", [0, 0, 0, 0, 0, 0, 0, 0, 0], 0, 0],
        ["admit", "r4"],
        ["forward", "r4", 9],
        ["reset", [0]],
        ["admit", "r1"],
        ["take"],
        ["result", "out1", [], 1],
        ["reset", [0]],
        ["elsewhere", "r1", 1],
        ["prefetch", "r1"],
        ["prefetch", "r3"],
        ["admit", "r2"],
        ["park", "r2", "storage"],
        ["cancel", "r3"],
        ["drain"],
    ]
    assert replay(subject(), config, trace) is None


def test_what_is_parked_with_all_of_its_copies_there_is_used_when_it_is_written_through() -> None:
    config = {**CONFIG, "max_running": 1, "host_blocks": 2, "write": "through"}
    trace: Trace = [
        ["submit", "r1", [0], 1, 1],
        ["submit", "r2", [0, 0, 0], 0, 0],
        ["submit", "r3", [0, 0], 0, 0],
        ["elsewhere", "r3", 1],
        ["prefetch", "r3"],
        ["drain"],
        ["admit", "r1"],
        ["submit", "r4", [0, 0, 0], 0, 0],
        ["submit", "r5", [0, 0], 0, 1],
        ["forward", "r1", 1],
        ["elsewhere", "r5", 1],
        ["append_batch", [["r1", 0]]],
        ["admit", "r2"],
        ["prefetch", "r5"],
        ["launch", "r1", 1, "r1.3"],
        ["result", "lookup1", [], 1],
        ["result", "in1", [], 1],
        ["forward", "r2", 1],
        ["result", "fetch1", [], 0],
        ["park", "r1", "storage"],
        ["admit", "r4"],
        ["launch", "r4", 1, "r4.1"],
    ]
    assert replay(subject(), config, trace) is None


def test_what_is_computed_anew_is_nothing_that_a_prefetch_holds() -> None:
    config = {**CONFIG, "max_running": 1, "host_blocks": 2}
    trace: Trace = [
        ["submit", "r1", [0, 0, 0, 0], 4, 0],
        ["admit", "r1"],
        ["forward", "r1", 4],
        ["submit", "r2", [0, 0], 0, 0],
        ["admit", "r2"],
        ["submit", "r3", [0, 0, 0, 0, 0, 0], 0, 0],
        ["park", "r1", "storage"],
        ["park", "r2", "storage"],
        ["result", "out1", [], 1],
        ["take"],
        ["result", "store1", [], 1],
        ["admit", "r1"],
        ["append", "r1", [0, 0, 0, 0]],
        ["forward", "r1", 1],
        ["forward", "r1", 3],
        ["finish", "r1"],
        ["evict", 1],
        ["evict", 2],
        ["prefetch", "r3"],
        ["evict", 1],
        ["admit", "r3"],
        ["forward", "r3", 4],
        ["preempt", "r3"],
        ["evict", 1],
    ]
    assert replay(subject(), config, trace) is None


def test_what_was_dropped_before_storage_was_told_may_be_told_again() -> None:
    config = {**CONFIG, "num_blocks": 3, "block_size": 1, "max_running": 1, "host_blocks": 2}
    trace: Trace = [
        ["submit", "r1", [1], 0, 0],
        ["elsewhere", "r1", 1],
        ["submit", "r2", [1], 0, 0],
        ["submit", "r3", [1], 1, 0],
        ["admit", "r2"],
        ["submit", "r4", [1], 0, 0],
        ["admit", "r3"],
        ["launch", "r2", 1, "r2.1"],
        ["prefetch", "r4"],
        ["launch", "r3", 1, "r3.1"],
        ["result", "lookup1", [], 1],
        ["submit", "r5", [0, 0], 0, 0],
        ["prefetch", "r5"],
        ["take"],
        ["elsewhere", "r5", 2],
        ["result", "fetch1", [], 1],
        ["result", "lookup1", [], 0],
        ["done", "r2.1"],
        ["fail", "r3.1"],
        ["forward", "r3", 1],
        ["append", "r3", [0]],
        ["drain"],
    ]
    assert replay(subject(), config, trace) is None


COPY_CALLS: list[Operation] = [
    ["result", "out1", [], 1], ["fence", "out1"], ["second", "out1", []],
    ["wrong_result", "out1", 2],
]  # fmt: skip


@pytest.mark.parametrize(
    ("before", "applies"),
    [
        ([], [False] * 4),
        ([["park", "r1", "host"], ["take"]], [True, False, False, True]),
        ([["park", "r1", "host"], ["take"], ["result", "out1", [], 0]], [False, True, True, False]),
        ([["park", "r1", "host"], ["take"], ["result", "out1", [], 1]], [False] * 4),
    ],
    ids=["none", "open", "not fenced", "fenced"],
)
def test_what_may_be_reported_of_a_copy(before: Trace, applies: list[bool]) -> None:
    start: Trace = [["submit", "r1", [0, 3], 0, 0], ["admit", "r1"], ["forward", "r1", 2]]
    for call, does in zip(COPY_CALLS, applies, strict=True):
        world = subject().world({**CONFIG, "storage": 0})
        assert all([world.apply(operation) for operation in [*start, *before]])
        assert world.apply(call) == does, call


PARKED: Final[Trace] = [
    ["submit", "r1", [0, 3, 1, 2], 0, 0], ["admit", "r1"], ["forward", "r1", 4],
    ["park", "r1", "host"], ["take"],
]  # fmt: skip
"""Two blocks are written to the host."""


@pytest.mark.parametrize("end", ["fence", "cancel"])
def test_a_copy_that_is_given_up_writes_until_its_fence(end: str) -> None:
    """Whatever else was written there: the next owner of a block then finds garbage."""
    world = subject().world({**CONFIG, "storage": 0})
    first: Operation = ["result", "out1", [1], 0] if end == "fence" else ["unpark", "r1"]
    last: Operation = ["fence", "out1"] if end == "fence" else ["result", "out1", [], 0]
    assert all([world.apply(operation) for operation in [*PARKED, first]])
    executor, [flight] = world.executor, world.executor.flights
    good, bad = flight.copy.destinations
    if end == "cancel":
        assert world.apply(["take"]) and flight.cancelled
        executor._put("host", good, [7, 7])
    executor._put("host", bad, [7, 7])
    before = executor.content("host", good)
    assert world.apply(last) and not executor.flights
    assert executor.content("host", bad) == [POISON] * 2
    assert executor.content("host", good) == (before if end == "fence" else [POISON] * 2)


def test_what_is_not_yet_written_is_garbage_and_storage_reads_at_the_end() -> None:
    world = subject().world(dict(CONFIG))
    assert all([world.apply(operation) for operation in PARKED])
    executor, [flight] = world.executor, world.executor.flights
    request = world.requests["r1"]
    tags = [request.tags[:2], request.tags[2:]]
    blocks = flight.copy.destinations
    assert [executor.content("host", block) for block in blocks] == [[POISON] * 2] * 2
    assert world.apply(["result", "out1", [], 1]) and world.apply(["take"])
    assert [executor.content("host", block) for block in blocks] == tags
    [store] = executor.flights
    assert not executor.storage and store.copy.sources == blocks
    executor._put("host", blocks[1], [8, 8])
    executor.end(store, [0])
    assert executor.storage == {store.copy.keys[1]: [8, 8]}


def test_the_last_operations_that_were_fenced_are_known() -> None:
    executor = Executor(GhostMemory(1))
    for number in range(6):
        [flight] = executor.begin([Copy(number, "out", (1,), (number,), ())])
        executor.end(flight, [])
        executor.fenced(flight)
        assert [each.id for each in executor.ended] == [*range(max(number - 3, 0), number + 1)]


@pytest.mark.parametrize("kind", get_args(CopyKind))
def test_a_copy_names_as_many_blocks_or_keys_in_both_places(kind: CopyKind) -> None:
    for sizes in product((0, 1, 2), repeat=3):
        sources, destinations, keys = sizes
        copy = Copy(5, kind, (1, 2)[:sources], (3, 4)[:destinations], (b"a", b"b")[:keys])
        named = sorted(size for size in sizes if size)
        is_right = len(named) == (1 if kind == "lookup" else 2) and named[0] == named[-1]
        executor = Executor(GhostMemory(1))
        assert code(executor.begin, [copy]) == ("" if is_right else "T9"), sizes
        assert code(executor.begin, [copy]) == "T13"


def test_a_picture_shows_every_tier_and_what_is_under_way() -> None:
    world = subject().world(dict(CONFIG))
    assert isinstance(world, TierWorld)
    for operation in (
        ["submit", "r1", [0, 3, 0], 2, 0],
        ["elsewhere", "r1", 1],
        ["admit", "r1"],
        ["forward", "r1", 3],
        ["park", "r1", "host"],
        ["take"],
    ):
        assert world.apply(operation)
    lines = world.picture().splitlines()
    assert "out1 [1, 2] -> [1, 2], 0 keys, open" in lines
    assert "host 1: [0, 3] offloading" in lines and "host 3: free" in lines
    assert "r1 parked with 3 tokens, being saved" in lines
    assert "storage: 1 blocks" in lines


def test_the_law_of_two_tiers_by_hand() -> None:
    law = TwoTierLaw(device=2, host=1)
    first, second = prefix_tags(b"", [1, 2]), prefix_tags(b"", [3, 4])
    assert law.use(first) == (0, 0, 0, 0)
    # It pushes both blocks of the first out, the last of the path first.
    assert law.use(second) == (0, 0, 2, 1)
    assert law.use(first) == (0, 1, 4, 2)
    assert law.use(first) == (2, 0, 4, 2)


def test_there_are_enough_rules() -> None:
    assert len(TIER_RULES) >= 30
