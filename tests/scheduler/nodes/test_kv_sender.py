"""KVSender: copies up to a limit, and the rest later."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.scheduler.handoff import AttemptKey, Header, Offer, PartId, Send, Withdraw
from radixkv.scheduler.nodes.kv_sender import KVSender
from radixkv.scheduler.nodes.transport import (
    ArraySpec,
    Descriptor,
    InProcessExchange,
    InProcessTransport,
    Offered,
    PayloadArray,
    Withdrawn,
)

BLOCK_BYTES = 10
MAX_BYTES = 6 * BLOCK_BYTES


class Blocks:
    """Gathers blocks whose content is their id."""

    def describe(self, num_blocks: int, group: int, num_groups: int) -> Descriptor:
        return Descriptor(
            (ArraySpec((num_blocks, BLOCK_BYTES), "uint8"),), num_blocks, 0, bytes(16)
        )

    def read(self, blocks: Sequence[int], group: int, num_groups: int) -> Sequence[PayloadArray]:
        return [np.repeat(np.array(blocks, np.uint8)[:, None], BLOCK_BYTES, axis=1)]


class Node:
    """A KVSender with its transport, and the parts that were sent."""

    def __init__(self, copies_offers: bool = False) -> None:
        self.transport = InProcessTransport(InProcessExchange())
        self.transport.copies_offers = copies_offers
        self.sender = KVSender(Blocks(), self.transport, max_bytes=MAX_BYTES)
        self.sent: list[tuple[str, int]] = []  # whose, and which part

    def offer(self, name: str, part: int, blocks: Iterable[int]) -> None:
        part_id = PartId(AttemptKey(name, 1), 1, 1, 1, part)
        blocks = tuple(blocks)
        self.sender.offer(Offer("d0", part_id, blocks, 0))
        send = Send(Header(part_id.key, 1, 1, 1), part, 0, len(blocks), 0)
        assert self.sender.send("d0", send) == []
        self.run()

    def withdraw(self, name: str) -> None:
        self.sender.withdraw(Withdraw(AttemptKey(name, 1), was_read=True))
        self.run()

    def run(self) -> None:
        while events := self.transport.poll():
            for event in events:
                match event:
                    case Offered():
                        (message,) = self.sender.offered(event)
                        assert message.pull_info is event.info
                        self.sent.append((event.part_id.key.request_id, event.part_id.part))
                    case Withdrawn(key):
                        self.sender.withdrawn(key)


def test_copies_beyond_the_limit_wait_for_withdrawals() -> None:
    node = Node()
    node.offer("a", 0, range(4))
    node.offer("b", 0, range(2))
    node.offer("b", 1, range(3))
    node.offer("c", 0, range(1))  # would fit, but b is before
    assert node.sent == [("a", 0), ("b", 0)]
    assert node.sender.num_bytes == MAX_BYTES
    node.withdraw("a")
    assert node.sent[2:] == [("b", 1), ("c", 0)]
    assert node.sender.num_bytes == 6 * BLOCK_BYTES


def test_the_oldest_attempt_ignores_the_limit() -> None:
    node = Node()
    node.offer("a", 0, range(1))
    node.offer("b", 0, range(5))
    node.offer("b", 1, range(1))
    node.offer("a", 1, range(40))
    assert node.sent == [("a", 0), ("b", 0), ("a", 1)]
    node.withdraw("a")
    assert node.sent[3:] == [("b", 1)]


def test_a_part_withdrawn_while_waiting_is_not_copied() -> None:
    node = Node()
    node.offer("a", 0, range(6))
    node.offer("b", 0, range(6))
    node.withdraw("b")
    node.withdraw("a")
    assert node.sent == [("a", 0)]
    assert node.sender.num_bytes == 0
    assert node.transport.stats().offers == 0
    kept = node.sender._offers, node.sender._waiting_sends, node.sender._copy_bytes
    assert kept == ({}, {}, {}) and node.sender._uncopied == []


@pytest.mark.parametrize("was_read", [False, True])
def test_the_transport_hears_whether_the_offers_were_read(was_read: bool) -> None:
    transport = Mock(copies_offers=False)
    sender = KVSender(Blocks(), transport, max_bytes=MAX_BYTES)
    for _ in range(2):  # also if nothing was offered
        sender.withdraw(Withdraw(AttemptKey("a", 1), was_read=was_read))
        transport.withdraw.assert_called_with(AttemptKey("a", 1), was_read=was_read)


def test_copies_are_freed_when_a_copying_transport_serves_them() -> None:
    node = Node(copies_offers=True)
    for part in range(3):
        node.offer("a", part, range(5))
        node.offer("b", part, range(5))
        assert node.sender.num_bytes == 0
    assert len(node.sent) == 6


@pytest.mark.parametrize("copies_offers", [False, True])
@given(
    moves=st.lists(
        st.tuples(st.sampled_from("abcd"), st.integers(1, 9)) | st.sampled_from("abcd"),
        max_size=40,
    )
)
def test_random_offers_stay_in_the_limit_and_all_are_served(
    copies_offers: bool, moves: list
) -> None:
    node = Node(copies_offers)
    parts: dict[AttemptKey, list[int]] = {}  # blocks of each part, if not withdrawn
    lives = dict.fromkeys("abcd", 0)
    for move in moves:
        if isinstance(move, tuple):
            name, num_blocks = f"{move[0]}{lives[move[0]]}", move[1]
            of = parts.setdefault(AttemptKey(name, 1), [])
            of.append(num_blocks)
            node.offer(name, len(of) - 1, range(num_blocks))
        else:
            name = f"{move}{lives[move]}"
            lives[move] += 1
            parts.pop(AttemptKey(name, 1), None)
            node.withdraw(name)
        # The oldest has all, and the others what fits beside it, without gaps.
        oldest = next(iter(parts), None)
        held = {key: [part for name, part in node.sent if name == key.request_id] for key in parts}
        num_bytes = {
            key: sum(parts[key][part] for part in served) * BLOCK_BYTES * (not copies_offers)
            for key, served in held.items()
        }
        assert node.sender.num_bytes == sum(num_bytes.values())
        if oldest is not None:
            assert held[oldest] == list(range(len(parts[oldest])))
            assert node.sender.num_bytes - num_bytes[oldest] <= MAX_BYTES
        assert all(served == list(range(len(served))) for served in held.values())
    for key in list(parts):
        node.withdraw(key.request_id)
    assert node.sender.num_bytes == 0
    assert node.sender._uncopied == []


@pytest.mark.parametrize("copies_offers", [False, True])
def test_late_copies_have_the_content_of_their_blocks(copies_offers: bool) -> None:
    node = Node(copies_offers)
    node.offer("a", 0, range(6))
    node.offer("b", 0, [7, 9])
    node.withdraw("a")
    part_id = PartId(AttemptKey("b", 1), 1, 1, 1, 0)
    (array,) = node.transport._exchange.offers[part_id]
    assert np.asarray(array)[:, 0].tolist() == [7, 9]
