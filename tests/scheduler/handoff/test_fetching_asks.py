"""A decode node asks storage for the blocks that it lacks, before it grants."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from radixkv.kvcache import CacheManager, HostConfig
from radixkv.kvcache.storage import StorageNamespace
from radixkv.kvcache.tiers.operations import Operation, OpKind
from radixkv.scheduler import DecodeScheduler, PrefillScheduler
from radixkv.scheduler.handoff import (
    Abort,
    Ask,
    AttemptKey,
    Commit,
    DecodeFailed,
    Grant,
    Header,
    Hits,
    Post,
    Preempted,
    Pull,
    Renew,
    Send,
    Timing,
)
from radixkv.scheduler.request import RequestStatus

from . import decode_harness
from .decode_harness import actions, hand_over, refusal, step

PROMPT = [5, 6, 7, 8, 9]
NAMESPACE = StorageNamespace("model", "weights", "float32", 2, (0, 1), (0, 1))
TIMING = Timing(retry_s=1, silence_s=5, transfer_s=12, remember_s=20)


def scheduler(num_blocks: int = 16, **options: Any) -> DecodeScheduler:
    manager = CacheManager(num_blocks, 2, host=HostConfig(16), storage=NAMESPACE)
    sizes = {"token_budget": 8, "max_running": 4, "reserve_tokens": 0} | options
    return DecodeScheduler(manager, epoch=1, timing=TIMING, **sizes)


def answers(d: DecodeScheduler) -> list[Any]:
    return [each.message for each in actions(d) if isinstance(each, Post)]


def ask(
    d: DecodeScheduler, name: str = "a", prompt: list[int] = PROMPT, *, attempt: int = 1
) -> Any:
    """Send an ASK; return the answer."""
    tokens = np.array(prompt, "<i4").tobytes()
    d.receive("p0", Ask(Header(AttemptKey(name, attempt), 5), tokens, b"", 2, 1, 1))
    [answer] = answers(d)
    return answer


def end(d: DecodeScheduler, kind: OpKind, ok: list[bool]) -> None:
    """End the only operation that D has begun since the last call."""
    [operation] = begun(d)
    assert operation.kind is kind
    tiers = d.manager.tiers
    assert tiers is not None and tiers.complete(operation.id, ok)


def begun(d: DecodeScheduler) -> list[Operation]:
    assert d.manager.tiers is not None
    return d.manager.tiers.take_operations()


def load(d: DecodeScheduler, num_blocks: int) -> Grant:
    """End the copy to the device; return the grant of the rest."""
    d.tick(2.0)
    assert answers(d) == [], "the blocks are on the host"
    end(d, OpKind.HOST_TO_DEVICE, [True] * num_blocks)
    d.tick(2.0)
    [granted] = answers(d)
    assert isinstance(granted, Grant)
    return granted


def test_what_storage_has_is_not_sent() -> None:
    d = scheduler()
    renew = ask(d)
    assert isinstance(renew, Renew) and renew.header == Header(AttemptKey("a", 1), 1, 5)
    assert d.num_open == d.manager.stats().live_leases == 0, "an ASK that waits holds nothing"
    end(d, OpKind.LOOKUP, [True, True])
    end(d, OpKind.STORAGE_TO_HOST, [True, True])
    granted = load(d, 2)
    assert granted.first_block == 2
    header = Header(granted.header.key, 5, 1, granted.header.grant)
    d.receive("p0", Send(header, 0, 2, 1, 0))
    [pull] = [each for each in actions(d) if isinstance(each, Pull)]
    d.pulled(pull.part_id)
    d.receive("p0", Commit(header, 1, 9, len(PROMPT), Hits(1, 2, 0)))
    started = actions(d)[1]
    assert started.num_cached_tokens == 4
    assert started.request.num_storage_hit_tokens == 0, "the counts of a request are those of P"
    stats = d.stats()
    assert (stats.hit_tokens, stats.host_hit_tokens, stats.storage_hit_tokens) == (0, 0, 4)
    assert (stats.received_tokens, stats.prefill_tokens, stats.prompt_tokens) == (1, 0, 5)


def test_a_bad_value_is_sent() -> None:
    d = scheduler()
    ask(d)
    end(d, OpKind.LOOKUP, [True, True])
    end(d, OpKind.STORAGE_TO_HOST, [True, False])
    assert load(d, 1).first_block == 1


def test_all_is_sent_if_storage_is_dead() -> None:
    d = scheduler()
    ask(d)
    end(d, OpKind.LOOKUP, [False, False])
    d.tick(0.0)
    [granted] = answers(d)
    assert isinstance(granted, Grant) and granted.first_block == 0


def test_an_ask_waits_for_slow_storage_as_long_as_for_a_silent_peer() -> None:
    d = scheduler()
    d.tick(100.0)
    ask(d)
    for now in (101.0, 104.9):
        assert isinstance(ask(d), Renew), "P asks again"
        d.tick(now)
        assert answers(d) == []
    assert len(begun(d)) == 1, "storage is asked once"
    d.tick(105.0)
    [granted] = answers(d)
    assert isinstance(granted, Grant) and granted.first_block == 0
    assert isinstance(ask(d, "b", [1, 2]), Renew), "another request asks storage"


def test_those_whose_fetch_was_late_leave_the_room_on_the_host_to_others() -> None:
    d = scheduler()
    for number in range(12):  # the host has 16 blocks, and each fetches 2
        name, prompt, now = str(number), [number] * 5, 10.0 * number
        for later_s in (0.0, 4.0):
            d.tick(now + later_s)
            assert isinstance(ask(d, name, prompt), Renew), "it waits for storage"
        d.tick(now + 5.0)
        [granted] = answers(d)
        assert isinstance(granted, Grant) and granted.first_block == 0
        d.give_up(AttemptKey(name, 1), "cancelled")
        actions(d)


def test_two_requests_for_one_prompt_fetch_it_once() -> None:
    d = scheduler()
    assert isinstance(ask(d, "a"), Renew) and isinstance(ask(d, "b"), Renew)
    end(d, OpKind.LOOKUP, [True, True])
    end(d, OpKind.STORAGE_TO_HOST, [True, True])
    d.tick(2.0)
    [renew] = answers(d)
    assert renew.header.key.request_id == "b", "it waits for the blocks that a receives"
    granted = load(d, 2)
    assert granted.header.key.request_id == "a"
    assert begun(d) == []


def test_an_ask_that_has_fetched_waits_for_blocks_in_flight() -> None:
    d = scheduler()
    assert isinstance(ask(d, "a"), Renew) and isinstance(ask(d, "b"), Renew)
    end(d, OpKind.LOOKUP, [False, False])
    d.tick(0.0)
    [granted] = answers(d)
    assert isinstance(granted, Grant) and granted.header.key.request_id == "a"
    end(d, OpKind.LOOKUP, [False, False])
    d.tick(0.0)
    [renew] = answers(d)
    assert isinstance(renew, Renew) and renew.header.key.request_id == "b"
    d.tick(0.0)
    assert answers(d) == [], "nothing is new"


def test_storage_is_not_asked_for_a_request_without_room() -> None:
    d = scheduler(max_running=1)
    assert isinstance(ask(d, "b", [1]), Grant), "it has no whole block"
    assert refusal(ask(d)) == ("out of slots", 2, 1)
    assert begun(d) == []


def test_an_ask_that_waits_for_storage_overtakes_nobody() -> None:
    d = scheduler(num_blocks=8, max_overtaken=1)
    d.manager.admit(d.manager.match([1] * 10))
    assert refusal(ask(d, "large", [2] * 9))[0] == "out of blocks"
    for _ in range(3):
        assert isinstance(ask(d), Renew)
    assert isinstance(ask(d, "b", [1]), Grant)
    assert refusal(ask(d, "c", [1])) == ("others wait", 1, 0), "one has overtaken it"


def test_a_request_that_finds_no_room_in_the_end_is_refused() -> None:
    d = scheduler(max_running=1)
    ask(d)
    assert isinstance(ask(d, "b", [1]), Grant), "it needs no storage"
    end(d, OpKind.LOOKUP, [True, True])
    end(d, OpKind.STORAGE_TO_HOST, [True, True])
    d.tick(0.0)
    [refused] = answers(d)
    assert refusal(refused) == ("out of slots", 2, 1)
    assert refusal(ask(d)) == ("out of slots", 2, 1), "it is remembered no more"


@pytest.mark.parametrize(
    "how",
    ["aborted by P", "given up", "silence", "refused", "a newer attempt", "another epoch of P"],
)
def test_an_attempt_that_ends_fetches_no_more(how: str) -> None:
    check_cancelled(how)


def test_an_aborted_attempt_fetches_no_more() -> None:
    check_cancelled("aborted by P")


def check_cancelled(how: str) -> None:
    d = scheduler()
    key = AttemptKey("a", 1)
    ask(d)
    [lookup] = begun(d)
    match how:
        case "aborted by P":
            d.receive("p0", Abort(Header(key, 5), "cancelled", fenced=False))
        case "given up":
            d.give_up(key, "cancelled")
        case "silence":
            d.tick(5.0)
        case "refused":
            d.drain("other weights")
            assert refusal(ask(d)) == ("draining", 0, 0)
        case "a newer attempt":
            assert isinstance(ask(d, prompt=[1], attempt=2), Grant)
        case _:
            tokens = np.array([1], "<i4").tobytes()
            d.receive("p0", Ask(Header(key, 6), tokens, b"", 2, 1, 1))
    actions(d)
    tiers = d.manager.tiers
    assert tiers is not None and tiers.take_cancelled() == [lookup.id], how
    tiers.complete(lookup.id, [True, True])
    assert begun(d) == [], "nothing is loaded"
    d.tick(6.0)
    assert not any(each.header.key == key and each.header.peer_epoch == 5 for each in answers(d))


def test_a_reset_in_between_drops_what_was_fetched() -> None:
    d = scheduler()
    ask(d)
    end(d, OpKind.LOOKUP, [True, True])
    [fetch] = begun(d)
    d.drain("other weights")
    d.reset_cache(weights_revision="other")
    d.tick(0.0)
    [granted] = answers(d)
    assert isinstance(granted, Grant) and granted.first_block == 0
    tiers = d.manager.tiers
    assert tiers is not None and not tiers.complete(fetch.id, [True, True])
    assert d.manager.match(np.array(PROMPT, np.int32)).num_host_blocks == 0
    d.manager.check()


@pytest.mark.parametrize("kind", [DecodeScheduler, PrefillScheduler])
@pytest.mark.parametrize("revision", ["", "other"])
def test_a_reset_keeps_some_namespaces_and_renames_the_weights(
    kind: type[DecodeScheduler | PrefillScheduler], revision: str
) -> None:
    manager = CacheManager(16, 2, host=HostConfig(16), storage=NAMESPACE)
    node = kind(manager, epoch=1, timing=TIMING, token_budget=8, max_running=4)
    prompt = np.array(PROMPT, np.int32)
    for namespace in (b"a", b"b"):
        lease = manager.admit(manager.match(prompt, namespace))
        manager.publish(lease, prompt)
        manager.release(lease)
    node.reset_cache([b"b"], revision)
    assert [manager.match(prompt, each).num_tokens for each in (b"a", b"b")] == [0, 4]
    assert manager.tiers is not None and manager.tiers.storage is not None
    assert manager.tiers.storage.weights_revision == (revision or NAMESPACE.weights_revision)


def test_an_ask_that_waits_is_refused_when_d_drains() -> None:
    d = scheduler()
    ask(d)
    d.drain("other weights")
    end(d, OpKind.LOOKUP, [True, True])
    end(d, OpKind.STORAGE_TO_HOST, [True, True])
    d.tick(0.0)
    [refused] = answers(d)
    assert refusal(refused) == ("draining", 0, 0)


# Preempted


def complete_all(d: DecodeScheduler) -> None:
    """End what is under way between the tiers; storage finds nothing."""
    tiers = d.manager.tiers
    assert tiers is not None
    for operation in begun(d):
        ok = operation.kind is not OpKind.LOOKUP
        tiers.complete(operation.id, [ok] * (operation.num_blocks or len(operation.keys)))


def pressed(d: DecodeScheduler, max_new_tokens: int = 9) -> None:
    """Let three requests decode until one of them is preempted."""
    for name in "abc":
        d.receive("p0", Ask(Header(AttemptKey(name, 1), 5), ord(name).to_bytes(4, "little") * 4,
                            b"", 2, 1, max_new_tokens))  # fmt: skip
        complete_all(d)
        d.tick(0.0)
        granted = answers(d)[-1]
        assert isinstance(granted, Grant)
        hand_over(d, granted, 4)
        complete_all(d)
    while not d.waiting:
        step(d)


def test_a_preempted_request_is_reported_once_its_kv_is_saved() -> None:
    d = scheduler(num_blocks=12, preempt="host")
    pressed(d)
    [request] = d.waiting
    assert actions(d) == [], "its KV is on its way"
    for _ in range(3):  # to the host, and from there to storage
        complete_all(d)
    [report] = actions(d)
    assert isinstance(report, Preempted) and report.request is request
    assert (report.key, request.status) == (("c", 1), RequestStatus.PREEMPTED)
    assert actions(d) == [], "it is reported once"
    d.abort("c")
    assert d._offered == {}
    [failed] = actions(d)
    assert failed == DecodeFailed(AttemptKey("c", 1), "aborted")
    while d.has_work:
        step(d)
        complete_all(d)
    tiers = d.manager.stats().tiers
    assert tiers is not None and tiers.parked == 0
    assert d.manager.available == 12


def test_a_request_that_is_preempted_again_is_reported_again() -> None:
    d = scheduler(num_blocks=14, preempt="host")
    pressed(d, 17)
    told: list[tuple[str, int]] = []
    while d.has_work:
        for _ in range(3):
            complete_all(d)
        told += [
            (each.key.request_id, each.request.num_preemptions)
            for each in actions(d)
            if isinstance(each, Preempted)
        ]
        step(d)
    assert len(set(told)) == len(told)
    assert [number for name, number in told if name == "c"][:2] == [1, 2]


def test_requests_that_a_reset_preempts_are_not_reported() -> None:
    d = scheduler(num_blocks=12, preempt="host", max_running=4)
    pressed(d)
    for _ in range(3):
        complete_all(d)
    assert [type(each) for each in actions(d)] == [Preempted]
    d.drain("other weights come")
    d.reset_cache(weights_revision="second")
    assert len(d.waiting) == 3 and actions(d) == []


def test_without_storage_no_preempted_request_is_reported() -> None:
    d = decode_harness.scheduler(num_blocks=12)
    for name in "abc":
        decode_harness.start(d, name, 4, 9)
    while not d.waiting:
        step(d)
    assert actions(d) == []
