"""Tests that every transport must pass; subclasses provide the fixture `pair`."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from radixkv.scheduler.handoff import AttemptKey, PartId
from radixkv.scheduler.nodes.transport import (
    ArraySpec,
    Event,
    Fault,
    Offered,
    PayloadArray,
    PullFailed,
    PullInfo,
    Received,
    Transport,
    TransportArgumentError,
    TransportClosedError,
    Withdrawn,
    describe,
)
from radixkv.scheduler.nodes.transport.threaded import ThreadedTransport

KEY = AttemptKey("r1", 1)
SOON_S = 0.4
"""Timeout of pulls that must fail."""
LATE_S = 60.0
"""Timeout of everything else, which no test reaches."""

T = TypeVar("T")


class Pair(NamedTuple):
    prefill: Transport
    decode: Transport


def part_id(part: int = 0, key: AttemptKey = KEY) -> PartId:
    return PartId(key, epoch=7, peer_epoch=8, grant=3, part=part)


def arrays(seed: int = 0, num_blocks: int = 3) -> list[jax.Array]:
    """A part like an engine's: K and V of two layers."""
    draw = np.random.default_rng(seed)
    shape = (num_blocks, 2, 8, 16)
    return [jnp.asarray(draw.normal(size=shape), jnp.bfloat16) for _ in range(4)]


def equal(one: Sequence[PayloadArray], other: Sequence[PayloadArray]) -> bool:
    return len(one) == len(other) and all(
        a.dtype == b.dtype and np.array_equal(np.asarray(a), np.asarray(b))
        for a, b in zip(one, other, strict=True)
    )


def wait(transport: Transport, kind: type[T], events: list[Event] | None = None) -> T:
    """Poll until an event of a class; append other events to events."""
    end = time.monotonic() + LATE_S
    while time.monotonic() < end:
        polled = transport.poll()
        found = [event for event in polled if isinstance(event, kind)]
        others = [event for event in polled if not isinstance(event, kind)]
        if events is not None:
            events += others
        else:
            assert others == [], others
        if found:
            assert len(found) == 1, found
            return found[0]
        time.sleep(1e-3)
    raise AssertionError(f"no {kind.__name__}: {transport.stats()}")


def offer(transport: Transport, part: int = 0, seed: int = 0, ttl_s: float = LATE_S) -> PullInfo:
    """Offer a part, and return its PullInfo."""
    offered = jax.block_until_ready(arrays(seed))  # it waits for nothing, however short its life
    transport.offer(part_id(part), offered, describe(offered, num_blocks=3), ttl_s=ttl_s)
    return wait(transport, Offered).info


class TransportConformance:
    """Each test gets two new transports."""

    def test_an_offered_part_is_received(self, pair: Pair) -> None:
        info = offer(pair.prefill)
        pair.decode.pull(part_id(), info, info.descriptor, timeout_s=LATE_S)
        received = wait(pair.decode, Received)
        assert received.part_id == part_id()
        assert equal(received.arrays, arrays())
        pair.decode.release(part_id())
        stats = pair.decode.stats()
        assert (stats.pulls, stats.received, stats.quarantined_bytes) == (0, 0, 0)
        assert stats.parts_received == 1
        assert stats.bytes_received == info.descriptor.num_bytes == 4 * 3 * 2 * 8 * 16 * 2
        pair.prefill.withdraw(KEY, was_read=True)
        assert wait(pair.prefill, Withdrawn).key == KEY
        assert pair.prefill.stats().offers == 0

    def test_many_parts_arrive_each_with_its_own_content(self, pair: Pair) -> None:
        infos = [offer(pair.prefill, part, seed=part) for part in range(6)]
        for info in reversed(infos):
            pair.decode.pull(info.part_id, info, info.descriptor, timeout_s=LATE_S)
        received: dict[int, Received] = {}
        while len(received) < 6:
            for event in pair.decode.poll():
                assert isinstance(event, Received), event
                received[event.part_id.part] = event
                assert equal(event.arrays, arrays(event.part_id.part))
                pair.decode.release(event.part_id)
        assert pair.decode.stats().received == 0

    def test_numpy_arrays_are_offered_as_they_were(self, pair: Pair) -> None:
        offered = [np.arange(24, dtype=np.int32).reshape(2, 3, 4)]
        pair.prefill.offer(part_id(), offered, describe(offered, num_blocks=2), ttl_s=LATE_S)
        info = wait(pair.prefill, Offered).info
        offered[0][:] = -1  # what was offered is a copy by now
        pair.decode.pull(part_id(), info, info.descriptor, timeout_s=LATE_S)
        (array,) = wait(pair.decode, Received).arrays
        assert np.array_equal(np.asarray(array), np.arange(24).reshape(2, 3, 4))

    def test_memory_that_counts_as_free_is_free(self, pair: Pair) -> None:
        """A sender may copy as much again as a transport that copies offers has served."""
        memory = np.zeros(1 << 10, np.uint8)
        start = -memory.ctypes.data % 64  # else JAX would copy it
        offered = [jax.dlpack.from_dlpack(memory[start : start + 512])]
        held = weakref.ref(memory)
        pair.prefill.offer(part_id(), offered, describe(offered, num_blocks=1), ttl_s=LATE_S)
        del offered, memory
        wait(pair.prefill, Offered)
        end = time.monotonic() + LATE_S
        while pair.prefill.copies_offers and held() is not None:
            assert time.monotonic() < end, "it is held until Withdrawn"
            gc.collect()  # JAX may free it late

    @pytest.mark.parametrize(
        ("part", "reason"),
        [
            ("part_id", "the offer is of another part"),
            ("epoch", "the offer is of another part"),
            ("transport", "offered by 'carrier pigeon', but this node uses "),
            ("namespace", "of another namespace or model"),
            ("blocks", "3 blocks of group 0 are offered, 4 of group 0 expected"),
            ("group", "3 blocks of group 0 are offered, 3 of group 1 expected"),
            ("count", "4 arrays, expected 3"),
            ("shape", "array 1 is ArraySpec"),
            ("dtype", "array 1 is ArraySpec"),
            ("order", "array 0 is ArraySpec"),
        ],
    )
    def test_an_unexpected_part_is_not_pulled(self, pair: Pair, part: str, reason: str) -> None:
        info = offer(pair.prefill)
        expected, asked = info.descriptor, part_id()
        specs = expected.arrays
        odd = ArraySpec((3, 2, 16, 8), "bfloat16")
        match part:
            case "part_id":
                asked = part_id(part=1)
            case "epoch":
                asked = part_id()._replace(epoch=6)
            case "transport":
                info = replace(info, transport="carrier pigeon")
            case "namespace":
                expected = replace(expected, namespace_digest=bytes(16))
            case "blocks":
                expected = replace(expected, num_blocks=4)
            case "group":
                expected = replace(expected, group=1)
            case "count":
                expected = replace(expected, arrays=specs[:3])
            case "shape":
                expected = replace(expected, arrays=(specs[0], odd, *specs[2:]))
            case "dtype":  # of the same size
                swapped = specs[1]._replace(dtype="float16")
                expected = replace(expected, arrays=(specs[0], swapped, *specs[2:]))
            case "order":
                info = replace(info, descriptor=replace(expected, arrays=(*specs[:3], odd)))
                expected = replace(expected, arrays=(odd, *specs[:3]))
        before = pair.decode.stats()
        pair.decode.pull(asked, info, expected, timeout_s=LATE_S)
        failed = wait(pair.decode, PullFailed)
        assert (failed.part_id, failed.fault) == (asked, Fault.MISMATCH)
        assert failed.reason.startswith(reason), failed.reason
        assert before.faults == {}, "counts that were read change no more"
        assert pair.decode.stats().faults == {Fault.MISMATCH: 1}

    def test_a_withdrawn_part_is_not_received(self, pair: Pair) -> None:
        info = offer(pair.prefill)
        pair.prefill.withdraw(KEY)
        wait(pair.prefill, Withdrawn)
        assert pair.prefill.stats().offers == 0
        self._is_not_received(pair, info)

    withdrawn_fault = Fault.EXPIRED

    def _is_not_received(self, pair: Pair, info: PullInfo) -> None:
        timeout_s = SOON_S if self.withdrawn_fault is Fault.TIMED_OUT else LATE_S
        pair.decode.pull(part_id(), info, info.descriptor, timeout_s=timeout_s)
        assert wait(pair.decode, PullFailed).fault is self.withdrawn_fault
        assert pair.decode.stats().pulls == 0

    def test_wall_clocks_may_differ_and_jump(
        self, pair: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        true_time, jumps = time.time, cycle([0.0, 7e2, -7e2, 4e4, -4e4, 1e9, -1e9])
        monkeypatch.setattr(time, "time", lambda: true_time() + next(jumps))
        for part in range(4):
            info = offer(pair.prefill, part)
            pair.decode.pull(part_id(part), info, info.descriptor, timeout_s=LATE_S)
            assert equal(wait(pair.decode, Received).arrays, arrays())
            pair.decode.release(part_id(part))
        assert pair.prefill.stats().offers_expired == 0
        pair.prefill.withdraw(KEY, was_read=True)
        wait(pair.prefill, Withdrawn)

    def test_withdrawing_nothing_is_reported(self, pair: Pair) -> None:
        pair.prefill.withdraw(AttemptKey("r2", 5))
        assert wait(pair.prefill, Withdrawn).key == ("r2", 5)

    def test_other_attempts_go_on_when_one_is_withdrawn(self, pair: Pair) -> None:
        """Also if they were offered before, and nobody has heard of that yet."""
        other, offered = part_id(key=AttemptKey("r2", 5)), jax.block_until_ready(arrays(1))
        described = describe(offered, num_blocks=3)
        for asked in (other, part_id()):
            pair.prefill.offer(asked, offered, described, ttl_s=LATE_S)
        pair.prefill.withdraw(KEY)
        events: list[Event] = []
        assert wait(pair.prefill, Withdrawn, events).key == KEY
        served = [each for each in events if isinstance(each, Offered) and each.part_id == other]
        [info] = [each.info for each in served or [wait(pair.prefill, Offered)]]
        assert pair.prefill.stats().offers == 1
        with pytest.raises(TransportArgumentError, match=r"'r2' is already offered$"):
            pair.prefill.offer(other, offered, described, ttl_s=LATE_S)
        pair.decode.pull(other, info, described, timeout_s=LATE_S)
        assert equal(wait(pair.decode, Received).arrays, offered)
        pair.decode.release(other)
        pair.prefill.withdraw(other.key, was_read=True)
        assert wait(pair.prefill, Withdrawn).key == other.key

    def test_an_offer_expires(self, pair: Pair) -> None:
        info = offer(pair.prefill, ttl_s=0.05)
        events: list[Event] = []
        while pair.prefill.stats().offers:
            events += pair.prefill.poll()
        assert events == []
        assert pair.prefill.stats().offers_expired == 1
        self._is_not_received(pair, info)
        pair.prefill.withdraw(KEY)
        wait(pair.prefill, Withdrawn)

    def test_a_cancelled_pull_ends_as_cancelled_and_never_as_received(self, pair: Pair) -> None:
        info = offer(pair.prefill)
        pair.decode.pull(part_id(), info, info.descriptor, timeout_s=LATE_S)
        pair.decode.cancel(part_id())
        assert wait(pair.decode, PullFailed).fault is Fault.CANCELLED
        assert (pair.decode.stats().pulls, pair.decode.stats().received) == (0, 0)
        pair.decode.cancel(part_id())
        assert pair.decode.poll() == []

    def test_a_pull_is_cancelled_even_after_all_arrived(self, pair: Pair) -> None:
        info = offer(pair.prefill)
        pair.decode.pull(part_id(), info, info.descriptor, timeout_s=LATE_S)
        end = time.monotonic() + LATE_S
        while isinstance(pair.decode, ThreadedTransport) and not pair.decode.stats().parts_received:
            assert time.monotonic() < end
            time.sleep(1e-3)
        pair.decode.cancel(part_id())
        assert wait(pair.decode, PullFailed).fault is Fault.CANCELLED
        assert (pair.decode.stats().pulls, pair.decode.stats().received) == (0, 0)
        while isinstance(pair.decode, ThreadedTransport) and pair.decode._table._received:
            assert time.monotonic() < end, "its memory is not freed"
            time.sleep(1e-3)

    def test_the_caller_s_mistakes_are_refused(self, pair: Pair) -> None:
        info = offer(pair.prefill)
        offered = arrays()
        part = "part 0 of attempt 1 of request 'r1'"
        with pytest.raises(TransportArgumentError, match=f"^{part} is already offered$"):
            pair.prefill.offer(part_id(), offered, describe(offered, num_blocks=3), ttl_s=1)
        with pytest.raises(
            TransportArgumentError,
            match=r"^the arrays differ from their descriptor: 4 arrays, expected 3$",
        ):
            described = describe(offered[:3], num_blocks=3)
            pair.prefill.offer(part_id(1), offered, described, ttl_s=1)
        pair.decode.pull(part_id(), info, info.descriptor, timeout_s=LATE_S)
        with pytest.raises(TransportArgumentError, match=f"^{part} is already pulled$"):
            pair.decode.pull(part_id(), info, info.descriptor, timeout_s=LATE_S)
        wait(pair.decode, Received)
        with pytest.raises(TransportArgumentError, match=f"^{part} is already pulled$"):
            pair.decode.pull(part_id(), info, info.descriptor, timeout_s=LATE_S)

    def test_a_closed_transport_refuses(self, pair: Pair) -> None:
        info = offer(pair.prefill)
        offered = arrays()
        for end in pair:
            end.close()
            end.close()
            with pytest.raises(TransportClosedError, match=r"^the transport is closed$"):
                end.offer(part_id(1), offered, info.descriptor, ttl_s=1)
            with pytest.raises(TransportClosedError, match=r"^the transport is closed$"):
                end.withdraw(KEY)
            with pytest.raises(TransportClosedError, match=r"^the transport is closed$"):
                end.pull(part_id(), info, info.descriptor, timeout_s=1)


class EngineConformance(TransportConformance):
    """Tests of transports between processes, which use digests."""

    @pytest.mark.parametrize("seed", [0, 1], ids=["equal", "other"])
    @pytest.mark.parametrize("what", ["digests", "digest_key", "route"])
    def test_what_belongs_to_another_part_is_refused(
        self, pair: Pair, what: str, seed: int
    ) -> None:
        """Unless it is the route of equal bytes, which are as good."""
        info, other = offer(pair.prefill), offer(pair.prefill, part=1, seed=seed)
        forged = replace(info, **{what: getattr(other, what)})
        pair.decode.pull(part_id(), forged, info.descriptor, timeout_s=LATE_S)
        if what == "route" and seed == 0:
            assert equal(wait(pair.decode, Received).arrays, arrays())
            return
        failed = wait(pair.decode, PullFailed)
        assert (failed.fault, failed.reason) == (Fault.CORRUPT, "not the bytes that were offered")

    @pytest.mark.parametrize("change", ["first", "last", "one less", "one more"])
    def test_each_array_must_have_its_digest(self, pair: Pair, change: str) -> None:
        info = offer(pair.prefill)
        digests = list(info.digests)
        match change:
            case "first":
                digests[0] = bytes(16)
            case "last":
                digests[-1] = bytes(16)
            case "one less":
                del digests[-1]
            case "one more":
                digests.append(bytes(16))
        forged = replace(info, digests=tuple(digests))
        pair.decode.pull(part_id(), forged, info.descriptor, timeout_s=LATE_S)
        failed = wait(pair.decode, PullFailed)
        assert (failed.fault, failed.reason) == (Fault.CORRUPT, "not the bytes that were offered")
