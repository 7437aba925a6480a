"""The checker of streams of KV events: what it finds in streams that cannot be true."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kvcache import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheManager,
    HostConfig,
    KVEvent,
)
from radixkv.scheduler.events import EventFormatError
from radixkv.scheduler.events import check as check_module
from radixkv.scheduler.events.check import MALFORMED, NUM_EXAMPLES, OF_RESTARTS, StreamChecker
from radixkv.scheduler.events.subscriber import Message
from radixkv.scheduler.events.wire import Cleared, Removed, Stored, WireBatch, encode_batch


def stored(*hashes: int, medium: str = "GPU", parent: int | None = None, size: int = 2) -> KVEvent:
    tokens = np.repeat(np.array(hashes, np.int32), size)
    return BlockStored(medium, hashes, parent, tokens, size, b"")  # type: ignore[arg-type]


def message(seq: int, *events: KVEvent, ts: float = 1.0) -> Message:
    return Message(seq, encode_batch(ts + seq, events))


def check(messages: Sequence[Message], kept: Sequence[Message] = ()) -> StreamChecker:
    checker = StreamChecker(lambda seq: [each for each in kept if each.seq >= seq])
    for each in messages:
        checker.receive(each)
    return checker


def codes(checker: StreamChecker) -> dict[str, int]:
    return {name.split()[0]: number for name, number in checker.findings.items()}


ONE, TWO = stored(1, 2), BlockRemoved("GPU", (2,))


@pytest.mark.parametrize(
    ("events", "found"),
    [
        ([ONE, TWO, AllBlocksCleared(), ONE], {}),
        ([ONE, TWO, TWO], {"K5": 1}),
        ([ONE, BlockRemoved("CPU", (1, 2))], {"K5": 2}),
        ([ONE, ONE], {"K4": 2}),
        ([ONE, stored(1, 2, medium="CPU")], {}),
        ([stored(3, parent=9)], {"K3": 1}),
        ([ONE, stored(3, parent=1), stored(3, parent=2, medium="CPU")], {"K2": 1}),
        ([ONE, stored(3, size=3)], {"K6": 1}),
        ([ONE, AllBlocksCleared(), TWO], {"K5": 1}),
        ([stored(parent=77)], {"K6": 1}),
    ],
)
def test_what_it_finds_in_events(events: list[KVEvent], found: dict[str, int]) -> None:
    assert codes(check([message(0, *events)])) == found


def test_a_gap_that_a_replay_closes_is_none() -> None:
    messages = [message(0, ONE), message(1, TWO), message(2, stored(2, parent=1))]
    checker = check([messages[0], messages[2]], kept=messages)
    assert not checker.findings
    assert (checker.num_batches, checker.num_replayed) == (3, 1)
    assert checker.num_blocks() == {"GPU": 2}


def test_a_replay_is_asked_for_what_comes_after_the_last_batch_alone() -> None:
    messages, asked = [message(seq) for seq in range(9)], list[int]()

    def replay(seq: int) -> list[Message]:
        asked.append(seq)
        return messages[seq:]

    checker = StreamChecker(replay)
    checker.begin()
    messages += [message(seq) for seq in range(9, 20)]
    for seq in (12, 13, 15):
        checker.receive(messages[seq])
    assert asked == [0, 8, 13], "again for the last one, which a new run has sent anew"
    assert checker.num_batches == 16 and not checker.findings


def test_a_gap_is_told_with_the_numbers_and_ends_what_was_known() -> None:
    messages = [message(0, ONE), message(3, TWO), message(5, BlockRemoved("GPU", (7,)))]
    checker = check(messages)
    assert checker.examples == {
        "K7 gap-is-seen": [
            "batch 1 to 2 did not come before 3, nor by a replay",
            "batch 4 did not come before 5, nor by a replay",
        ]
    }
    assert checker.joined_late and checker.num_blocks() == {"GPU": 0}


@pytest.mark.parametrize(("first", "late"), [(0, False), (1, True)])
def test_who_joins_late_reports_no_unknown_blocks(first: int, late: bool) -> None:
    checker = check([message(first, TWO)])
    assert checker.joined_late == late
    assert codes(checker) == ({} if late else {"K5": 1})


def test_it_begins_with_what_was_published_before() -> None:
    messages = [message(0, ONE), message(1, TWO)]
    checker = StreamChecker(lambda seq: [each for each in messages if each.seq >= seq])
    checker.begin()
    for each in messages:  # they were in flight, too
        checker.receive(each)
    assert not checker.findings and not checker.joined_late
    assert checker.num_batches == checker.num_replayed == 2


def test_a_publisher_that_begins_anew() -> None:
    checker = check([message(0, ONE), message(1, TWO), message(0, ONE, ts=100.0)])
    assert not checker.findings and checker.num_restarts == 1
    assert checker.num_blocks() == {"GPU": 2}


def test_messages_of_anything_are_counted_and_the_first_are_shown() -> None:
    number = NUM_EXAMPLES + 2
    checker = check([Message(seq, b"\xc1") for seq in range(number)])
    assert checker.findings == {MALFORMED: number}
    assert len(checker.examples[MALFORMED]) == NUM_EXAMPLES
    assert checker.examples[MALFORMED][0].startswith("batch 0: 1 bytes are no batch of KV events:")


def begun_anew(num_old: int, *missed: int) -> StreamChecker:
    """Check two runs of five batches; the first num_old batches come, and of the new run the rest.

    Both store the same blocks, one in each batch.
    """
    old, new = ([message(seq, stored(10 * seq), ts=ts) for seq in range(5)] for ts in (1.0, 1000.0))
    kept = old
    checker = StreamChecker(lambda seq: [each for each in kept if each.seq >= seq])
    for each in old[:num_old]:
        checker.receive(each)
    kept = new
    for each in new:
        if each.seq not in missed:
            checker.receive(each)
    return checker


def test_what_was_missed_of_a_publisher_that_begins_anew_is_asked_for() -> None:
    checker = begun_anew(5, 0, 1, 2)
    assert not checker.findings and not checker.joined_late
    assert checker.num_blocks() == {"GPU": 5}
    assert (checker.num_restarts, checker.num_replayed) == (1, 3)


def test_a_new_run_that_has_overtaken_the_old_one_is_told_by_a_replay() -> None:
    checker = begun_anew(2, 0, 1, 2)
    assert not checker.findings and not checker.joined_late
    assert checker.num_blocks() == {"GPU": 5}
    assert (checker.num_restarts, checker.num_replayed) == (1, 3)


def test_a_new_run_that_goes_on_at_the_expected_number_cannot_be_told() -> None:
    old, new = message(0, ONE), message(1, ONE, ts=1000.0)
    checker = check([old, new], kept=[message(0, TWO, ts=1000.0), new])
    assert checker.num_restarts == 0 and checker.findings.keys() <= OF_RESTARTS
    assert codes(checker) == {"K4": 2}


@given(st.lists(st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=8), max_size=4))
def test_with_a_replay_what_is_missed_changes_nothing(runs: list[list[tuple[int, bool]]]) -> None:
    kept: list[Message] = []
    checker = StreamChecker(lambda seq: [each for each in kept if each.seq >= seq])
    next_seq = num_restarts = 0
    for number, run in enumerate(runs):
        kept, held, is_seen = [], set[int](), next_seq == 0
        for seq, (name, is_missed) in enumerate(run):
            event = BlockRemoved("GPU", (name,)) if name in held else stored(name)
            held ^= {name}
            kept.append(message(seq, event, ts=1000.0 * number))
            if is_missed or (not is_seen and seq == next_seq):  # which cannot be told
                continue
            checker.receive(kept[-1])
            assert not checker.findings and not checker.joined_late
            assert checker.num_blocks().get("GPU", 0) == len(held)
            num_restarts += not is_seen
            next_seq, is_seen = seq + 1, True
    assert checker.num_restarts == num_restarts


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_malformed_batch_came_and_ends_what_was_known(is_kept: bool) -> None:
    again = message(2, stored(2, parent=1), BlockRemoved("GPU", (9,)))  # it may have removed 2
    messages = [message(0, ONE), Message(1, b"\xc1"), again]
    checker = StreamChecker(lambda seq: messages[seq:] if is_kept else ())
    checker.receive(messages[0])
    checker.begin()
    for each in messages:
        checker.receive(each)
    assert checker.findings == {MALFORMED: 1}
    assert checker.joined_late and checker.num_batches == 3
    assert checker.num_blocks() == {"GPU": 1}


def test_a_batch_that_comes_again_after_a_malformed_one_is_no_restart() -> None:
    checker = StreamChecker(lambda seq: ())
    messages = [message(0, ONE), message(1, stored(3, parent=2)), Message(2, b"\xc1")]
    for each in [*messages, *messages, message(3, stored(5))]:
        checker.receive(each)
    assert checker.findings == {MALFORMED: 1}
    assert (checker.num_restarts, checker.num_batches) == (0, 4)
    assert checker.num_blocks() == {"GPU": 1}


def test_a_replay_that_ends_in_a_malformed_answer() -> None:
    messages = [message(seq, stored(10 * seq)) for seq in range(4)]

    def replay(seq: int) -> Iterator[Message]:
        yield from messages[seq:2]
        raise EventFormatError("no message")

    checker = StreamChecker(replay)
    checker.begin()
    assert checker.num_batches == 2
    checker.receive(messages[3])
    assert checker.examples == {
        MALFORMED: ["no message", "no message"],
        "K7 gap-is-seen": ["batch 2 did not come before 3, nor by a replay"],
    }


NAMES: st.SearchStrategy[int | bytes] = st.sampled_from([0, 1, b""])
EXTRA_KEYS: list[list[list[Any] | None] | None] = [None, [], [["salt"]], [["salt"], None]]
MEDIA = st.sampled_from([None, "CPU"])


@st.composite
def any_stored(draw: st.DrawFn) -> Stored:
    """What any server may send as an event of stored blocks: often right, and often not."""
    hashes, size = draw(st.lists(NAMES, max_size=2)), draw(st.sampled_from([1, 2, 0, -1]))
    num_tokens = draw(st.sampled_from([max(size * len(hashes), 0), 1]))
    keys = draw(st.sampled_from(EXTRA_KEYS))
    parent, name = draw(st.none() | NAMES), draw(st.sampled_from([None, "name"]))
    tokens, group = [7] * num_tokens, draw(st.sampled_from([None, 1]))
    return Stored(hashes, parent, tokens, size, None, draw(MEDIA), name, keys, name, group)


EVENTS = any_stored() | st.builds(Removed, st.lists(NAMES, max_size=2), MEDIA) | st.builds(Cleared)
BATCHES = st.builds(WireBatch, st.floats(0.0), st.lists(EVENTS, max_size=4))
PAYLOADS = BATCHES.map(msgspec.msgpack.encode) | st.just(b"\xc1")
NUMBERS = st.integers(0, 2) | st.sampled_from([2**63, 2**64 - 1])


@given(st.lists(st.builds(Message, NUMBERS, PAYLOADS), max_size=6), st.integers(0, 3))
def test_whatever_a_server_sends_is_checked_to_the_end(
    messages: list[Message], num_kept: int
) -> None:
    check(messages, kept=messages[:num_kept])


def test_blocks_of_other_salts_adapters_and_groups_are_others() -> None:
    def payload(*events: Stored) -> bytes:
        return msgspec.msgpack.encode(WireBatch(1.0, list(events)))

    def block(name: int, **more: object) -> Stored:
        return Stored([name], None, [1, 2], 2, None, None, **{"lora_name": None, **more})  # type: ignore[arg-type]

    events = (block(1, extra_keys=[["a"]]), block(2, lora_name="b"), block(3, cache_salt="c"))
    assert not check([Message(0, payload(*events))]).findings
    again = block(1, extra_keys=[["other"]], group_idx=1)
    checker = check([Message(0, payload(*events, again))])
    assert codes(checker) == {"K2": 1}
    assert checker.num_events == {"GPU stored": 3, "GPU group 1 stored": 1}
    adapted = [block(1, extra_keys=[["a"]], lora_name=name, group_idx=1) for name in (None, "b")]
    assert codes(check([Message(0, payload(*events, *adapted))])) == {"K2": 1, "K4": 1}


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), max_size=12), st.integers(1, 5)
)
def test_our_manager_has_no_finding(prompts: list[list[int]], num_blocks: int) -> None:
    manager = CacheManager(8, 2, host=HostConfig(num_blocks, "exclusive"), record_events=True)
    messages = []
    assert manager.tiers is not None
    for number, prompt in enumerate(prompts):
        lease = manager.admit(manager.match(prompt, b"tenant" if number % 3 == 2 else b""))
        for operation in manager.tiers.take_operations():
            manager.tiers.complete(operation.id, [True] * operation.num_blocks)
        manager.publish(lease, prompt)
        manager.release(lease)
        manager.evict(number % 4)
        if number == 7:
            manager.reset([b""])
        if (batch := manager.take_events()) is not None:
            messages.append(message(batch.seq, *batch.events))
    checker = check(messages)
    assert not checker.findings, checker.examples
    assert checker.num_blocks().get("GPU", 0) == manager.stats().cached_blocks


@pytest.mark.parametrize("lora", [None, "adapter"])
@pytest.mark.parametrize("keys", [[None], [None, None], [None, ["an image"]]])
def test_no_extra_keys_are_the_same_however_they_are_written(keys: list[Any], lora: Any) -> None:
    """The blocks of one tier come with their keys, those of another without."""
    hashes = list(range(len(keys)))
    fields: dict[str, Any] = {"block_size": 1, "lora_id": None, "lora_name": lora}
    gpu = {"block_hashes": hashes, "token_ids": hashes, "parent_block_hash": None, **fields}
    cpu = {"block_hashes": [0], "token_ids": [0], "parent_block_hash": None, **fields}
    batch = [
        {"type": "BlockStored", "medium": "GPU", "extra_keys": keys, **gpu},
        {"type": "BlockStored", "medium": "CPU", "extra_keys": None, **cpu},
    ]
    checker = check([Message(0, msgspec.msgpack.encode([1.0, batch]))])
    assert not checker.findings
    assert checker.num_blocks() == {"CPU": 1, "GPU": len(keys)}


def test_batches_of_all_runs_are_counted() -> None:
    runs = [(run, seq) for run in range(3) for seq in range(2)]
    checker = check([Message(seq, encode_batch(10.0 * run + seq, [])) for run, seq in runs])
    assert (checker.num_batches, checker.num_restarts) == (6, 2)


def test_a_replay_that_nobody_answers_leaves_a_gap() -> None:
    def replay(_: int) -> Iterator[Message]:
        yield message(0)
        yield message(1, BlockRemoved("GPU", (9,)))
        raise TimeoutError("nobody")

    checker = StreamChecker(replay)
    checker.receive(message(0))
    checker.receive(message(5))
    assert codes(checker) == {"K5": 1, "K7": 1}
    [why] = checker.examples["K7 gap-is-seen"]
    assert why == "batch 2 to 4 did not come before 5, nor by a replay"
    assert (checker.num_batches, checker.num_replayed) == (3, 1)
    with pytest.raises(TimeoutError, match=r"^nobody$"):
        StreamChecker(replay).begin()


def test_what_is_remembered_of_malformed_messages_is_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check_module, "MOST_MALFORMED", 2)
    checker = StreamChecker(lambda seq: ())
    for seq, number in [(0, 1), (1, 2), (0, 2), (2, 3), (2, 3), (0, 4)]:
        checker.receive(Message(seq, b"\xc1"))
        assert checker.findings == {MALFORMED: number}, "the third makes it forget the others"


@pytest.mark.parametrize("begins_anew", [False, True])
def test_what_is_remembered_of_removed_blocks_is_limited(
    monkeypatch: pytest.MonkeyPatch, begins_anew: bool
) -> None:
    monkeypatch.setattr(check_module, "MOST_REMOVED", 1)
    removed = [BlockRemoved("GPU", (name,)) for name in (1, 2)]
    later = [stored(4, parent=2), stored(3, parent=1)]
    before = [message(0)] if begins_anew else []
    checker = check([*before, message(0, stored(1), stored(2), *removed, *later, ts=100.0)])
    assert codes(checker) == {"K3": 1}, "the name of 1 is forgotten"
    assert checker.num_restarts == begins_anew
