"""Check of a stream of KV events of any engine, by the rules of the specification."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from ...spec.model.events import Batch, Consumer, Event, Receiver
from ...spec.model.events import Cleared as SpecCleared
from ...spec.model.events import Removed as SpecRemoved
from ...spec.model.events import Stored as SpecStored
from ...spec.rules.events import K3, K4, K5, K7
from ...spec.rules.rule import Rule
from .errors import EventFormatError
from .subscriber import Message
from .wire import Cleared, Removed, Stored, WireBatch, WireEvent, decode_batch

MOST_REMOVED: Final = 1_000_000
"""Removed blocks whose names are remembered, because a later block may name them as its parent."""
MOST_MALFORMED: Final = 100_000
"""Malformed messages that are remembered, because each of them may come again by a replay."""
NUM_EXAMPLES: Final = 3
"""Examples of each finding that are kept."""
MALFORMED: Final = "malformed message"
OF_RESTARTS: Final = frozenset(rule.name for rule in (K3, K4, K5))
"""Findings that a restart causes, too, if the new run goes on at the number that was expected."""


class StreamChecker:
    """Applies the messages of one publisher, and collects what breaks a rule.

    Attributes:
        findings: number of findings, by the name of the rule, or `MALFORMED`.
        examples: the first of each.
        num_events: number of events, by kind and tier.
        num_restarts: number of times that the publisher began anew.
        num_replayed: number of batches that came by a replay.
    """

    def __init__(self, replay: Callable[[int], Iterable[Message]]) -> None:
        """Make a checker of a stream that has not begun.

        Args:
            replay: asks for the batches from a number on again.
        """
        self.findings: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = {}
        self.num_events: Counter[str] = Counter()
        self.num_restarts = self.num_replayed = 0
        self._replay = replay
        self._receiver = self._new_receiver()
        self._num_before = 0  # batches of earlier runs
        self._last: Message | None = None  # of the run
        self._last_ts = 0.0
        self._malformed: set[int] = set()  # hashes of the messages

    def _new_receiver(self) -> Receiver:
        return Receiver(Consumer(self._found, MOST_REMOVED), None)

    def _found(self, rule: Rule, why: str) -> None:
        self._add(rule.name, why)

    def _add(self, name: str, why: str) -> None:
        self.findings[name] += 1
        examples = self.examples.setdefault(name, [])
        if len(examples) < NUM_EXAMPLES:
            examples.append(why)

    @property
    def num_batches(self) -> int:
        """Number of batches that came, of all runs of the publisher."""
        return self._num_before + self._receiver.num_batches

    @property
    def joined_late(self) -> bool:
        """Whether earlier batches are not known, so that not everything can be checked."""
        return self._receiver.consumer.joined_late

    def num_blocks(self) -> dict[str, int]:
        """Return the number of blocks in each tier."""
        return {medium: len(held) for medium, held in sorted(self._receiver.consumer.held.items())}

    def add_malformed(self, error: EventFormatError) -> None:
        """Count a message that has not even the number of a batch."""
        self._add(MALFORMED, str(error))

    def begin(self) -> None:
        """Ask for what was published before.

        Raises:
            TimeoutError: if nobody answers.
        """
        for message in self._again(0):
            self.num_replayed += 1
            self._apply(message, self._decode(message))

    def receive(self, message: Message) -> None:
        """Apply a message that was published, after those before it that did not come."""
        batch = self._decode(message)
        if self._came(message) and batch is not None and batch.ts > self._last_ts:
            self._begin_anew()
        if message.seq > (self._receiver.next_seq or 0):
            self._ask_before(message.seq)
        self._apply(message, batch)

    def _begin_anew(self) -> None:
        self.num_restarts += 1
        self._num_before += self._receiver.num_batches
        self._receiver, self._last = self._new_receiver(), None

    def _ask_before(self, seq: int) -> None:
        """Apply the batches before one that did not come, as far as a replay has them.

        The last one that came is asked for again: if the publisher has sent another one with its
        number, it has begun anew, and come further than before.
        """
        last = self._last
        try:
            for missed in self._again(0 if last is None else last.seq):
                if last is not None and missed.seq == last.seq and missed.payload != last.payload:
                    self._begin_anew()
                    self._ask_before(seq)
                    return
                if missed.seq < seq and not self._came(missed):
                    self.num_replayed += 1
                    self._apply(missed, self._decode(missed))
        except TimeoutError:
            pass  # what did not come is a finding

    def _came(self, message: Message) -> bool:
        """Whether the number of a message came already."""
        return message.seq < (self._receiver.next_seq or 0)

    def _again(self, seq: int) -> Iterator[Message]:
        try:
            yield from self._replay(seq)
        except EventFormatError as error:  # what follows in the replay does not come
            self.add_malformed(error)

    def _decode(self, message: Message) -> WireBatch | None:
        try:
            return decode_batch(message.payload)
        except EventFormatError as error:
            name = hash(message)
            if name not in self._malformed:  # as it is if it comes by a replay, too
                if len(self._malformed) == MOST_MALFORMED:
                    self._malformed.clear()
                self._malformed.add(name)
                self._add(MALFORMED, f"batch {message.seq}: {error}")
            return None

    def _apply(self, message: Message, batch: WireBatch | None) -> None:
        if self._came(message):
            return
        receiver = self._receiver
        if receiver.next_seq is None:
            receiver.consumer.joined_late = message.seq > 0
        elif missing := receiver.missing_before(message.seq):
            first, last = missing[0], missing[-1]  # there may be too many for `len`
            which = f"{first}" if first == last else f"{first} to {last}"
            self._found(K7, f"batch {which} did not come before {message.seq}, nor by a replay")
            self._forget()
            receiver.next_seq = message.seq
        if batch is None:
            self._forget()
            batch = WireBatch(self._last_ts, [])
        self._last, self._last_ts = message, batch.ts
        receiver.receive(Batch(message.seq, [*self._events(batch.events)]))

    def _forget(self) -> None:
        """Forget every block: what unknown batches removed cannot be told from the rest."""
        consumer = self._receiver.consumer
        consumer.clear()
        consumer.joined_late = True

    def _events(self, events: Iterable[WireEvent]) -> Iterator[Event]:
        for event in events:
            match event:
                case Stored():
                    medium = _medium(event)
                    self.num_events[f"{medium} stored"] += 1
                    yield from _stored(event, medium)
                case Removed():
                    medium = _medium(event)
                    self.num_events[f"{medium} removed"] += 1
                    yield SpecRemoved(medium, event.block_hashes)
                case Cleared():
                    self.num_events["cleared"] += 1
                    yield SpecCleared()


def _medium(event: Stored | Removed) -> str:
    """Return the tier of an event, and its group of layers if there are several."""
    medium = event.medium or "GPU"
    return medium if event.group_idx is None else f"{medium} group {event.group_idx}"


def _stored(event: Stored, medium: str) -> Iterator[SpecStored]:
    """Yield the blocks of an event; those that depend on more than tokens one by one."""
    hashes, tokens, size = event.block_hashes, event.token_ids, event.block_size
    keys = event.extra_keys
    if not keys or len(keys) != len(hashes) or len(tokens) != size * len(hashes):
        namespace = _namespace(event, None)
        yield SpecStored(medium, hashes, event.parent_block_hash, tokens, size, namespace)
        return
    parent = event.parent_block_hash
    for place, (name, extra) in enumerate(zip(hashes, keys, strict=True)):
        block = tokens[place * size : (place + 1) * size]
        yield SpecStored(medium, [name], parent, block, size, _namespace(event, extra))
        parent = name


def _namespace(event: Stored, extra: Any) -> bytes:
    """Return what a block depends on besides tokens; `extra` is its own entry of `extra_keys`."""
    whole = (event.lora_name, event.cache_salt)
    if extra is None:
        return b"" if whole == (None, None) else repr(whole).encode()
    return repr((whole, extra)).encode()
