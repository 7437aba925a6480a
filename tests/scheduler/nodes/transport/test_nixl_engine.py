"""NixlEngine: reads between two agents."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event, current_thread

import numpy as np
import pytest

from radixkv.kvcache.cleanup import give_back
from radixkv.scheduler.nodes.transport import (
    Fault,
    Offered,
    OfferFailed,
    PullFailed,
    Received,
    Withdrawn,
    describe,
    nixl_agent,
    nixl_engine,
    transfer_table,
)
from radixkv.scheduler.nodes.transport.descriptors import make_digest_key
from radixkv.scheduler.nodes.transport.nixl_agent import NixlAgent
from radixkv.scheduler.nodes.transport.nixl_engine import NixlEngine, NixlOffer
from radixkv.scheduler.nodes.transport.threaded import ThreadedTransport

from ....costs.fake_libraries import nixl_engines
from .conformance import KEY, LATE_S, EngineConformance, Pair, arrays, equal, offer, part_id, wait

STAGING_BYTES = 1 << 20


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """Two agents with one read per array, so that both threads read."""
    monkeypatch.setattr(nixl_engine, "_READ_BYTES", 1)
    ends = Pair(*[ThreadedTransport(NixlEngine(STAGING_BYTES)) for _ in range(2)])
    yield ends
    for end in ends:
        end.close()


class TestNixl(EngineConformance):
    withdrawn_fault = Fault.CORRUPT


def test_a_prompt_may_be_larger_than_staging_memory(pair: Pair) -> None:
    """P frees the parts that D has read, long before the prompt is withdrawn."""
    size, num_parts = STAGING_BYTES // 3, 12
    for part in range(num_parts):
        offered = [np.full(size, part, np.uint8)]
        pair.prefill.offer(part_id(part), offered, describe(offered, num_blocks=1), ttl_s=LATE_S)
    num_received = 0
    while num_received < num_parts:
        for event in pair.prefill.poll():
            assert isinstance(event, Offered), event
            pair.decode.pull(event.part_id, event.info, event.info.descriptor, timeout_s=LATE_S)
        for event in pair.decode.poll():
            assert isinstance(event, Received), event
            assert (np.asarray(event.arrays[0]) == event.part_id.part).all()
            pair.decode.release(event.part_id)
            num_received += 1
    pair.prefill.withdraw(KEY, was_read=True)
    assert wait(pair.prefill, Withdrawn).key == KEY
    assert pair.prefill.stats().offers == 0


def test_a_part_that_is_larger_than_staging_memory_is_refused(pair: Pair) -> None:
    offered = [np.zeros(STAGING_BYTES + 1, np.uint8)]
    described = describe(offered, num_blocks=1)
    pair.prefill.offer(part_id(), offered, described, ttl_s=LATE_S)
    failed = wait(pair.prefill, OfferFailed)
    reason = "it has 1048577 bytes, and staging memory has 1048576 (staging_bytes)"
    assert (failed.part_id, failed.reason) == (part_id(), reason)


def test_a_part_that_cannot_be_digested_gives_its_staging_memory_back(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no room")

    offered = [np.zeros(STAGING_BYTES, np.uint8)]
    described = describe(offered, num_blocks=1)
    with monkeypatch.context() as context:
        context.setattr(transfer_table, "digest_arrays", fail)
        pair.prefill.offer(part_id(), offered, described, ttl_s=LATE_S)
        failed = wait(pair.prefill, OfferFailed)
    assert (failed.part_id, failed.reason) == (part_id(), "MemoryError: no room")
    pair.prefill.offer(part_id(1), offered, described, ttl_s=LATE_S)
    assert wait(pair.prefill, Offered).part_id == part_id(1)
    pair.prefill.withdraw(KEY)
    assert wait(pair.prefill, Withdrawn).key == KEY
    assert pair.prefill.stats().offers == 0


def test_a_part_that_is_larger_than_d_s_staging_memory_is_not_pulled(pair: Pair) -> None:
    info = offer(pair.prefill)
    small = ThreadedTransport(NixlEngine(4096))
    small.pull(part_id(), info, info.descriptor, timeout_s=LATE_S)
    failed = wait(small, PullFailed)
    num_bytes = sum(array.nbytes for array in arrays())
    reason = f"it has {num_bytes} bytes, and staging memory has 4096 (staging_bytes)"
    assert (failed.fault, failed.reason) == (Fault.TOO_LARGE, reason)
    small.close()


def test_a_cancelled_pull_stays_quarantined_while_the_helper_reads(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other parts are read meanwhile; the slot is free only after the helper's read."""
    is_reading, may_go_on, post = Event(), Event(), NixlAgent.post
    is_first = iter([True])  # the helper begins after a read of the transport's thread

    def post_as_shared_memory_does(agent: NixlAgent, handle: object, peer: str = "") -> bool:
        if current_thread().name.startswith("radixkv-helper"):
            is_reading.set()
            assert may_go_on.wait(LATE_S)
        elif not next(is_first, False):
            assert is_reading.wait(LATE_S)
        is_running = post(agent, handle, peer)
        while is_running:
            is_running = agent.is_running(handle)
        return False

    info, other = offer(pair.prefill), offer(pair.prefill, part=1, seed=1)
    monkeypatch.setattr(NixlAgent, "post", post_as_shared_memory_does)
    pair.decode.pull(part_id(), info, info.descriptor, timeout_s=LATE_S)
    assert is_reading.wait(LATE_S)
    pair.decode.cancel(part_id())
    assert wait(pair.decode, PullFailed).fault is Fault.CANCELLED
    pair.decode.pull(part_id(1), other, other.descriptor, timeout_s=LATE_S)
    assert equal(wait(pair.decode, Received).arrays, arrays(seed=1))
    assert pair.decode.stats().quarantined_bytes == info.descriptor.num_bytes
    may_go_on.set()
    while pair.decode.stats().quarantined_bytes:
        assert pair.decode.poll() == []


def test_only_a_part_that_was_read_is_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """P gives the memory of a confirmed part to others."""
    confirmed: list[bytes] = []
    monkeypatch.setattr(NixlAgent, "notify", lambda self, peer, text: confirmed.append(text))
    p, d = NixlEngine(STAGING_BYTES), NixlEngine(STAGING_BYTES)
    given = [np.arange(3 * STAGING_BYTES // 4, dtype=np.uint8)]  # then less than half is free
    described, key = describe(given, num_blocks=1), make_digest_key()
    offered = p.offer(given)
    assert offered is not None
    given_up = d.pull(offered.route, described, key)
    assert given_up is not None and d.pull(offered.route, described, key) is None
    given_up.abandon()
    d.maintain()
    assert (d.quarantined_bytes, confirmed) == (0, [])
    pull = d.pull(offered.route, described, key)
    assert pull is not None
    while not pull.advance():
        p.maintain()
    assert equal(pull.arrays, given) and not confirmed
    pull.free()
    assert len(confirmed) == 1
    offered.withdraw(was_read=True)
    give_back(p.close, d.close)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_part_that_cannot_be_copied_takes_no_memory(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def fail(*_: object) -> None:
        raise error

    engine = NixlEngine(STAGING_BYTES)
    with monkeypatch.context() as context:
        context.setattr(engine._pool, "write", fail)
        with pytest.raises(error):
            engine.offer(arrays())
    assert engine._pool.num_free_bytes == STAGING_BYTES
    give_back(engine.close)


def read_one(p: NixlEngine, d: NixlEngine, num_bytes: int = 64) -> NixlOffer:
    """Offer a part, and read it completely."""
    given = [np.zeros(num_bytes, np.uint8)]
    offer = p.offer(given)
    assert offer is not None
    pull = d.pull(offer.route, describe(given, num_blocks=1), make_digest_key())
    assert pull is not None and pull.advance() == 1
    pull.free()
    p.maintain()
    return offer


def test_a_read_is_confirmed_only_when_less_than_half_of_the_memory_is_free() -> None:
    with nixl_engines(2, 1024) as (_, (p, d)):
        offers = [read_one(p, d, num_bytes) for num_bytes in (448, 64, 64, 64)]
        assert [each.was_read() for each in offers] == [False, False, True, True]
        for each in offers[:2]:
            each.withdraw(was_read=True)
        assert not read_one(p, d).was_read()
        assert [each.was_read() for each in offers[2:]] == [True, True]


def test_the_peer_that_was_read_least_recently_is_forgotten_and_never_one_that_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nixl_agent, "_MAX_PEERS", 2)
    with nixl_engines(5, 1024) as (_, (d, *peers)):
        known: list[bytes] = [each._agent.metadata for each in peers]
        for number in (0, 1, 0, 2):
            read_one(peers[number], d)
        assert list(d._agent._peers) == [known[0], known[2]]
        offered = peers[0].offer([np.zeros(64, np.uint8)])
        assert offered is not None
        described = describe([np.zeros(64, np.uint8)], num_blocks=1)
        pull = d.pull(offered.route, described, make_digest_key())
        assert pull is not None
        for number in (2, 3):
            read_one(peers[number], d)
        assert list(d._agent._peers) == [known[0], known[3]]
        assert pull.advance() == 1
        pull.free()
        for number in (1, 2):
            read_one(peers[number], d)
        assert list(d._agent._peers) == [known[1], known[2]]


def test_maintenance_is_frequent_while_parts_are_offered_or_may_still_be_written() -> None:
    with nixl_engines(2, 1024) as (nixl, (p, d)):
        idle_s = p.maintain_every_s
        given = [np.zeros(64, np.uint8)]
        offers = [p.offer(given) for _ in range(2)]
        assert p.maintain_every_s < idle_s == d.maintain_every_s
        for each in offers:
            assert each is not None and p.maintain_every_s < idle_s
            nixl.lost.add(p._agent.address + each._slot.start)
            pull = d.pull(each.route, describe(given, num_blocks=1), make_digest_key())
            assert pull is not None and pull.advance() == 0
            pull.abandon()
            each.withdraw(was_read=False)
        assert p.maintain_every_s == idle_s > d.maintain_every_s
        nixl.lost.clear()
        d.maintain()
        assert d.maintain_every_s == idle_s and d.quarantined_bytes == 0
