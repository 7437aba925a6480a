"""A part that arrives in pieces: it is received when all have arrived, and otherwise not at all."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast

import numpy as np
import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st

from radixkv.scheduler.handoff import AttemptKey, PartId
from radixkv.scheduler.nodes.transport import (
    Event,
    Fault,
    Offered,
    OfferFailed,
    PullFailed,
    PullInfo,
    Received,
    Withdrawn,
    describe,
    transfer_table,
)
from radixkv.scheduler.nodes.transport.descriptors import digest_arrays, make_digest_key
from radixkv.scheduler.nodes.transport.transfer_engine import (
    EngineOffer,
    EnginePull,
    PullError,
    TransferEngine,
)
from radixkv.scheduler.nodes.transport.transfer_table import OfferEntry, PullEntry

NUM_PIECES: Final = 3
PART: Final = PartId(AttemptKey("r1", 1), epoch=1, peer_epoch=1, grant=1, part=0)
OFFERED: Final = tuple(np.arange(4, dtype=np.int32) + 10 * n for n in range(NUM_PIECES))
"""An array for each piece, as of the heads of one shard."""


class Arrives(NamedTuple):
    """A piece is written, perhaps again, and perhaps with other bytes."""

    piece: int
    is_right: bool = True


Step: TypeAlias = Arrives | Literal["fails", "is cancelled", "nothing"]

STEPS: Final = st.lists(
    st.builds(Arrives, st.integers(0, NUM_PIECES - 1), st.sampled_from([True, True, True, False]))
    | st.sampled_from(["fails", "is cancelled", "nothing"]),
    max_size=10,
)


class ScriptedPull(EnginePull):
    """A pull into memory that the test writes.

    Attributes:
        written: pieces that have arrived.
        state: "running", "free" or "abandoned".
    """

    def __init__(self, key: bytes) -> None:
        self.arrays = tuple(np.zeros_like(each) for each in OFFERED)
        self.digest_key = key
        self.written: set[int] = set()
        self.has_failed = False
        self.state = "running"

    def advance(self) -> int:
        if self.has_failed:
            raise PullError(Fault.FAILED, "a piece is lost")
        return next((n for n in range(NUM_PIECES) if n not in self.written), NUM_PIECES)

    def free(self) -> None:
        assert self.state == "running"
        self.state = "free"

    def abandon(self) -> None:
        assert self.state == "running"
        self.state = "abandoned"


class Engine:
    """An engine with one pull."""

    room, maintain_every_s = "room", None

    def __init__(self, pull: ScriptedPull) -> None:
        self._pull = pull

    def pull(self, *arguments: object) -> ScriptedPull:
        return self._pull


def check(steps: Sequence[Step], module: ModuleType = transfer_table) -> None:
    """Run a pull, and compare its end with what has arrived until then."""
    key = make_digest_key()
    layout, digests = describe(OFFERED, num_blocks=1), digest_arrays(OFFERED, key)
    pull = ScriptedPull(key)
    table = module.TransferTable(Engine(pull))
    table.pull(PART, PullEntry(PullInfo(PART, layout, digests, "x", b"", key), layout, math.inf))
    table.step()
    first: dict[int, bool] = {}  # whether each piece was right when it arrived
    expected: list[object] = []
    for step in steps:
        match step:
            case Arrives(piece, is_right) if piece not in first or is_right == first[piece]:
                pull.arrays[piece][:] = OFFERED[piece] + (not is_right)
                pull.written.add(piece)
                first[piece] = is_right
            case "fails":
                pull.has_failed = True
            case "is cancelled":
                table.cancel(PART)
        table.step()
        if not expected:
            if step == "is cancelled":
                expected = [Fault.CANCELLED]
            elif pull.has_failed:
                expected = [Fault.FAILED]
            elif len(first) == NUM_PIECES:
                expected = [Received] if all(first.values()) else [Fault.CORRUPT]
        events: list[Event] = table._events
        assert [outcome(each) for each in events] == expected
        # Until a pull that has failed is fenced, its memory is neither used nor free.
        is_failed = bool(expected) and expected != [Received]
        assert pull.state == ("abandoned" if is_failed else "running")
    if expected == [Received]:
        table.release(PART)
        assert pull.state == "free"


def outcome(event: Event) -> object:
    return event.fault if isinstance(event, PullFailed) else type(event)


@given(STEPS)
def test_a_part_is_received_when_all_of_its_pieces_are(steps: list[Step]) -> None:
    check(steps)


class ScriptedOffer(EngineOffer):
    """An offer that its reader reads, and keeps, as long as the test says.

    Attributes:
        is_read: whether the reader says that it has read it.
        is_free: whether nobody can read it once it is withdrawn.
        told: what it was withdrawn with; None if it was not.
    """

    route = b""

    def __init__(self) -> None:
        self.is_read = self.is_free = False
        self.told: bool | None = None

    def is_ready(self) -> bool:
        return True

    def was_read(self) -> bool:
        return self.is_read

    def withdraw(self, was_read: bool) -> None:
        assert self.told is None, "withdrawn twice"
        self.told = was_read

    def is_withdrawn(self) -> bool:
        assert self.told is not None, "asked before it was withdrawn"
        return self.is_free


class OfferingEngine:
    """An engine that serves whatever it is asked to."""

    name, maintain_every_s = "x", None

    def __init__(self) -> None:
        self.offers: list[ScriptedOffer] = []

    def offer(self, arrays: object) -> ScriptedOffer:
        self.offers.append(ScriptedOffer())
        return self.offers[-1]


OFFERS: Final = [PART._replace(key=AttemptKey(name, 1), part=n) for name in "ab" for n in range(2)]


@given(
    st.lists(
        st.sampled_from(OFFERS).flatmap(
            lambda part: st.tuples(st.just(part), st.sampled_from(["read", "free", "withdrawn"]))
        ),
        max_size=12,
    )
)
def test_an_attempt_is_withdrawn_once_nobody_can_read_any_of_its_parts(
    steps: list[tuple[PartId, str]],
) -> None:
    engine = OfferingEngine()
    table = transfer_table.TransferTable(cast(TransferEngine, engine))
    layout = describe(OFFERED, num_blocks=1)
    for part in OFFERS:
        table.offer(part, OfferEntry(OFFERED, layout, math.inf))
    table.step()
    assert [type(each) for each in table.take_events()] == [Offered] * len(OFFERS)
    offers = dict(zip(OFFERS, engine.offers, strict=True))
    withdrawn: dict[AttemptKey, bool] = {}  # and whether that was reported
    for part, what in steps:
        match what:
            case "read":
                offers[part].is_read = True
            case "free":
                offers[part].is_free = True
            case _ if part.key not in withdrawn:
                table.withdraw(part.key, was_read=False)
                withdrawn[part.key] = False
        table.step()
        table.step()  # what the first one withdraws may be free at once
        kept = {each for each, offer in offers.items() if offer.told is None or not offer.is_free}
        for each, offer in offers.items():
            assert (offer.told is not None) == (offer.is_read or each.key in withdrawn)
        assert table.num_offers == len(kept)
        expected = [key for key, was_told in withdrawn.items() if not was_told]
        expected = [key for key in expected if key not in {each.key for each in kept}]
        assert table.take_events() == [Withdrawn(key) for key in expected]
        withdrawn.update(dict.fromkeys(expected, True))


State: TypeAlias = Literal["waits", "is ready", "fails"]


class SlowOffer(ScriptedOffer):
    """An offer that storage has not taken yet, and perhaps never will.

    Attributes:
        state: whether it is ready; if it "fails", an error says so.
    """

    state: State = "waits"

    def is_ready(self) -> bool:
        if self.state == "fails":
            raise OSError("storage is away")
        return self.state == "is ready"


@given(st.lists(st.sampled_from(["waits", "is ready", "fails"]), max_size=4), st.integers(0, 4))
def test_an_offer_fails_or_expires_once(states: list[State], expires: int) -> None:
    """Also if it fails in the step in which it expires."""
    served, layout = SlowOffer(), describe(OFFERED, num_blocks=1)
    engine: Any = SimpleNamespace(name="x", maintain_every_s=None, offer=lambda arrays: served)
    table, entry = transfer_table.TransferTable(engine), OfferEntry(OFFERED, layout, math.inf)
    table.offer(PART, entry)
    is_offered = has_ended = has_expired = False
    for number, served.state in enumerate(states):
        if is_late := number >= expires:
            entry.expires_at = -math.inf
        expected: list[str] = []
        if not (is_offered or has_ended):
            if served.state == "fails":
                expected, has_ended = ["OSError: storage is away"], True
            elif served.state == "is ready":
                expected, is_offered = ["Offered"], True
            elif is_late:
                expected = ["expired before it could be served"]
        if is_late and not has_ended:
            has_ended = has_expired = True
        table.step()
        events = table.take_events()
        names = [each.reason if isinstance(each, OfferFailed) else "Offered" for each in events]
        assert (names, table.offers_expired) == (expected, has_expired)


BUGS: Final = {
    "a part is received with its first piece": (
        "and pull.num_arrived == len(pull.expected.arrays):",
        "and pull.num_arrived:",
    ),
    "the last piece is not waited for": (
        "and pull.num_arrived == len(pull.expected.arrays):",
        "and pull.num_arrived >= len(pull.expected.arrays) - 1:",
    ),
    "pieces are not compared": ("if num_arrived == len(running.arrays) and", "if False and"),
    "a pull that fails gives its memory back": (
        "                pull.running.abandon()\n",
        "                pull.running.free()\n",
    ),
    "a pull that fails goes on": (
        "            del self._pulls[failed.part_id]  # now",
        "            pass  # now",
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, (old, new) = inspect.getsource(transfer_table), BUGS[name]
    assert source.count(old) == 1, "write the bug anew"
    module = ModuleType("planted_table")
    module.__package__ = transfer_table.__package__
    monkeypatch.setitem(sys.modules, module.__name__, module)  # its dataclasses look it up
    exec(compile(source.replace(old, new), name, "exec"), vars(module))

    def is_broken(steps: list[Step]) -> bool:
        try:
            check(steps, module)
        except Exception:
            return True
        return False

    assert find(STEPS, is_broken, settings=settings(max_examples=1000, database=None))
