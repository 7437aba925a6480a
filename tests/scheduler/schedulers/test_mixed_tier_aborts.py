"""Aborts of requests whose KV is being copied: all blocks are released in the end."""

import pytest

from radixkv.kvcache.tiers.operations import OpKind
from radixkv.scheduler.request import Request, RequestStatus

from .copier import held_when
from .tier_harness import TierHarness, end_all, preempted, pressed


def aborted(harness: TierHarness, request: Request) -> None:
    """Abort a request; it holds nothing at once, and nothing leaks."""
    assert harness.scheduler.abort(request.request_id)
    assert request.lease is None and request.parked is None
    assert request.prefetch is None and request.fetches_after is None
    assert request not in (*harness.scheduler.waiting, *harness.scheduler.running)
    harness.manager.check()
    end_all(harness)
    harness.drain()


def test_abort_of_a_request_being_parked_frees_its_blocks():
    harness = pressed()
    victim = preempted(harness)
    assert victim.parked is not None and not victim.parked.saved
    aborted(harness, victim)
    assert harness.scheduler.stats().resumed == 0


def test_abort_in_the_step_that_preempts_it():
    harness = pressed()
    seen = []

    def abort(plan):
        for request in plan.preempted:
            seen.append(harness.scheduler.abort(request.request_id))

    while not seen:
        harness.step(during=abort)
    end_all(harness)
    harness.drain()
    assert seen == [True]


def test_abort_of_a_parked_request_frees_the_host():
    harness = pressed(storage=True, preempt="storage")
    victim = preempted(harness)
    harness.copier.end(harness.copier.held(OpKind.DEVICE_TO_HOST))
    assert victim.parked is not None and victim.parked.saved
    assert victim.status is RequestStatus.PREEMPTED
    aborted(harness, victim)


@pytest.mark.parametrize("cancelled_twice", [False, True])
def test_abort_of_a_loading_request_keeps_its_blocks_until_the_copy_ends(cancelled_twice):
    """D10: a block that a copy may still write is not reused."""
    harness = pressed(num_blocks=6)
    victim = preempted(harness)
    end_all(harness)
    harness.copier.fate = held_when(OpKind.HOST_TO_DEVICE)
    while victim.lease is None:
        harness.step()
    assert victim.status is RequestStatus.LOADING and victim.lease.loading is not None
    before = harness.manager.available
    harness.scheduler.abort(victim.request_id)
    assert harness.manager.stats().private_blocks > 0
    flight = harness.copier.held(OpKind.HOST_TO_DEVICE)
    harness.copier.dispatch()
    harness.copier.end(flight)
    if cancelled_twice:
        tiers = harness.manager.tiers
        assert tiers is not None and not tiers.fence(flight.operation.id)
    assert harness.manager.available > before
    harness.drain()


@pytest.mark.parametrize("num_steps", range(1, 12))
def test_abort_of_all_at_any_time_leaves_nothing(num_steps):
    for kinds in ((), (OpKind.DEVICE_TO_HOST,), (OpKind.HOST_TO_DEVICE,), tuple(OpKind)):
        harness = pressed(storage=True, preempt="storage")
        harness.copier.fate = held_when(*kinds)
        for _ in range(num_steps):
            harness.step()
        for request in harness.requests:
            harness.scheduler.abort(request.request_id)
        assert not harness.scheduler.has_work
        end_all(harness)
        harness.drain()
