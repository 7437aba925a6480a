"""Prefetches from storage before admission."""

import pytest

from radixkv.kvcache.tiers.host_tier import HostConfig
from radixkv.kvcache.tiers.operations import OpKind
from radixkv.scheduler.request import Request, RequestStatus

from .copier import Memories, held_when
from .harness import chunks
from .tier_harness import TierHarness, alone, storage_namespace

PROMPT = list(range(10, 19))
"""Four blocks of 2, and a token."""
KINDS = (OpKind.HOST_TO_DEVICE, OpKind.LOOKUP, OpKind.STORAGE_TO_HOST)


def stored() -> Memories:
    """Return memories whose storage holds the blocks of PROMPT, from an earlier process."""
    harness = TierHarness(8, 2, host=HostConfig(16, "through"), storage=True)
    harness.submit(PROMPT, name="seed")
    harness.drain()
    assert len(harness.memories.storage) == 4
    return Memories(2, storage=harness.memories.storage)


def test_stored_blocks_are_prefetched_before_admission():
    harness = TierHarness(8, 2, storage=True, memories=stored())
    harness.copier.fate = held_when(*KINDS)
    again = harness.submit([*PROMPT, 1], 2, name="again")
    passing = harness.submit([1], 1, name="passing")
    assert chunks(harness.step()) == [("passing", 0, 1)]
    assert passing.finish_reason == "length" and again.status is RequestStatus.WAITING
    for kind in (OpKind.LOOKUP, OpKind.STORAGE_TO_HOST, OpKind.HOST_TO_DEVICE):
        for flight in list(harness.copier.flights):
            if flight.operation.kind is OpKind.LOOKUP and kind is not OpKind.LOOKUP:
                harness.copier.end(flight)
        assert chunks(harness.step()) == []
        harness.copier.end(harness.copier.held(kind))
    assert chunks(harness.step()) == [("again", 8, 2)]
    harness.drain()
    assert again.output_tokens == alone(harness, again)
    stats = harness.scheduler.stats()
    assert (stats.hit_tokens, stats.host_hit_tokens, stats.storage_hit_tokens) == (0, 0, 8)
    assert again.num_storage_hit_tokens == 8


def test_storage_hits_and_host_hits_are_counted_apart():
    harness = TierHarness(8, 2, storage=True, memories=stored())
    harness.submit(PROMPT[:5], name="first")
    harness.run()
    harness.manager.evict(8)
    harness.step()
    second = harness.submit([*PROMPT, 1], name="second")
    harness.drain()
    assert (second.num_host_hit_tokens, second.num_storage_hit_tokens) == (4, 4)
    stats = harness.scheduler.stats()
    assert (stats.host_hit_tokens, stats.storage_hit_tokens) == (4, 8)
    assert stats.prefill_tokens == 1 + 2


def test_a_block_that_storage_loses_during_the_prefetch_is_computed():
    memories = stored()
    harness = TierHarness(8, 2, storage=True, memories=memories)
    harness.copier.fate = held_when(OpKind.STORAGE_TO_HOST)
    again = harness.submit([*PROMPT, 1], name="again")
    harness.step()
    harness.step()
    flight = harness.copier.held(OpKind.STORAGE_TO_HOST)
    del memories.storage[flight.operation.keys[2]]
    harness.copier.end(flight)
    harness.drain()
    assert again.output_tokens == alone(harness, again)
    assert again.num_storage_hit_tokens == 4
    assert harness.scheduler.stats().prefill_tokens == 6


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_a_prefetch_is_cancelled_when_its_request_is_aborted(num_steps):
    harness = TierHarness(8, 2, storage=True, memories=stored())
    again = harness.submit([*PROMPT, 1], name="again")
    for _ in range(num_steps):
        harness.step()
    assert harness.scheduler.abort(again.request_id)
    assert again.prefetch is None and not harness.scheduler.has_work
    harness.drain()


@pytest.mark.parametrize("num_steps", range(4))
@pytest.mark.parametrize("has_other", [True, False])
def test_requests_that_fetch_or_wait_for_it_go_on_with_another_storage(num_steps, has_other):
    harness = TierHarness(16, 2, storage=True, memories=stored())
    requests = [harness.submit([*PROMPT, i], name=str(i)) for i in range(3)]
    for _ in range(num_steps):
        harness.step()
    assert harness.manager.tiers is not None
    harness.manager.tiers.storage = storage_namespace(2, "other") if has_other else None
    harness.drain()
    for request in requests:
        assert request.output_tokens == alone(harness, request)


def test_without_prefix_cache_nothing_is_fetched():
    harness = TierHarness(8, 2, storage=True, memories=stored(), prefix_cache=False)
    harness.submit([*PROMPT, 1], name="again")
    harness.drain()
    assert not harness.copier.seen
    assert harness.scheduler.stats().prefill_tokens == 10


@pytest.mark.parametrize("num_records", range(1, len(PROMPT) + 1))
def test_no_more_is_prefetched_than_may_be_hits(num_records):
    """Prompt tokens without a record are computed."""
    harness = TierHarness(8, 2, storage=True, memories=stored())
    records = Request("records", PROMPT, 1, prompt_logprobs=0)
    records.prompt_records = [None] * num_records
    harness.add(records)
    harness.drain()
    stats = harness.manager.stats()
    assert stats.tiers is not None and stats.tiers.fetched_blocks == (num_records - 1) // 2
    assert records.num_storage_hit_tokens == (num_records - 1) // 2 * 2


def test_a_request_without_hits_waits_for_no_copy():
    harness = TierHarness(8, 2, storage=True, memories=stored())
    harness.copier.fate = held_when(*KINDS)
    harness.add(Request("records", PROMPT[:8], 1, prompt_logprobs=0))
    assert chunks(harness.step()) == [("records", 0, 8)]
    harness.drain()


def test_a_block_computed_by_another_request_during_the_prefetch_is_a_device_hit():
    harness = TierHarness(16, 2, storage=True, token_budget=3, max_running=2)
    leader = harness.submit(PROMPT, name="leader")
    while leader.lease is None:  # storage says that it has nothing
        harness.step()
    harness.copier.fate = held_when(OpKind.STORAGE_TO_HOST)
    harness.memories.storage.update(stored().storage)
    again = harness.submit([*PROMPT, 1], name="again")
    for _ in range(5):
        harness.step()
    harness.drain()
    assert again.num_hit_tokens == 8
    assert again.num_host_hit_tokens == again.num_storage_hit_tokens == 0
    stats = harness.scheduler.stats()
    assert (stats.hit_tokens, stats.host_hit_tokens, stats.storage_hit_tokens) == (8, 0, 0)
    assert stats.prefill_tokens == 9 + 2


@pytest.mark.parametrize("abort", [False, True])
def test_a_shared_prefix_is_fetched_once(abort):
    harness = TierHarness(16, 2, storage=True, memories=stored())
    leader, *others = (harness.submit([*PROMPT, i], name=str(i)) for i in range(3))
    if abort:  # the next one leads
        harness.scheduler.abort(leader.request_id)
        leader, others = others[0], others[1:]
    harness.drain()
    for request in (leader, *others):
        assert request.output_tokens == alone(harness, request)
    stats = harness.manager.stats()
    assert stats.tiers is not None and stats.tiers.fetched_blocks == 4
    assert leader.num_storage_hit_tokens == 8
    assert all(request.num_hit_tokens == 8 for request in others)


def test_a_prefetch_is_waited_for_in_its_namespace_alone():
    harness = TierHarness(16, 2, host=HostConfig(32), storage=True)
    harness.copier.fate = held_when(*KINDS)
    first, other, follower = (
        harness.add(Request(name, PROMPT, 1, namespace=namespace))
        for name, namespace in (("first", b""), ("other", b"o"), ("follower", b"o"))
    )
    assert first.prefetch is not None and first.fetches_after is None
    assert other.prefetch is not None and other.fetches_after is None
    assert follower.prefetch is None and follower.fetches_after is other.prefetch
    harness.copier.fate = held_when()
    harness.drain()


def test_a_request_fetches_the_blocks_after_a_shared_prefix():
    memories = stored()
    other = TierHarness(8, 2, host=HostConfig(16, "through"), storage=True, memories=memories)
    other.submit([*PROMPT[:4], 1, 2, 3, 4, 5], name="seed")
    other.drain()
    harness = TierHarness(16, 2, storage=True, memories=Memories(2, storage=memories.storage))
    first = harness.submit(PROMPT, name="first")
    second = harness.submit([*PROMPT[:4], 1, 2, 3, 4, 5], name="second")
    harness.drain()
    assert (first.num_storage_hit_tokens, second.num_storage_hit_tokens) == (8, 4)
    assert second.num_hit_tokens + second.num_host_hit_tokens == 4
    stats = harness.manager.stats()
    assert stats.tiers is not None and stats.tiers.fetched_blocks == 6


@pytest.mark.parametrize("num_host_blocks", [7, 8, 9])
def test_prefetches_ahead_may_fill_the_host_tier(num_host_blocks):
    harness = TierHarness(8, 2, host=HostConfig(num_host_blocks), storage=True)
    harness.copier.fate = held_when(*KINDS)
    assert harness.submit(PROMPT, name="first").prefetch is not None
    second = harness.submit([7, *PROMPT[:-1]], name="second")  # four blocks, too
    assert (second.prefetch is not None) == (num_host_blocks >= 8)
    assert harness.scheduler.stats().prefetches_put_off == (num_host_blocks < 8)
    harness.copier.fate = held_when()
    harness.drain()


def test_prefetches_ahead_do_not_exceed_the_host_tier():
    harness = TierHarness(8, 2, host=HostConfig(6), storage=True, memories=stored())
    harness.copier.fate = held_when(*KINDS)
    first = harness.submit([*PROMPT, 1], 2, name="first")
    second = harness.submit([7, *PROMPT], 2, name="second")
    assert first.prefetch is not None and second.prefetch is None
    assert harness.scheduler.stats().prefetches_put_off == 1
    assert chunks(harness.step()) == [("second", 0, 8)]  # it asked again, and did not wait
    harness.copier.fate = held_when()
    harness.drain()
    assert first.num_storage_hit_tokens == 8
    third = harness.submit([6, *PROMPT], 2, name="third")
    assert third.prefetch is not None  # no other request is ahead any more
    harness.drain()
    for request in (first, second, third):
        assert request.output_tokens == alone(harness, request)


def test_a_prefetch_that_was_put_off_starts_when_there_is_room():
    harness = TierHarness(8, 2, host=HostConfig(6), storage=True, memories=stored())
    first = harness.submit([7, *PROMPT], 1, name="first")
    second = harness.submit([*PROMPT, 1], 2, name="second")
    assert second.prefetch is None
    harness.scheduler.abort(first.request_id)
    harness.drain()
    assert second.num_storage_hit_tokens == 8


def test_a_request_that_runs_leaves_the_host_to_others():
    """Only requests that have not begun are ahead, however long one runs then."""
    harness = TierHarness(16, 2, host=HostConfig(6), storage=True, memories=stored())
    first = harness.submit([*PROMPT, 1], 9, name="first")
    while first.status is not RequestStatus.RUNNING:
        harness.step()
    second = harness.submit([7, *PROMPT], 1, name="second")
    assert second.prefetch is not None and not second.prefetch_is_put_off
    assert first.status is RequestStatus.RUNNING
    harness.drain()
    assert harness.scheduler.stats().prefetches_put_off == 0


def test_a_prefetch_larger_than_the_host_starts_if_none_is_ahead():
    harness = TierHarness(8, 2, host=HostConfig(2), storage=True, memories=stored())
    request = harness.submit([*PROMPT, 1], 2, name="large")
    harness.drain()
    assert request.num_storage_hit_tokens == 4
