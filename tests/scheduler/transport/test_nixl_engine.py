"""Reads of NIXL between two agents."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from radixkv.scheduler.transport import (
    Fault,
    Offered,
    OfferFailed,
    PullFailed,
    Received,
    Withdrawn,
    describe,
)
from radixkv.scheduler.transport.nixl_engine import NixlEngine
from radixkv.scheduler.transport.threaded import ThreadedTransport

from .conformance import KEY, LATE_S, EngineConformance, Pair, arrays, offer, ticket, wait

STAGING_BYTES = 1 << 20


@pytest.fixture
def pair() -> Iterator[Pair]:
    ends = Pair(*[ThreadedTransport(NixlEngine(STAGING_BYTES)) for _ in range(2)])
    yield ends
    for end in ends:
        end.close()


class TestNixl(EngineConformance):
    withdrawn_fault = Fault.CORRUPT


def test_a_prompt_may_be_larger_than_staging_memory(pair: Pair) -> None:
    """What D has read makes room for what waits on P, long before the prompt is withdrawn."""
    size, num_parts = STAGING_BYTES // 3, 12
    for part in range(num_parts):
        offered = [np.full(size, part, np.uint8)]
        pair.prefill.offer(ticket(part), offered, describe(offered, num_blocks=1), ttl_s=LATE_S)
    num_received = 0
    while num_received < num_parts:
        for event in pair.prefill.poll():
            assert isinstance(event, Offered), event
            pair.decode.pull(event.ticket, event.wire, event.wire.descriptor, timeout_s=LATE_S)
        for event in pair.decode.poll():
            assert isinstance(event, Received), event
            assert (np.asarray(event.arrays[0]) == event.ticket.part).all()
            pair.decode.release(event.ticket)
            num_received += 1
    pair.prefill.withdraw(KEY, was_read=True)
    assert wait(pair.prefill, Withdrawn).key == KEY
    assert pair.prefill.stats().offers == 0


def test_a_part_that_is_larger_than_staging_memory_is_refused(pair: Pair) -> None:
    offered = [np.zeros(STAGING_BYTES + 1, np.uint8)]
    described = describe(offered, num_blocks=1)
    pair.prefill.offer(ticket(), offered, described, ttl_s=LATE_S)
    failed = wait(pair.prefill, OfferFailed)
    reason = "it has 1048577 bytes, and staging memory has 1048576 (staging_bytes)"
    assert (failed.ticket, failed.reason) == (ticket(), reason)


def test_a_part_that_is_larger_than_d_s_staging_memory_is_not_pulled(pair: Pair) -> None:
    wire = offer(pair.prefill)
    small = ThreadedTransport(NixlEngine(4096))
    small.pull(ticket(), wire, wire.descriptor, timeout_s=LATE_S)
    failed = wait(small, PullFailed)
    num_bytes = sum(array.nbytes for array in arrays())
    reason = f"it has {num_bytes} bytes, and staging memory has 4096 (staging_bytes)"
    assert (failed.fault, failed.reason) == (Fault.TOO_LARGE, reason)
    small.close()
