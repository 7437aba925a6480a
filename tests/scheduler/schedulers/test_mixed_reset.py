"""Cache resets under load: KV is dropped in every tier, and requests continue."""

import re
from typing import Any

import numpy as np
import pytest

from radixkv.kvcache import NamespaceError, make_namespace
from radixkv.kvcache.tiers.host_tier import HostConfig
from radixkv.kvcache.tiers.operations import OpKind
from radixkv.scheduler.errors import StepOrderError
from radixkv.scheduler.request import Request, RequestStatus
from radixkv.spec import prefix_tags

from .copier import Memories, held_when
from .harness import Harness, chunks
from .tier_harness import VOCABULARY, TierHarness, end_all, preempted, pressed


def check_after(harness: TierHarness, before: dict[Request, list[int]]) -> None:
    """Check that tokens since the reset are those of the new weights."""
    for request, outputs in before.items():
        assert request.output_tokens[: len(outputs)] == outputs
        tokens = [*request.prompt.tolist(), *outputs]
        while len(tokens) < request.num_tokens:
            tokens.append(prefix_tags(harness.weights, tokens)[-1] % VOCABULARY)
        assert request.tokens.tolist() == tokens


@pytest.mark.parametrize("num_steps", range(12))
@pytest.mark.parametrize("preempt", ["recompute", "host", "storage"])
@pytest.mark.parametrize("kinds", [(), (OpKind.DEVICE_TO_HOST,), tuple(OpKind)])
def test_a_reset_at_any_time_goes_on_with_the_new_weights(num_steps, preempt, kinds):
    harness = pressed(preempt=preempt, storage=True, host=HostConfig(16, "through"))
    harness.copier.fate = held_when(*kinds)
    for _ in range(num_steps):
        harness.step()
    before = {request: list(request.output_tokens) for request in harness.requests}
    harness.reset(b"1")
    harness.manager.check()
    assert harness.scheduler.running == ()
    for request in harness.scheduler.waiting:
        assert request.lease is None and request.parked is None and request.num_computed == 0
    assert harness.manager.stats().cached_blocks == 0
    harness.drain()
    check_after(harness, before)


def test_a_request_being_parked_loses_its_kv_and_is_recomputed():
    harness = pressed()
    victim = preempted(harness)
    before = {request: list(request.output_tokens) for request in harness.requests}
    harness.reset(b"1")
    assert victim.status is RequestStatus.PREEMPTED and victim.parked is None
    end_all(harness)
    harness.drain()
    check_after(harness, before)
    assert harness.scheduler.stats().resumed_parked == 0


def test_kv_stored_by_other_weights_is_not_read():
    harness = TierHarness(8, 2, host=HostConfig(16, "through"), storage=True)
    harness.submit(range(10, 19), name="seed")
    harness.drain()
    harness.reset(b"1")
    again = harness.submit(range(10, 19), 2, name="again")
    harness.drain()
    check_after(harness, {again: []})
    assert again.num_storage_hit_tokens == 0
    # KV stored by the new weights is read.
    harness.reset(b"1")
    third = harness.submit(range(10, 19), 2, name="third")
    harness.drain()
    assert third.num_storage_hit_tokens == 8
    check_after(harness, {third: []})


def test_waiting_requests_fetch_kv_stored_by_the_new_weights():
    before = TierHarness(8, 2, host=HostConfig(16, "through"), storage=True)
    before.reset(b"1")
    before.submit(range(10, 19), name="seed")
    before.drain()
    memories = Memories(2, storage=before.memories.storage)
    harness = TierHarness(8, 2, storage=True, memories=memories)
    again = harness.submit(range(10, 19), 2, name="again")
    harness.reset(b"1")
    harness.drain()
    assert again.num_storage_hit_tokens == 8
    check_after(harness, {again: []})


def test_what_a_reset_keeps_is_stored_again_for_the_new_weights():
    kept, lost = make_namespace(adapter="kept"), make_namespace(adapter="lost")
    harness = TierHarness(8, 2, host=HostConfig(16, "through"), storage=True)
    for namespace in (kept, lost):
        harness.add(Request(namespace.hex(), range(10, 19), 1, namespace=namespace))
    harness.drain()
    before = set(harness.memories.storage)
    harness.reset(b"1", [kept])
    harness.drain()
    assert harness.manager.tiers is not None and harness.manager.tiers.storage is not None
    keys = harness.manager.tiers.storage.block_keys(np.arange(10, 18, dtype=np.int32), kept)
    assert set(harness.memories.storage) - before == set(keys) and len(before) == 8


def test_a_prefetch_from_before_a_reset_takes_no_room_on_the_host():
    harness = TierHarness(8, 2, host=HostConfig(6), storage=True)
    harness.copier.fate = held_when(*OpKind)
    waiting = harness.submit(range(10, 19), name="waiting")  # four blocks, of six
    first = waiting.prefetch
    harness.reset(b"1")
    assert waiting.prefetch is not None and waiting.prefetch is not first
    assert harness.scheduler.stats().prefetches_put_off == 0
    end_all(harness)
    harness.drain()


def test_a_namespace_may_be_kept():
    kept, lost = make_namespace(adapter="kept"), make_namespace(adapter="lost")
    harness = Harness()
    for namespace in (kept, lost):
        harness.add(Request(namespace.hex(), range(8), 1, namespace=namespace))
    harness.run()
    harness.scheduler.reset_cache([kept])
    hits = []
    for namespace in (kept, lost):
        request = Request("again", range(8), 1, namespace=namespace)
        harness.scheduler.add(request)
        plan = harness.scheduler.schedule()
        harness.scheduler.update(plan, [0])
        hits.append(request.num_hit_tokens)
    assert hits == [7, 0]


def test_without_tiers_a_reset_preempts_and_recomputes():
    harness = Harness(token_budget=8)
    first = harness.submit(range(6), 4, name="first")
    second = harness.submit(range(20, 40), 2, name="second")
    for _ in range(2):
        harness.step()
    harness.scheduler.reset_cache()
    assert harness.scheduler.waiting == (first, second)
    assert harness.manager.available == harness.manager.num_blocks
    stats = harness.scheduler.stats()
    assert (stats.preemptions, stats.admitted) == (2, 2)
    plan = harness.scheduler.schedule()
    assert chunks(plan)[0] == ("first", 0, 8)


def test_a_reset_within_a_step_is_refused():
    harness = Harness()
    harness.submit([1, 2], 3)

    def reset(plan):
        text = re.escape("reset_cache was called before update")
        with pytest.raises(StepOrderError, match=f"^{text}$"):
            harness.scheduler.reset_cache()

    harness.step(during=reset)
    harness.drain()


def test_one_namespace_to_keep_in_place_of_several_is_refused_and_changes_nothing():
    harness = Harness()
    request = harness.submit([1, 2], 3)
    harness.step()
    tenant: Any = b"a tenant"
    with pytest.raises(NamespaceError, match=r"^keep must be a list of namespaces, each of "):
        harness.scheduler.reset_cache(tenant)
    assert (harness.scheduler.running, harness.manager.epoch) == ((request,), 0)
    harness.drain()
