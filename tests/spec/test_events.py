"""The consumer of KV events: what it knows, what it reports, and how it counts batches."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from radixkv.spec.harness.events import Consumers, check_index
from radixkv.spec.model.events import (
    Batch,
    Cleared,
    Consumer,
    Event,
    Prefix,
    Receiver,
    Removed,
    Stored,
)
from radixkv.spec.rules.events import EVENT_RULES
from radixkv.spec.rules.rule import Rule, Violation

FIRST = Stored("GPU", [11, 12], None, [1, 2, 3, 4], 2)
AFTER = Stored("CPU", [13], 12, [5, 6], 2)


def consume(*events: Event) -> Consumer:
    consumer = Consumer()
    for event in events:
        consumer.apply(event)
    return consumer


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([AFTER], "[K3 parent-is-known] CPU stores 13 after 12, not known"),
        ([FIRST, Cleared(), AFTER], "[K3 parent-is-known] CPU stores 13 after 12, not known"),
        ([FIRST, FIRST], "[K4 store-what-is-missing] GPU stores 11, which it has"),
        (
            [FIRST, Removed("CPU", [11])],
            "[K5 remove-what-is-there] CPU removes 11, which it does not have",
        ),
        (
            [Stored("GPU", [11], None, [1, 2, 3], 2)],
            "[K6 stored-blocks-are-whole] GPU stores 3 tokens in 1 blocks of 2",
        ),
        (
            [Stored("GPU", [11], None, [], 0)],
            "[K6 stored-blocks-are-whole] GPU stores 0 tokens in 1 blocks of 0",
        ),
        (
            [Stored("GPU", [], 77, [], 2)],
            "[K6 stored-blocks-are-whole] GPU stores 0 tokens in 0 blocks of 2",
        ),
        (
            [FIRST, Stored("GPU", [14], None, [1], 1)],
            "[K6 stored-blocks-are-whole] GPU stores blocks of 1 tokens, after blocks of 2",
        ),
        (
            [FIRST, Stored("CPU", [12], None, [3, 4], 2)],
            "[K2 hash-names-one-prefix] 12 names tokens [3, 4] after 11 in namespace b'', and "
            "tokens [3, 4] at the start in namespace b''",
        ),
    ],
)
def test_what_a_consumer_reports(events: list[Event], why: str) -> None:
    with pytest.raises(Violation) as caught:
        consume(*events)
    assert str(caught.value) == why


def test_a_consumer_has_the_prefixes_of_each_tier() -> None:
    consumer = consume(FIRST, AFTER, Removed("GPU", [12]))
    assert consumer.prefixes("GPU") == {(b"", (1, 2))}
    # The block before it is in no tier, and still part of its prefix.
    assert consumer.prefixes("CPU") == {(b"", (1, 2, 3, 4, 5, 6))}
    assert consumer.prefixes("STORAGE") == set()
    consumer.apply(Cleared())
    assert consumer.prefixes("GPU") == consumer.prefixes("CPU") == set()


def test_who_joined_late_does_not_report_what_it_cannot_know() -> None:
    found: list[Rule] = []
    consumer = Consumer(lambda rule, why: found.append(rule))
    consumer.joined_late = True
    for event in (AFTER, Removed("GPU", [99])):
        consumer.apply(event)
    assert not found
    consumer.apply(Cleared())
    consumer.apply(AFTER)
    assert [rule.code for rule in found] == ["K3"]


@pytest.mark.parametrize(("most", "knows"), [(0, False), (1, False), (2, True), (3, True)])
def test_names_of_removed_blocks_are_forgotten_oldest_first(most: int, knows: bool) -> None:
    consumer = Consumer(most_removed=most)
    consumer.apply(FIRST)
    consumer.apply(Removed("GPU", [11, 12]))
    assert (consumer.prefix(11) is not None) == knows
    assert (consumer.prefix(12) is not None) == (most > 0)


@example(1, [("GPU", 0), ("GPU", 0), ("GPU", -1), ("GPU", 1), ("GPU", 1)])
@given(
    st.integers(0, 3),
    st.lists(st.tuples(st.sampled_from(["GPU", "CPU"]), st.integers(-1, 4)), max_size=40),
)
def test_only_names_of_blocks_that_no_tier_has_are_forgotten(
    most: int, changes: list[tuple[str, int]]
) -> None:
    """A block of a tier is what may be the parent of the next one; -1 clears all tiers."""
    consumer = Consumer(most_removed=most)
    held: dict[str, set[int]] = {"GPU": set(), "CPU": set()}
    removed: list[int] = []  # that no tier has, the oldest first
    for medium, name in changes:
        if name < 0:
            held, removed = {"GPU": set(), "CPU": set()}, []
            consumer.apply(Cleared())
        elif name in held[medium]:
            held[medium].remove(name)
            if name not in held["GPU"] | held["CPU"]:
                removed.append(name)
            consumer.apply(Removed(medium, [name]))
        else:
            held[medium].add(name)
            removed = [each for each in removed if each != name]
            consumer.apply(Stored(medium, [name], None, [name], 1))
        removed = removed[max(0, len(removed) - most) :]
        known = {each for each in range(5) if consumer.prefix(each) is not None}
        assert known == held["GPU"] | held["CPU"] | set(removed)
        assert all(consumer.held.get(each, set()) == held[each] for each in held)


@given(st.integers(0, 5), st.integers(0, 9))
def test_numbers_of_batches(next_seq: int, seq: int) -> None:
    found: list[str] = []
    receiver = Receiver(Consumer(lambda rule, why: found.append(why)), next_seq)
    missing = receiver.missing_before(seq)
    assert list(missing) == list(range(next_seq, seq))
    assert receiver.receive(Batch(seq, [FIRST])) == (seq >= next_seq)
    assert found == ([f"batch {seq} follows batch {next_seq - 1}"] if missing else [])
    assert receiver.next_seq == (seq + 1 if seq >= next_seq else next_seq)
    assert receiver.num_batches == (seq >= next_seq)


class Recorded:
    """A source of batches; some of them are lost for a replay."""

    def __init__(self, batches: list[Batch], num_kept: int) -> None:
        self.batches = batches
        self.num_kept = num_kept
        self.num_told = 0

    def kv_events(self) -> list[Batch]:
        self.num_told += 1
        return self.batches[self.num_told - 1 : self.num_told]

    def replay(self, seq: int) -> list[Batch]:
        kept = self.batches[: self.num_told][-self.num_kept :]
        return [batch for batch in kept if batch.seq >= seq]


BATCHES = [Batch(0, [FIRST]), Batch(1, [AFTER]), Batch(2, [Removed("GPU", [12])])]
STATES: list[dict[str, set[Prefix]]] = [
    {"GPU": {(b"", (1, 2)), (b"", (1, 2, 3, 4))}},
    {"GPU": {(b"", (1, 2)), (b"", (1, 2, 3, 4))}, "CPU": {(b"", (1, 2, 3, 4, 5, 6))}},
    {"GPU": {(b"", (1, 2))}, "CPU": {(b"", (1, 2, 3, 4, 5, 6))}},
]


def test_consumers_of_a_right_source_find_nothing() -> None:
    consumers = Consumers(Recorded(BATCHES, 2))
    for state in STATES:
        consumers.check(state)
    assert consumers.all.num_batches == 3 and consumers.some.num_batches == 2


@pytest.mark.parametrize(
    ("batches", "num_kept", "code"),
    [
        ([BATCHES[0], Batch(2, BATCHES[1].events)], 2, "K7"),
        ([BATCHES[0], Batch(0, BATCHES[1].events)], 2, "K7"),
        (BATCHES, 1, "K8"),
        ([Batch(0, [Stored("GPU", [11], None, [1, 2], 2)])], 2, "K1"),
        ([Batch(0, [FIRST, AFTER])], 2, "K1"),
    ],
)
def test_consumers_of_a_wrong_source(batches: list[Batch], num_kept: int, code: str) -> None:
    consumers = Consumers(Recorded(batches, num_kept))
    with pytest.raises(Violation) as caught:
        for state in STATES:
            consumers.check({"GPU": (), "CPU": (), **state})
    assert caught.value.rule.code == code


def test_there_are_enough_rules() -> None:
    assert [rule.code for rule in EVENT_RULES] == [f"K{number}" for number in range(1, 10)]


def test_names_that_are_remembered_are_those_that_no_tier_has() -> None:
    """The oldest of them is forgotten: no block of a tier, and none from before a reset."""
    other = Stored("GPU", [21, 22], None, [7, 8, 9, 9], 2)
    again: list[Event] = [FIRST, Removed("GPU", [12]), Cleared(), FIRST]
    restored: list[Event] = [FIRST, Removed("GPU", [12]), Stored("GPU", [12], 11, [3, 4], 2)]
    for events in (again, restored):
        events += [other, Removed("GPU", [22])]
        consumer = Consumer(most_removed=1)
        for event in events:
            consumer.apply(event)
        assert consumer.prefixes("GPU") == {(b"", (1, 2)), (b"", (1, 2, 3, 4)), (b"", (7, 8))}
        assert consumer.prefix(22) == (b"", (7, 8, 9, 9))


def test_another_block_size_is_reported_once() -> None:
    found: list[str] = []
    consumer = Consumer(lambda rule, why: found.append(f"{rule.code} {why}"))
    for number in (11, 12, 13):
        size = 2 if number == 11 else 1
        consumer.apply(Stored("GPU", [number], None, [number] * size, size))
    assert found == ["K6 GPU stores blocks of 1 tokens, after blocks of 2"]


def test_the_first_block_after_one_that_is_not_known_is_named() -> None:
    with pytest.raises(Violation, match="CPU stores 13 after 12, not known"):
        consume(Stored("CPU", [13, 14], 12, [5, 6, 7, 8], 2))


class Said:
    """A source of batches, of which a replay may say something else."""

    def __init__(self, *batches: list[Event]) -> None:
        self.new = [Batch(seq, events) for seq, events in enumerate(batches)]
        self.old = list(self.new)

    def kv_events(self) -> list[Batch]:
        new, self.new = self.new, []
        return new

    def replay(self, seq: int) -> list[Batch]:
        return self.old[seq:]


ALL = {"GPU": {(b"", (1, 2)), (b"", (1, 2, 3, 4))}}


def check_source(source: Said, rule: str) -> None:
    if not rule:
        Consumers(source).check(ALL)
        return
    with pytest.raises(Violation) as caught:
        Consumers(source).check(ALL)
    assert caught.value.rule.code == rule


def test_a_replay_says_what_was_said() -> None:
    source = Said([FIRST], [], [])
    check_source(source, "")
    for wrong, rule in (
        ([Batch(0, [])], "K8"),  # a batch is missing
        ([Batch(0, []), Batch(1, [])], "K8"),  # it is there, with other events
        ([Batch(1, []), Batch(0, [FIRST])], "K8"),
        ([Batch(0, [FIRST]), Batch(1, [])], ""),
    ):
        source = Said([FIRST], [])
        source.old = wrong
        check_source(source, rule)


def test_a_prefix_keeps_its_name() -> None:
    again = Stored("GPU", [11, 99], None, [1, 2, 3, 4], 2)
    check_source(Said([FIRST], [Cleared(), FIRST]), "")
    check_source(Said([FIRST], [Cleared(), again]), "K2")
    check_source(Said([again, Cleared()], [FIRST]), "")  # nobody has seen the other name


@pytest.mark.parametrize(
    ("index", "is_right"), [([1, 2], True), ([1], False), ([1, 3], False), ([1, 2, 3], False)]
)
def test_an_index_has_the_blocks_of_its_node(index: list[int], is_right: bool) -> None:
    if is_right:
        check_index({"GPU": index}, {"GPU": 2, "CPU": 0}, {"GPU": [2]})
        return
    with pytest.raises(Violation) as caught:
        check_index({"GPU": index}, {"GPU": 2, "CPU": 0}, {"GPU": [2]})
    assert caught.value.rule.code == "K9"
