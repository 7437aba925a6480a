"""Several samples of a prompt in the mixed scheduler: its last block is copied."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.kvcache import CacheManager, HostConfig
from radixkv.scheduler.errors import RequestError
from radixkv.scheduler.mixed import MixedScheduler
from radixkv.scheduler.request import Request
from radixkv.scheduler.step_plan import StepPlan

BLOCK_SIZE = 4


def make(
    num_tokens: int, max_new_tokens: int = 8, host: HostConfig | None = None, **options: Any
) -> tuple[MixedScheduler, Any]:
    """A scheduler with two samples of a prompt."""
    manager = CacheManager(32, BLOCK_SIZE, host=host)
    options = {"token_budget": 32, "max_running": 4, "depth": 2} | options
    scheduler = MixedScheduler(manager, **options)
    prompt = list(range(num_tokens))
    first = Request("first", prompt, max_new_tokens)
    other = Request("other", prompt, 8, sample_of=first)
    scheduler.add(first)
    scheduler.add(other)
    return scheduler, (first, other)


def update(scheduler: MixedScheduler, plan: StepPlan) -> None:
    scheduler.update(plan, [0] * plan.num_chunks)
    scheduler.manager.check()


def admit_other(scheduler: MixedScheduler, other: Request) -> StepPlan:
    """Step until the other sample is planned; the step is in flight."""
    while True:
        plan = scheduler.schedule()
        if other in plan.admitted:
            return plan
        update(scheduler, plan)


@pytest.mark.parametrize(
    ("num_tokens", "copied", "start"),
    [(4, 0, 3), (5, 0, 4), (6, 2, 5), (7, 3, 6), (8, 0, 7), (9, 0, 8), (10, 2, 9)],
)
@pytest.mark.parametrize("host", [None, HostConfig(8)])
def test_a_sample_computes_the_last_token_alone(num_tokens, copied, start, host):
    scheduler, (first, other) = make(num_tokens, host=host)
    plan = admit_other(scheduler, other)
    [chunk] = plan.prefill
    assert (chunk.request, chunk.start, chunk.length) == (other, start, 1)
    place = num_tokens // BLOCK_SIZE
    expected = []
    if copied:
        blocks = (request.lease.block_table.item(place) for request in (first, other))
        expected = [(first, *blocks)]
    assert plan.copies == expected
    assert (other.num_hit_tokens, other.num_host_hit_tokens) == (start, 0)
    update(scheduler, plan)
    assert scheduler.stats().hit_tokens == num_tokens - 1
    assert scheduler.stats().host_hit_tokens == 0
    assert scheduler.stats().prefill_tokens == num_tokens + 1


def test_samples_of_a_short_prompt_begin_together():
    scheduler, (first, other) = make(3)
    plan = scheduler.schedule()
    assert plan.admitted == [first, other] and plan.copies == []
    assert [chunk.length for chunk in plan.prefill] == [3, 3]


def test_without_a_prefix_cache_nothing_is_copied():
    scheduler, (_, other) = make(6, prefix_cache=False)
    assert admit_other(scheduler, other).copies == []


@pytest.mark.parametrize("num_tokens", [2, 3, 6])
def test_a_sample_that_wants_records_of_its_prompt_computes_all_of_it(num_tokens):
    scheduler, (first, _) = make(num_tokens)
    admit_other(scheduler, first)
    update(scheduler, scheduler._batch.in_flight[0])
    scheduler.abort("other")
    other = Request("records", first.prompt, 8, sample_of=first, prompt_logprobs=0)
    scheduler.add(other)
    plan = admit_other(scheduler, other)
    [chunk] = plan.prefill
    assert (chunk.request, chunk.start, chunk.length) == (other, 0, num_tokens)
    assert plan.copies == []


def test_a_sample_of_a_request_that_has_ended_computes_the_last_block():
    scheduler, (_, other) = make(6, max_new_tokens=1)
    plan = admit_other(scheduler, other)
    assert plan.copies == []
    assert [(chunk.start, chunk.length) for chunk in plan.prefill] == [(4, 2)]


@pytest.mark.parametrize("reason", ["abort", "length"])
def test_a_block_is_kept_until_it_is_copied(reason):
    scheduler, (first, other) = make(6, max_new_tokens=3 if reason == "length" else 8)
    update(scheduler, scheduler.schedule())
    if reason == "length":
        scheduler.abort("other")
        plans = [scheduler.schedule(), scheduler.schedule()]
        update(scheduler, plans[0])  # the first one's last token is in flight
        other = Request("again", first.prompt, 8, sample_of=first)
        scheduler.add(other)
        copying = scheduler.schedule()
        update(scheduler, plans[1])
    else:
        copying = scheduler.schedule()
        scheduler.abort("first")
    assert [copy.owner for copy in copying.copies] == [first]
    assert first.finish_reason == reason
    assert first.lease is not None and first.is_in_flight
    assert copying.copies[0].source in first.lease.block_table.tolist()
    update(scheduler, copying)
    assert first.lease is None and not first.is_in_flight
    scheduler.abort(other.request_id)
    while scheduler._batch.in_flight:
        update(scheduler, scheduler._batch.in_flight[0])
    stats = scheduler.manager.stats()
    assert stats.private_blocks == stats.live_leases == 0


@pytest.mark.parametrize(("prompt", "namespace"), [([1, 2, 4], b""), ([1, 2, 3], b"a"), ([1], b"")])
def test_a_sample_of_another_prompt(prompt, namespace):
    first = Request("a", [1, 2, 3], 1)
    with pytest.raises(RequestError) as caught:
        Request("b", prompt, 1, namespace=namespace, sample_of=first)
    message = "request 'b' is a sample of 'a', which has another prompt or namespace"
    assert str(caught.value) == message
