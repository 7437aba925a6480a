"""Aborts in the mixed scheduler: in every state, and during a step."""

import pytest

from radixkv.scheduler.request import RequestStatus
from radixkv.scheduler.step_plan import StepPlan

from .harness import Harness, pressed


def test_abort_of_a_waiting_request():
    harness = Harness(max_running=1)
    harness.submit([1], 3)
    waiting = harness.submit([2], 3)
    harness.step()
    assert harness.abort(waiting)
    assert not harness.abort(waiting)
    harness.drain()
    assert waiting.output_tokens == []
    assert harness.scheduler.stats().admitted == 1


def test_an_aborted_request_that_waited_for_blocks_keeps_no_match():
    """A match keeps nodes of the tree alive."""
    harness = Harness(num_blocks=4, token_budget=32)
    harness.submit(range(12), 4)
    waiting = harness.submit(range(20, 30), 4)
    harness.step()
    assert waiting.status is RequestStatus.WAITING and waiting.match is not None
    assert harness.abort(waiting)
    assert waiting.match is None
    harness.drain()


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
def test_abort_of_a_running_request_frees_its_blocks_at_once(num_steps):
    harness = Harness(token_budget=8)
    request = harness.submit(range(14), 9)
    for _ in range(num_steps):
        harness.step()
    assert harness.abort(request)
    stats = harness.manager.stats()
    assert stats.free_blocks + stats.idle_blocks == stats.num_blocks
    assert request.lease is None and not harness.scheduler.has_work
    harness.drain()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_abort_within_a_step_frees_the_blocks_with_its_update(num_steps):
    harness = Harness(token_budget=8)
    request = harness.submit(range(14), 9)
    other = harness.submit([99], 9)
    for _ in range(num_steps):
        harness.step()
    held = []

    def abort(plan: StepPlan) -> None:
        before = harness.manager.stats()
        outputs = list(request.output_tokens)
        harness.abort(request)
        assert harness.manager.stats() == before
        assert request.output_tokens == outputs
        held.append(harness.manager.stats().private_blocks)

    harness.step(during=abort)
    assert request.lease is None
    assert harness.manager.stats().private_blocks < held[0]
    harness.drain()
    assert len(other.output_tokens) == 9


def test_abort_of_a_preempted_request():
    harness = pressed()
    while not harness.scheduler.stats().preemptions:
        harness.step()
    parked = next(r for r in harness.requests if r.status is RequestStatus.PREEMPTED)
    assert harness.abort(parked)
    new = harness.submit([9], name="new")
    harness.drain()
    assert new.finish_reason == "length"
    assert harness.scheduler.stats().resumed == 0


def test_abort_of_a_request_in_the_step_that_preempted_it():
    harness = pressed()
    while not (plan := harness.scheduler.schedule()).preempted:
        harness.scheduler.update(plan, [0] * len(plan.chunks))
    victim = plan.preempted[0]
    assert harness.scheduler.abort(victim.request_id)
    assert harness.scheduler.waiting == ()
    harness.scheduler.update(plan, [0] * len(plan.chunks))
    harness.manager.check()
    assert victim.status is RequestStatus.ABORTED


def test_abort_of_an_ended_or_unknown_request():
    harness = Harness()
    request = harness.submit([1])
    harness.run()
    assert not harness.abort(request)
    assert request.status is RequestStatus.FINISHED and request.finish_reason == "length"
    assert not harness.scheduler.abort("never was")


def test_the_id_of_an_aborted_request_may_be_used_again_within_the_same_step():
    harness = Harness()
    old = harness.submit([1, 2], 5, name="a")

    def replace_it(plan: StepPlan) -> None:
        harness.abort(old)
        harness.submit([3], 2, name="a")

    harness.step(during=replace_it)
    harness.drain()
    assert (old.status, len(old.output_tokens)) == (RequestStatus.ABORTED, 0)
    new = harness.requests[1]
    assert (new.status, len(new.output_tokens)) == (RequestStatus.FINISHED, 2)


def test_the_pool_is_whole_again_when_every_request_is_aborted_within_a_step():
    harness = pressed()
    harness.step()

    def abort_all(plan: StepPlan) -> None:
        for request in harness.requests:
            harness.abort(request)

    harness.step(during=abort_all)
    assert not harness.scheduler.has_work
    harness.drain()
