"""Transports between two processes, one of which is stopped, continued or killed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from radixkv.scheduler.nodes.transport import (
    Fault,
    Offered,
    PullFailed,
    PullInfo,
    Received,
    Withdrawn,
    describe,
)
from radixkv.scheduler.nodes.transport.descriptors import is_ready
from radixkv.scheduler.nodes.transport.jax_engine import JaxEngine, JaxPull
from radixkv.scheduler.nodes.transport.nixl_engine import NixlEngine, NixlPull
from radixkv.scheduler.nodes.transport.staging import Slot, StagingPool
from radixkv.scheduler.nodes.transport.threaded import ThreadedTransport
from radixkv.scheduler.nodes.transport.transfer_engine import TransferEngine

from .conformance import KEY, LATE_S, equal, offer, part_id, wait
from .peer import STAGING_BYTES, Peer, content, packet_of

SOON_S = 1.0
MIB = 1 << 20
BIG = (48, 2 * MIB)
"""Number of arrays of a slow part, and the bytes of each."""
SMALL = (4, 64 << 10)


class Node(NamedTuple):
    """A node in this process, and its peer in the other."""

    transport: ThreadedTransport
    engine: TransferEngine
    peer: Peer

    def begin(self, info: PullInfo, timeout_s: float) -> None:
        self.transport.pull(info.part_id, info, info.descriptor, timeout_s=timeout_s)

    def receives(self, part: int, size: tuple[int, int]) -> None:
        """Pull a new part, and compare it with the offer."""
        info = self.peer.offer(part, *size)
        self.begin(info, LATE_S)
        assert equal(wait(self.transport, Received).arrays, content(part, *size))
        self.transport.release(info.part_id)

    def fails(self, info: PullInfo) -> Fault:
        """Pull a part that must fail, and return the fault."""
        self.begin(info, SOON_S)
        failed = wait(self.transport, PullFailed)
        assert (failed.part_id, self.transport.stats().pulls) == (info.part_id, 0)
        return failed.fault

    def stop_midway(self) -> PullInfo:
        """Stop the peer while it sends a part; return the part, whose deadline is far away.

        If more than half has arrived, the rest may be in flight; then another part is tried.
        """
        for part in range(100, 200):
            info = self.peer.offer(part, *BIG)
            if isinstance(self.engine, NixlEngine):
                self.engine._pool.memory[:] = 0  # what arrives has no 0
            begun_at = time.monotonic()
            self.begin(info, LATE_S)
            while not self._arrived(info):
                assert time.monotonic() - begun_at < LATE_S
            self.peer.stop()
            if self._arrived(info) < 0.5:
                return info
            self.peer.resume()
            wait(self.transport, Received)
            self.transport.release(info.part_id)
            assert self.peer.ask("withdraw") == "Withdrawn"
        raise AssertionError("every part came at once")

    def reach_deadline(self, info: PullInfo) -> None:
        """Move the deadline of a pull into the past."""
        self.transport._table._pulls[info.part_id].deadline = 0.0

    def _arrived(self, info: PullInfo) -> float:
        """Fraction of a part that has visibly arrived."""
        pull = self.transport._table._pulls.get(info.part_id)
        match pull.running if pull is not None else None:
            case JaxPull() as running:
                return sum(is_ready(array) for array in running.arrays) / BIG[0]
            case NixlPull() as running:
                pool = running._engine._pool.memory
                return float(
                    pool[running.slot.start : sum(running.slot) : 1 << 14].astype(bool).mean()
                )
        return float(bool(self.transport._table._received))


@contextmanager
def opened(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    name, _, tcp = name.partition(" over ")
    environment = {"UCX_TLS": tcp} if tcp else {}
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    peer = Peer(name, environment)
    engine = new_engine(name)
    transport = ThreadedTransport(engine)
    try:
        yield Node(transport, engine, peer)
    finally:
        peer.kill()
        transport.close()


def new_engine(name: str) -> TransferEngine:
    return JaxEngine() if name == "jax" else NixlEngine(STAGING_BYTES)


@pytest.fixture(params=["jax", "nixl over tcp", "nixl"])
def node(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    with opened(request.param, monkeypatch) as node:
        yield node


@pytest.fixture(params=["jax", "nixl over tcp"])
def slow_node(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """Without NIXL over shared memory, which can read the memory of a stopped process."""
    with opened(request.param, monkeypatch) as node:
        yield node


@pytest.mark.slow
def test_parts_come_from_another_process_until_it_is_killed(node: Node) -> None:
    node.receives(0, SMALL)
    node.receives(1, BIG)
    left = node.peer.offer(2, *SMALL)
    node.peer.kill()
    assert node.fails(left) in (Fault.PEER_LOST, Fault.TIMED_OUT)


def test_a_peer_that_stops_midway_costs_only_a_pull(slow_node: Node) -> None:
    node = slow_node
    node.reach_deadline(node.stop_midway())
    assert wait(node.transport, PullFailed).fault is Fault.TIMED_OUT
    # What comes meanwhile from elsewhere lies where the late bytes do not go.
    with_other = ThreadedTransport(new_engine(node.engine.name))
    elsewhere = offer(with_other, part=5)
    node.begin(elsewhere, LATE_S)
    kept = wait(node.transport, Received).arrays
    before = [np.array(array) for array in kept]
    late = quarantined(node)
    node.peer.resume()
    await_no_quarantine(node)
    assert equal(kept, before)
    if late is not None:
        pool, slot, memory = late
        assert not np.array_equal(pool.memory[slot.start : sum(slot)], memory), "no late bytes"
    node.transport.release(elsewhere.part_id)
    with_other.close()
    # JAX's server may serve nobody from then on; a peer that withdraws an offer finds that out.
    assert node.peer.ask("withdraw") == "Withdrawn"
    node.receives(6, SMALL)


def quarantined(node: Node) -> tuple[StagingPool, Slot, npt.NDArray[np.uint8]] | None:
    """The quarantined slot and its content; None if the engine has no staging memory."""
    if not isinstance(node.engine, NixlEngine):
        return None
    assert node.transport.stats().quarantined_bytes == BIG[0] * BIG[1]
    (pull,) = node.engine._quarantine
    pool = node.engine._pool
    assert pool.allocate(BIG[0] * BIG[1]) is None, "the slot was given to another"
    return pool, pull.slot, pool.memory[pull.slot.start : sum(pull.slot)].copy()


def await_no_quarantine(node: Node) -> None:
    end = time.monotonic() + LATE_S
    while node.transport.stats().quarantined_bytes:
        assert time.monotonic() < end, "the quarantine has no end"
        time.sleep(1e-3)


def test_a_peer_that_is_killed_midway_is_noticed(slow_node: Node) -> None:
    node = slow_node
    node.stop_midway()
    node.peer.kill()
    failed = wait(node.transport, PullFailed)
    assert failed.fault is Fault.PEER_LOST, failed  # so it did not wait for the deadline
    await_no_quarantine(node)


def test_a_reader_that_stops_or_dies_leaves_its_peer_working(slow_node: Node) -> None:
    node, transport = slow_node, slow_node.transport
    arrays = content(0, *BIG)
    transport.offer(part_id(), arrays, describe(arrays, num_blocks=1), ttl_s=LATE_S)
    info = wait(transport, Offered).info
    assert node.peer.ask(f"pull {packet_of(info)}") == "begun"
    node.peer.stop()
    transport.withdraw(KEY)
    assert wait(transport, Withdrawn).key == KEY
    assert transport.stats().offers == 0
    node.peer.kill()
    again = offer(transport, part=1)
    node.begin(again, LATE_S)
    wait(transport, Received)
