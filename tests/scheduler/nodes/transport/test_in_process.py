"""The transport of nodes in one process."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest

from radixkv.scheduler.nodes.transport import (
    Fault,
    InProcessExchange,
    InProcessTransport,
    Offered,
    PullFailed,
    Received,
    describe,
    in_process,
)

from .conformance import KEY, LATE_S, Pair, TransportConformance, arrays, offer, part_id, wait


@pytest.fixture
def pair() -> Pair:
    exchange = InProcessExchange()
    return Pair(InProcessTransport(exchange), InProcessTransport(exchange))


class TestInProcess(TransportConformance):
    pass


def test_jax_arrays_are_handed_over_as_they_are(pair: Pair) -> None:
    offered = arrays()
    pair.prefill.offer(part_id(), offered, describe(offered, num_blocks=3), ttl_s=1e9)
    info = wait(pair.prefill, Offered).info
    pair.decode.pull(part_id(), info, info.descriptor, timeout_s=LATE_S)
    received = wait(pair.decode, Received).arrays
    assert all(one is other for one, other in zip(received, offered, strict=True))


def test_a_pulled_part_outlives_the_offer(pair: Pair) -> None:
    info = offer(pair.prefill)
    pair.decode.pull(part_id(), info, info.descriptor, timeout_s=LATE_S)
    pair.prefill.close()
    assert isinstance(wait(pair.decode, Received).arrays[0], jax.Array)


def test_an_offer_that_was_withdrawn_before_it_was_polled_is_not_reported(pair: Pair) -> None:
    offered = arrays()
    pair.prefill.offer(part_id(), offered, describe(offered, num_blocks=3), ttl_s=1e9)
    pair.prefill.withdraw(KEY)
    assert [type(event).__name__ for event in pair.prefill.poll()] == ["Withdrawn"]


def test_a_closed_node_serves_nothing(pair: Pair) -> None:
    infos = [offer(pair.prefill, part) for part in range(2)]
    pair.prefill.close()
    assert pair.prefill.stats().offers == 0
    for info in infos:
        pair.decode.pull(info.part_id, info, info.descriptor, timeout_s=LATE_S)
        assert wait(pair.decode, PullFailed).fault is Fault.EXPIRED


def test_another_exchange_serves_nothing(pair: Pair) -> None:
    info = offer(pair.prefill)
    stranger = InProcessTransport(InProcessExchange())
    stranger.pull(part_id(), info, info.descriptor, timeout_s=LATE_S)
    failed = wait(stranger, PullFailed)
    assert failed.fault is Fault.EXPIRED
    assert failed.reason == "the part is not offered"


def test_each_offer_expires_when_its_time_is_over(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(in_process, "time", clock)
    for part, ttl_s in enumerate((2.0, 3.0, 2.0, 9.0)):
        offer(pair.prefill, part, ttl_s=ttl_s)
    for clock.now, num_expired in ((101.9, 0), (102.0, 2), (102.9, 2), (103.0, 3)):
        assert pair.prefill.poll() == []
        stats = pair.prefill.stats()
        assert (stats.offers, stats.offers_expired) == (4 - num_expired, num_expired)
