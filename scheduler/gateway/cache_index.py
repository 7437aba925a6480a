"""The gateway's index of the blocks that a node has, kept up to date by the node's KV events.

::

    node: CacheReporter                      gateway: CacheIndex
      take_in(KV events) ...
      ── CacheUpdate 0, 1, 2 ─────────────►  applies each once, in order
      ── NodeStatus, num_updates ─────────►  an update is missing?
      ◄───────────────── CacheAsk(number) ─
      ── the updates from that number on,
         or a new one with all blocks ────►

The channel may lose any of these messages, and never repeats or reorders them. The index equals the
node's cache as soon as one status, its CacheAsk and the updates that answer it have arrived
(`K9 index-equals-manager`). An index takes memory for the blocks that the node has, and a node for
twice as many, and for the last updates.

Storage is not indexed: all nodes of a deployment share it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import Final

import numpy as np

from ...kvcache import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, ReplayBuffer
from ..handoff.gateway_messages import MAX_UPDATE_BLOCKS, CacheAsk, CacheUpdate

MEDIA: Final = ("GPU", "CPU")
"""Tiers of a node that only its own requests reach."""
_NUM_KEPT: Final = 256


class CacheReporter:
    """A node's end: turns its KV events into updates, and answers the gateway. No I/O.

    Attributes:
        num_updates: number of updates so far, which `NodeStatus` tells the gateway.
    """

    def __init__(self) -> None:
        self.num_updates = 0
        self._held: dict[str, set[int]] = {medium: set() for medium in MEDIA}
        # Whether a tier has each block that changed since the last update.
        self._changed: dict[str, dict[int, bool]] = {medium: {} for medium in MEDIA}
        self._is_first = True
        self._kept: ReplayBuffer[CacheUpdate] = ReplayBuffer(_NUM_KEPT)
        self._messages: list[CacheUpdate] = []

    def take_in(self, batch: EventBatch) -> None:
        """Take the next events of the manager."""
        for event in batch.events:
            match event:
                case BlockStored(medium, hashes) if medium in self._held:
                    self._held[medium].update(hashes)
                    self._changed[medium].update(dict.fromkeys(hashes, True))
                case BlockRemoved(medium, hashes) if medium in self._held:
                    self._held[medium].difference_update(hashes)
                    self._changed[medium].update(dict.fromkeys(hashes, False))
                case AllBlocksCleared():
                    for held in self._held.values():
                        held.clear()
                    self._begin_anew()

    def answer(self, ask: CacheAsk) -> None:
        """Send the updates from a number on again, or all blocks if these are not kept."""
        if ask.number == self.num_updates:
            return  # late: nothing is missing
        kept = self._kept.since(ask.number)
        if kept and kept[0][0] == ask.number:
            self._messages += [update for _, update in kept]
        else:
            self._begin_anew()

    def take_messages(self) -> list[CacheUpdate]:
        """Return the messages to the gateway since the last call, in order."""
        while self._is_first or any(self._changed.values()):
            self._add_update()
        messages, self._messages = self._messages, []
        return messages

    def _begin_anew(self) -> None:
        self._is_first = True
        self._changed = {medium: dict.fromkeys(held, True) for medium, held in self._held.items()}

    def _add_update(self) -> None:
        packed: list[bytes] = []
        room = MAX_UPDATE_BLOCKS
        for changed in self._changed.values():
            part = dict(islice(changed.items(), room))
            room -= len(part)
            for name in part:
                del changed[name]
            for wanted in (True, False):
                packed.append(_pack([name for name, is_held in part.items() if is_held == wanted]))
        update = CacheUpdate(self.num_updates, self._is_first, *packed)
        self._is_first = False
        self._kept.add(self.num_updates, update)
        self.num_updates += 1
        self._messages.append(update)


class CacheIndex:
    """The gateway's end: the blocks of one epoch of a node, by tier.

    Attributes:
        next_number: number of the next update.
        held: hashes of the blocks that each tier has.
    """

    def __init__(self) -> None:
        self.next_number = 0
        self.held: dict[str, set[int]] = {medium: set() for medium in MEDIA}

    def apply(self, update: CacheUpdate) -> bool:
        """Apply the next update; return False if one before it is missing."""
        if update.number < self.next_number:
            return True  # sent again
        if update.number > self.next_number and not update.is_first:
            return False
        if update.is_first:
            self.held = {medium: set() for medium in MEDIA}
        device, host = self.held.values()
        device.update(_unpack(update.device_stored))
        device.difference_update(_unpack(update.device_removed))
        host.update(_unpack(update.host_stored))
        host.difference_update(_unpack(update.host_removed))
        self.next_number = update.number + 1
        return True

    def num_leading(self, hashes: Sequence[int], coming: Collection[int] = ()) -> int:
        """Return how many of the first blocks of a prompt the node has, in any tier.

        Args:
            hashes: hashes of the prompt's blocks.
            coming: hashes of blocks that the node will have soon.
        """
        places: Iterable[Collection[int]] = (*self.held.values(), coming)
        for number, name in enumerate(hashes):
            if not any(name in place for place in places):
                return number
        return len(hashes)


def _pack(hashes: Sequence[int]) -> bytes:
    return np.array(hashes, "<u8").tobytes()


def _unpack(packed: bytes) -> list[int]:
    hashes: list[int] = np.frombuffer(packed, "<u8").tolist()
    return hashes
