"""The model of the hand-off alone: each event that a rule forbids breaks that rule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import pytest

from radixkv.spec.model.handoff import (
    DecodeModel,
    Memory,
    PrefillModel,
    Published,
    Request,
    Requests,
    Torn,
    cut_and_join,
    prefixes,
    tagged,
    untagged,
)
from radixkv.spec.rules.handoff import (
    X1,
    X2,
    X4,
    X5,
    X6,
    X7,
    X8,
    X9,
    X10,
    X11,
    X12,
    X14,
    X15,
    X16,
    X17,
    X18,
    X19,
    X26,
    X27,
    X29,
    X30,
    X31,
    X32,
    X33,
)
from radixkv.spec.rules.rule import Rule, Violation

PROMPT = (1, 2, 3, 4, 5)


@contextmanager
def breaks(rule: Rule) -> Iterator[None]:
    with pytest.raises(Violation) as caught:
        yield
    assert caught.value.rule is rule


def requests() -> Requests:
    model = Requests(max_attempts=2)
    model.requests["r1"] = Request(PROMPT, 2, seed=1)
    model.submitted("r1", deadline=10, is_hopeless=False)
    return model


def test_an_attempt_begins_and_starts_once() -> None:
    model = requests()
    model.begun("p0", "r1.1.1")
    model.begun("p0", "r1.1.2")
    with breaks(X1):
        model.begun("p1", "r1.1.1")
    model.started("r1.1.1")
    with breaks(X12):
        model.started("r1.1.1")


def test_a_client_is_told_a_growing_prefix_of_its_answer() -> None:
    model = requests()
    output = model.requests["r1"].output()
    assert model.num_told("r1") == 0
    for tokens in (output[:1], output[:1], output):
        model.told("r1", tokens)
        assert model.num_told("r1") == len(tokens)
    for tokens in ((), output[:1], (*output, 1), (output[0] + 1,)):
        with breaks(X26):
            model.told("r1", tokens)
    model.submitted("r1", deadline=10, is_hopeless=False)  # to another gateway
    model.told("r1", output[:1])


def test_tokens_are_reported_to_a_gateway_that_has_asked() -> None:
    model = requests()
    with breaks(X27):
        model.reported("d0", "r1.1.1")
    model.followed("r1.1.1")
    model.reported("d0", "r1.1.1")
    with breaks(X27):
        model.reported("d0", "r1.1.2")


def test_a_moved_request_goes_on_with_its_tokens() -> None:
    model = requests()
    output = model.requests["r1"].output()
    model.runs("r1", "r1.1.1", PROMPT)
    for prompt in ((*PROMPT, output[0]), PROMPT[:-1], (*PROMPT[:-1], 49)):
        with breaks(X30):
            model.runs("r1", "r1.1.2", prompt)
    model.preempted("r1", "r9.1.1", output[:1])  # none of its attempts
    with breaks(X30):
        model.runs("r1", "r1.1.2", (*PROMPT, output[0]))
    model = requests()
    model.runs("r1", "r1.1.1", PROMPT)
    model.preempted("r1", "r1.1.1", output[:1])
    with breaks(X31):
        model.runs("r1", "r1.1.2", (*PROMPT, output[0]))
    model.cancelled("r1.1.1")
    model.runs("r1", "r1.1.2", (*PROMPT, output[0]))
    model.preempted("r1", "r1.1.2", ())  # a token more would be one of the second attempt
    with breaks(X30):
        model.runs("r1", "r1.1.3", (*PROMPT, *output[:2]))
    assert model.requests["r1"].kv_of("r1.1.2") == (*PROMPT, output[0])
    assert model.requests["r1"].moved == {"r1.1.1", "r1.1.2"}


def test_a_message_is_repeated_until_its_sender_knows() -> None:
    model = requests()
    model.acknowledged("p0", "r1.1.1", "Started")  # of nothing that was sent
    for _ in range(2):
        model.sent("p0", "r1.1.1", "Started")
    model.acknowledged("p0", "r1.1.1", "Started")
    model.sent("p0", "r1.1.1", "Finished")
    with breaks(X2):
        model.sent("p0", "r1.1.1", "Started")


def answered(model: Requests, tokens: tuple[int, ...] | None, hits: int = 0, now: int = 0) -> None:
    model.answered("r1", tokens, hits, "why", now)


def test_a_client_is_owed_the_tokens_of_one_node_alone() -> None:
    output = Request(PROMPT, 2, seed=1).output()
    assert len(output) == 2 and output != Request(PROMPT, 2, seed=2).output()
    model = requests()
    with breaks(X16):
        answered(model, (0, 0))
    model = requests()
    model.requests["r1"].attempts.add("r1.1.1")
    model.started("r1.1.1")
    model.hits["r1.1.1"] = 4
    with breaks(X6):
        answered(model, output, hits=3)
    del model.answers["r1"]
    answered(model, output, hits=4)
    assert model.open() == []
    with breaks(X17):
        answered(model, output, hits=4)


def test_a_request_fails_after_all_attempts_or_for_good() -> None:
    with breaks(X18):
        answered(requests(), None, now=9)
    answered(requests(), None, now=10)  # too late
    hopeless, tried = requests(), requests()
    hopeless.requests["r1"].is_hopeless = True
    answered(hopeless, None)
    tried.requests["r1"].attempts |= {"r1.1.1", "r1.1.2"}
    tried.requests["r1"].failed |= {"r1.1.1"}
    with breaks(X18):
        answered(tried, None)
    del tried.answers["r1"]
    tried.requests["r1"].failed |= {"r1.1.2"}
    answered(tried, None)


def test_a_read_finds_what_was_written_for_its_prefix() -> None:
    memory = Memory(block_size=2)
    memory.write([7, 8, 9], 0, PROMPT, 0, group=0)
    memory.read([7, 8, 9], PROMPT, 0, "r1")
    memory.read([7, 8], PROMPT[:3], 0, "r2")
    with breaks(X8):
        memory.read([7, 8, 9], PROMPT, 1, "r1")  # the other group of layers
    with breaks(X8):
        memory.read([8, 7], PROMPT[:4], 0, "r1")
    with breaks(X8):
        memory.read([7], PROMPT[:3], 0, "r1")
    memory.write([7, 8], 1, (1, 9, 9), 0, group=0)  # the first block is shared
    memory.read([7], PROMPT[:2], 0, "r1")


def test_a_block_is_read_when_all_of_its_shards_are_written() -> None:
    memory = Memory(block_size=2)
    memory.put([7, 8], 0, [(1, 9), (1, 9, 9)])
    content = [PROMPT[:2], PROMPT[:4]]
    for shard in (2, 0):
        memory.put_piece([7, 8], 0, content, shard, num_shards=3)
        assert memory.at([7, 8], 0) == [(1,), (1,)]  # what all shards have in common
        with breaks(X8):
            memory.read([7], PROMPT[:2], 0, "r1")
    torn = memory.content[7, 0]
    assert isinstance(torn, Torn) and torn.shards == (PROMPT[:2], (1, 9), PROMPT[:2])
    memory.put_piece([7, 8], 0, content, 1, num_shards=3)
    memory.read([7, 8], PROMPT[:4], 0, "r1")
    assert not [each for each in memory.content.values() if isinstance(each, Torn)]
    memory.put_piece([8], 0, [(4, 4)], 1, num_shards=2)
    memory.write([7, 8], 1, PROMPT[:4], 0, group=0)  # a step writes all shards
    memory.read([7, 8], PROMPT[:4], 0, "r1")


def test_kv_of_another_namespace_is_other_kv() -> None:
    assert untagged(tagged(1, PROMPT)) == (1, PROMPT) and untagged(()) == (0, ())
    memory = Memory(block_size=2)
    memory.write([1], 0, tagged(0, PROMPT[:2]), 0, group=0)
    with breaks(X8):
        memory.read([1], tagged(1, PROMPT[:2]), 0, "r1")


def test_what_is_published_is_hit_until_it_is_evicted() -> None:
    published = Published(block_size=2)
    with breaks(X5):
        published.add(PROMPT, num_cached=2)
    published.add(PROMPT, num_cached=4)
    published.hit((1, 2, 9), 2, "r2")
    with breaks(X5):
        published.hit(PROMPT, 2, "r3")
    assert not published.settle(0, lambda tokens: 0), "nothing was evicted, and nobody looks"
    assert published.settle(1, lambda tokens: min(len(tokens), 2))
    published.hit(PROMPT, 2, "r4")
    with breaks(X5):
        published.hit(PROMPT, 0, "r5")
    published.add(PROMPT, num_cached=4)
    with breaks(X5):
        published.settle(2, lambda tokens: 0)  # one block was evicted, two are gone


def test_hits_and_computed_tokens_add_up_and_are_counted_once() -> None:
    model = PrefillModel("p0", num_groups=1, block_size=2)
    model.admitted("r1.1.1", PROMPT, on_device=2)
    model.admitted("r2.1.1", PROMPT, on_device=4)
    model.counted(0, on_device=0)
    model.counted(8, on_device=6)  # both may have been granted
    model.answered("r2.1.1", is_grant=False)
    for wrong in ((8, 0), (0, 4)):
        with breaks(X7):
            model.counted(*wrong)
    model.computes("r1.1.1", start=2)
    model.computes("r1.1.1", start=4)
    model.counted(2, on_device=2)
    for wrong in ((0, 2), (4, 2), (2, 0), (2, 4), (2, 6)):
        with breaks(X7):
            model.counted(*wrong)
    model.computed["r1.1.1"] = 3
    model.committed("r1.1.1", position=5, hits=2)
    with breaks(X6):
        model.committed("r1.1.1", position=5, hits=4)


def test_an_offer_stays_until_its_fence() -> None:
    model = PrefillModel("p0", num_groups=1, block_size=2)
    model.device.write([3, 4], 0, PROMPT[:4], 0, group=0)
    model.offered("part", "r1.1.1", [3, 4], group=0)
    assert model.served("part") == [PROMPT[:2], PROMPT[:4]]
    assert model.served("another") is None
    model.device.put([4], 0, [(9,)])
    with breaks(X11):
        model.served("part")
    model.fenced("r1.1.1")
    assert model.served("part") is None


def test_what_is_pulled_was_offered() -> None:
    model = requests()
    model.offered("part of epoch 1")
    model.pulled("d0", "part of epoch 1")
    with breaks(X10):
        model.pulled("d0", "part of epoch 2")


def test_an_attempt_is_granted_neither_beside_another_one_nor_after_a_newer_one() -> None:
    model = DecodeModel("d0", 1, 2, max_overtaken=1, patience=5, memory=9)
    model.granted("r1.1.1", 1, 0, PROMPT, now=0)
    with breaks(X4):
        model.granted("r1.1.2", 2, 0, PROMPT, now=0)
    model.gave_up("r1.1.1", 1)
    model.granted("r1.1.2", 2, 0, PROMPT, now=1)
    model.started("r1.1.2")
    with breaks(X4):
        model.granted("r1.1.1", 3, 0, PROMPT, now=9)
    model.granted("r1.1.1", 3, 0, PROMPT, now=10)


def test_a_block_is_not_sent_for_two_similar_prompts() -> None:
    model = DecodeModel("d0", 1, 2, max_overtaken=1, patience=5, memory=9)
    model.granted("r1.1.1", 1, 0, PROMPT, now=0)
    model.granted("r1.1.1", 1, 0, PROMPT, now=0)  # a copy
    model.granted("r2.1.1", 2, 0, (1, 2, *[9] * 6), now=0)  # hardly anything in common
    with breaks(X9):
        model.granted("r3.1.1", 3, 1, (*PROMPT[:4], 9), now=0)
    model.gave_up("r1.1.1", 9)  # another grant
    with breaks(X9):
        model.granted("r3.1.1", 3, 1, (*PROMPT[:4], 9), now=0)
    model.gave_up("r1.1.1", 1)
    model.granted("r3.1.1", 3, 1, (*PROMPT[:4], 9), now=0)


def decode_model() -> DecodeModel:
    return DecodeModel("d0", 1, 2, max_overtaken=1, patience=5, memory=9)


def test_stored_blocks_are_not_sent_without_a_fault() -> None:
    model = decode_model()
    model.asked("r1.1.1", 2, faults=3, now=0)
    model.asked("r1.1.1", 4, faults=9, now=3)  # a copy
    with breaks(X29):
        model.grants_the_rest("r1.1.1", 1, faults=3, now=4)
    for first_block, faults, now, is_due in ((2, 3, 4, True), (0, 4, 4, False), (0, 3, 5, False)):
        model.asked("r1.1.1", 2, faults=3, now=0)
        assert model.grants_the_rest("r1.1.1", first_block, faults, now) is is_due
    assert not model.grants_the_rest("r1.1.1", 0, faults=3, now=0), "nobody asked"
    model.asked("r1.1.1", 2, faults=3, now=0)
    model.declined("r1.1.1")
    assert not model.grants_the_rest("r1.1.1", 0, faults=3, now=0), "it was refused"
    model.asked("r1.1.1", 0, faults=3, now=0)
    assert not model.grants_the_rest("r1.1.1", 0, faults=3, now=0), "storage had nothing"


def test_blocks_of_steps_in_flight_are_kept() -> None:
    model = decode_model()
    model.kept(0)
    model.filled([3], "r9.1.1")
    model.launched({"r1.1.1": [3, 4], "r2.1.1": [3, 5]})  # the first block is shared
    model.launched({"r1.1.1": [3, 4, 6]})
    model.kept(4)
    with breaks(X14):
        model.kept(3)
    model.filled([1, 2], "r9.1.1")
    for block in (3, 4, 5, 6):
        with breaks(X14):
            model.filled([1, block], "r9.1.1")
    model.completed()
    model.kept(3)
    model.filled([5], "r9.1.1")
    with breaks(X14):
        model.filled([4], "the host")
    model.completed()
    model.kept(0)
    model.filled([4], "the host")


def test_an_attempt_starts_when_all_of_its_pulls_have_ended_well() -> None:
    model = decode_model()
    model.granted("r1.1.1", 1, 0, PROMPT, now=0)
    for part in (0, 1):
        model.pulls(part, "r1.1.1", [3, 4], group=part)
    model.pulled(0)
    with breaks(X32):
        model.started("r1.1.1")
    for number, may_start in ((9, False), (1, True)):  # 9: another grant
        model = decode_model()
        model.granted("r1.1.1", 1, 0, PROMPT, now=0)
        model.pulls("failed", "r1.1.1", [3, 4], group=0)
        model.fenced("failed")
        model.gave_up("r1.1.1", number)
        model.granted("r1.1.1", 2, 0, PROMPT, now=0)
        model.pulls("again", "r1.1.1", [3, 4], group=0)
        model.pulled("again")
        if may_start:
            model.started("r1.1.1")
        else:
            with breaks(X32):
                model.started("r1.1.1")


def test_blocks_of_a_pull_that_may_write_are_used_for_nothing_else() -> None:
    model = decode_model()
    model.pulls("late", "r1.1.1", [3, 4], group=0)
    model.pulls("other layers", "r1.1.1", [3, 4], group=1)
    model.gave_up("r1.1.1", 1)  # it is not fenced
    model.launched({"r2.1.1": [5, 6]})
    model.filled([7], "the host")
    for group, attempt in ((0, "r1.1.1"), (0, "r2.1.1"), (1, "r2.1.1"), (2, "r2.1.1")):
        with breaks(X33):
            model.pulls("next", attempt, [2, 4], group)
    with breaks(X33):
        model.launched({"r2.1.1": [5, 3]})
    with breaks(X33):
        model.filled([4], "the host")
    model.fenced("late")
    model.fenced("late")
    with breaks(X33):
        model.filled([4], "the host")
    model.fenced("other layers")
    model.filled([4], "the host")
    with breaks(X14):
        model.pulls("next", "r3.1.1", [5], 0)
    model.launched({"r2.1.1": [5, 3]})


def test_an_end_is_reported_once_after_the_last_step() -> None:
    model = decode_model()
    for name in ("r1.1.1", "r2.1.1"):
        with breaks(X15):
            model.ended(name)  # it has not started
        model.started(name)
    model.launched({"r1.1.1": [1], "r2.1.1": [2]})
    model.launched({"r1.1.1": [1]})
    model.completed()
    model.ended("r2.1.1")
    with breaks(X15):
        model.ended("r2.1.1")  # again
    with breaks(X15):
        model.ended("r1.1.1")  # too early
    model = decode_model()
    model.started("r1.1.1")
    model.launched({"r1.1.1": [1]})
    model.completed()
    model.ended("r1.1.1")


def test_a_stop_token_ends_an_output() -> None:
    whole = Request(PROMPT, 9, seed=1).output()
    for index, token in enumerate(whole):
        cut = Request(PROMPT, 9, seed=1, stop=(99, token)).output()
        assert cut == whole[: whole.index(token) + 1] and len(cut) <= index + 1


def test_a_refused_request_is_overtaken_so_often_while_it_may_ask_again() -> None:
    model = DecodeModel("d0", 1, 2, max_overtaken=1, patience=5, memory=9)
    model.refused("big", PROMPT, 0)
    model.admitted("a", room=0, now=1)
    with breaks(X19):
        model.admitted("b", room=2, now=2)
    model.admitted("c", room=3, now=2)
    model.admitted("big", room=0, now=2)
    model.refused("gone", PROMPT, 11)
    for name in "abc":
        model.admitted(name, room=0, now=16)


def test_a_refused_request_that_asks_late_is_awaited_longer() -> None:
    model = DecodeModel("d0", 1, 2, max_overtaken=1, patience=5, memory=9)
    model.refused("late", PROMPT, 0)
    model.refused("other", PROMPT, 4)
    model.refused("late", PROMPT, 9)
    model.admitted("a", room=0, now=26)
    with breaks(X19):
        model.admitted("b", room=0, now=26)
    model.admitted("c", room=0, now=27)


def test_requests_are_overtaken_by_those_refused_later() -> None:
    model = DecodeModel("d0", 1, 2, max_overtaken=1, patience=5, memory=9)
    for name in ("first", "second", "third"):
        model.refused(name, PROMPT, 0)
    model.admitted("second", room=0, now=1)
    model.admitted("first", room=0, now=1)
    model.admitted("new", room=0, now=1)
    with breaks(X19):
        model.admitted("newer", room=0, now=1)


def test_a_new_gateway_knows_nothing_of_a_request() -> None:
    model = requests()
    model.runs("r1", "r1.1.1", PROMPT)
    model.preempted("r1", "r1.1.1", model.requests["r1"].output())
    model.requests["r1"].failed.add("r1.1.1")
    model.submitted("r1", deadline=20, is_hopeless=True)
    fresh = Request(PROMPT, 2, seed=1, deadline=20, is_hopeless=True)
    fresh.prompts["r1.1.1"] = PROMPT
    assert model.requests["r1"] == fresh


def test_a_client_with_an_answer_waits_for_no_tokens() -> None:
    model = requests()
    model.told("r1", model.requests["r1"].output())
    answered(model, None, now=10)
    assert model.num_told("r1") == 0


@pytest.mark.parametrize("namespace", [0, 1])
def test_the_kv_of_a_request_is_that_of_its_prompt(namespace: int) -> None:
    request = Request(PROMPT, 2, seed=1, namespace=namespace, prompts={"r1.1.2": (*PROMPT, 6)})
    assert untagged(request.kv) == untagged(request.kv_of("r1.1.1")) == (namespace, PROMPT)
    assert untagged(request.kv_of("r1.1.2")) == (namespace, (*PROMPT, 6))


def test_blocks_are_cut_and_joined_at_every_place() -> None:
    """Each block that is written ends with the token that it would end with at home."""
    tokens = tuple(range(1, 13))
    for sent_size, size, first, num_sent in product((1, 2, 3, 4), (1, 2, 3, 4), (0, 1), (1, 2, 3)):
        sent = prefixes(tokens, sent_size)[first : first + num_sent]
        for end in {len(sent[-1]), len(sent[-1]) - sent_size + 1}:  # the last one may not be full
            sent[-1] = tokens[:end]
            for num_skipped in range(min(size, end - first * sent_size)):
                start = first * sent_size + num_skipped
                stops = range(start + size, end + size, size)
                due = [tokens[: min(stop, end)] for stop in stops]
                assert cut_and_join(sent, sent_size, num_skipped, size) == due


@pytest.mark.parametrize("wrong", [(), (9,), (9,) * 9], ids=len)
def test_a_block_of_two_prefixes_or_of_nothing_holds_nothing(wrong: tuple[int, ...]) -> None:
    """Wherever it is, and however long: a part that was never computed may be sent, too."""
    tokens = tuple(range(1, 9))
    for place, num_skipped, size in product(range(4), (0, 1), (1, 2, 3, 4)):
        sent = prefixes(tokens, 2)
        due = cut_and_join(sent, 2, num_skipped, size)
        sent[place] = wrong
        found = cut_and_join(sent, 2, num_skipped, size)
        assert place == 3 or len(found) == len(due)
        for index, (right, each) in enumerate(zip(due, found, strict=False)):
            first = num_skipped + index * size
            stop = min(first + size, 8)
            is_touched = first < 2 * place + 2 and stop > 2 * place
            assert (each == right) is not is_touched
            assert not is_touched or each == () or stop <= 2 * place + 2


def test_one_node_alone_generates_tokens_that_depend_on_all() -> None:
    """Another seed, another length or another token before gives another one."""
    for seed, prompt in ((1, PROMPT), (0, ()), (3, (7, 7))):
        [first] = Request(prompt, 1, seed).output()
        assert 0 <= first < 50
        others = [Request(prompt, 1, seed + 1), Request((*prompt, 0), 1, seed)]
        others += [Request((*prompt[:-1], token), 1, seed) for token in range(8, 50) if prompt]
        assert first not in [token for other in others for token in other.output()]


def test_as_many_blocks_are_written_as_are_sent() -> None:
    memory = Memory(block_size=2)
    for blocks in ([7], [7, 8, 9]):
        with breaks(X8):
            memory.put(blocks, 0, [(1, 2), (1, 2, 3)])
        with breaks(X8):
            memory.put_piece(blocks, 0, [(1, 2), (1, 2, 3)], 0, num_shards=2)
    assert not memory.content


def test_a_step_writes_from_its_first_token_on() -> None:
    """It writes the block that this token is in, unless others use it, too."""
    for start, num_shared in product(range(7), range(5)):
        memory = Memory(block_size=2)
        memory.write([5, 6, 7], num_shared, (*PROMPT, 6), start, group=0)
        written = [block for block, _ in memory.content]
        assert written == [5, 6, 7][max(start // 2, num_shared) :]
