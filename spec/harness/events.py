"""Two consumers of a manager's KV events, for its worlds: one sees all of them, one misses some."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from ..model.events import Batch, Consumer, Hash, Prefix, Receiver, Stored
from ..rules.events import K1, K2, K7, K8, K9
from ..rules.rule import require


class Source(Protocol):
    """A manager that reports KV events."""

    def kv_events(self) -> Sequence[Batch]:
        """Return the batches since the last call."""

    def replay(self, seq: int) -> Sequence[Batch]:
        """Return the batches from number seq on again."""


class Consumers:
    """Consumers of one manager.

    The second one misses every other batch. It learns that by the number of the next one, asks for
    a replay, and must then have what the first one has.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.all = Receiver(Consumer())
        self.some = Receiver(Consumer())
        self._misses = False
        self._hash_of: dict[Prefix, Hash] = {}

    def check(self, found: Mapping[str, Collection[Prefix]]) -> None:
        """Apply the new events, and compare with what can be found.

        Args:
            found: by tier, the prefixes that can be found there.
        """
        for batch in self._source.kv_events():
            wanted = self.all.next_seq
            require(batch.seq == wanted, K7, "batch {} comes, not batch {}", batch.seq, wanted)
            self.all.receive(batch)
            self._check_names(batch)
            self._misses = not self._misses
            if not self._misses:
                self._catch_up(batch)
        for medium, prefixes in found.items():
            has, can = self.all.consumer.prefixes(medium), set(prefixes)
            extra, lost = sorted(has - can), sorted(can - has)
            require(not extra, K1, "the events leave in {} what cannot be found: {}", medium, extra)
            require(not lost, K1, "the events lack what {} has: {}", medium, lost)

    def _check_names(self, batch: Batch) -> None:
        """Check that each prefix has the hash that it always had."""
        for event in batch.events:
            for name in event.hashes if isinstance(event, Stored) else ():
                prefix = self.all.consumer.prefix(name)
                known = prefix is None or self._hash_of.setdefault(prefix, name) == name
                require(known, K2, "{} has the hash {}, and had another", prefix, name)

    def _catch_up(self, batch: Batch) -> None:
        """Receive a batch after one that was missed."""
        missing = self.some.missing_before(batch.seq)
        again = [each for each in self._source.replay(missing.start) if each.seq <= batch.seq]
        numbers, wanted = [each.seq for each in again], [*missing, batch.seq]
        require(numbers == wanted, K8, "a replay has batches {}, not {}", numbers, wanted)
        for each in again:
            self.some.receive(each)
        same = self.some.consumer.held == self.all.consumer.held
        require(same, K8, "a consumer that had a replay has {}, the other {}",
                self.some.consumer.held, self.all.consumer.held)  # fmt: skip


def check_index(
    index: Mapping[str, Collection[Hash]],
    num_blocks: Mapping[str, int],
    found: Mapping[str, Collection[Hash]],
) -> None:
    """Compare a router's index of a node with the node's manager, when no message is in flight.

    Args:
        index: by tier, the blocks that the index has.
        num_blocks: by tier, the number of blocks that can be found there.
        found: by tier, blocks that were found there.
    """
    for medium, number in num_blocks.items():
        held = index.get(medium, ())
        require(len(held) == number, K9, "{} has {} blocks, the index {}",
                medium, number, len(held))  # fmt: skip
        lost = [name for name in found.get(medium, ()) if name not in held]
        require(not lost, K9, "{} has blocks that the index lacks: {}", medium, lost)
