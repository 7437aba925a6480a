"""A part that arrives in pieces: it is received when all have arrived, and otherwise not at all."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast
from unittest.mock import patch

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


class Clock:
    """The clock of a table, which stands still."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Engine:
    """An engine with one pull."""

    room, maintain_every_s = "room", None

    def __init__(self, pull: ScriptedPull | None) -> None:
        self._pull = pull

    def pull(self, *arguments: object) -> ScriptedPull | None:
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
        assert pull.state == "free" and not table._received


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

    name = "x"
    maintain_every_s: float | None = None

    def __init__(self) -> None:
        self.offers: list[ScriptedOffer] = []

    def offer(self, arrays: object) -> ScriptedOffer:
        self.offers.append(ScriptedOffer())
        return self.offers[-1]

    def maintain(self) -> None:
        """Nothing is in quarantine."""


OFFERS: Final = [PART._replace(key=AttemptKey(name, 1), part=n) for name in "ab" for n in range(2)]


@given(
    st.lists(
        st.sampled_from(OFFERS).flatmap(
            lambda part: st.tuples(
                st.just(part), st.sampled_from(["read", "free", "withdrawn", "acknowledged"])
            )
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
    told: dict[PartId, bool] = {}  # whether the engine may think that it was read
    for part, what in steps:
        match what:
            case "read":
                offers[part].is_read = True
            case "free":
                offers[part].is_free = True
            case _ if part.key not in withdrawn:
                table.withdraw(part.key, was_read=what == "acknowledged")
                withdrawn[part.key] = False
                for each in OFFERS:
                    if each.key == part.key:
                        told.setdefault(each, what == "acknowledged")
        told.update({each: True for each in OFFERS if offers[each].is_read and each not in told})
        table.step()
        table.step()  # what the first one withdraws may be free at once
        kept = {each for each, offer in offers.items() if offer.told is None or not offer.is_free}
        for each, offer in offers.items():
            assert offer.told is told.get(each)
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
        assert served.told is (False if has_ended else None), "nobody says that it was read"


class Computed:
    """An array that a device may still compute."""

    shape, dtype = OFFERED[0].shape, OFFERED[0].dtype

    def __init__(self) -> None:
        self.is_done = False

    def is_ready(self) -> bool:
        return self.is_done

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        assert self.is_done, "nobody waits for the device"
        return OFFERED[0]


def test_a_part_is_served_when_all_of_its_arrays_are_computed() -> None:
    engine, waiting = OfferingEngine(), [Computed(), Computed()]
    table = transfer_table.TransferTable(cast(TransferEngine, engine))
    arrays = cast(Any, (OFFERED[0], *waiting))
    layout = describe(arrays, num_blocks=1)
    table.offer(PART, OfferEntry(arrays, layout, math.inf))
    for array in waiting:
        table.step()
        assert (engine.offers, table.take_events(), table.wait_s()) == ([], [], 0.0)
        array.is_done = True
    table.step()
    [offered] = table.take_events()
    assert isinstance(offered, Offered)
    key = offered.info.digest_key
    digests = digest_arrays([OFFERED[0]] * 3, key)
    assert offered.info == PullInfo(PART, layout, digests, "x", b"", key)
    assert len(engine.offers) == 1 and len(key) == 16


@pytest.mark.parametrize("has_room", [False, True])
def test_a_pull_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch, *, has_room: bool) -> None:
    clock, key = Clock(), make_digest_key()
    monkeypatch.setattr(transfer_table, "time", clock)
    pull = ScriptedPull(key)
    table = transfer_table.TransferTable(cast(Any, Engine(pull if has_room else None)))
    layout = describe(OFFERED, num_blocks=1)
    info = PullInfo(PART, layout, digest_arrays(OFFERED, key), "x", b"", key)
    table.pull(PART, PullEntry(info, layout, 3.0))
    for clock.now in (1.0, 2.9):
        assert not table.step() and table.take_events() == []
    clock.now = 3.0
    table.step()
    what = "it ran" if has_room else "there was no room"
    reason = f"{what} until the deadline"
    assert table.take_events() == [PullFailed(PART, Fault.TIMED_OUT, reason)]
    assert pull.state == ("abandoned" if has_room else "running")
    table.step()
    table.cancel(PART)
    assert (table.take_events(), table.wait_s()) == ([], None)
    assert table.faults == {Fault.TIMED_OUT: 1}


def test_a_broken_invariant_of_an_engine_is_no_fault_of_a_peer() -> None:
    def break_down(*_: object) -> None:
        raise AssertionError("a slot is free already")

    table = transfer_table.TransferTable(cast(Any, SimpleNamespace(maintain_every_s=None)))
    table.engine.pull = break_down  # type: ignore[method-assign,assignment]
    layout = describe(OFFERED, num_blocks=1)
    table.pull(PART, PullEntry(PullInfo(PART, layout, (), "x", b""), layout, math.inf))
    with pytest.raises(AssertionError, match=r"^a slot is free already$"):
        table.step()


@given(
    st.lists(st.sampled_from([1.0, 2.0, 5.0, 9.0]), max_size=3),
    st.none() | st.sampled_from([0.5, 1.5, 20.0]),
)
def test_the_next_step_comes_before_an_offer_ends_and_before_maintenance(
    expiries: list[float], every_s: float | None
) -> None:
    clock = Clock()
    with patch.object(transfer_table, "time", clock):
        engine = OfferingEngine()
        table = transfer_table.TransferTable(cast(Any, engine))
        layout = describe(OFFERED, num_blocks=1)
        for number, expires_at in enumerate(expiries):
            table.offer(PART._replace(part=number), OfferEntry(OFFERED, layout, expires_at))
        table.step()
        engine.maintain_every_s = every_s
        for clock.now in (0.0, 0.75, 1.5):
            ends = [each - clock.now for each in expiries if each > clock.now]
            table.step()
            is_ending = len(ends) < len(expiries)  # as nobody lets it go
            expected = min([*ends, *([] if every_s is None else [every_s])], default=None)
            assert table.wait_s() == (0.0 if is_ending else expected)
            assert table.offers_expired == len(expiries) - len(ends)


def test_maintenance_comes_once_a_period() -> None:
    clock, times = Clock(), list[float]()
    with patch.object(transfer_table, "time", clock):
        engine = SimpleNamespace(maintain_every_s=1.0, maintain=lambda: times.append(clock.now))
        table = transfer_table.TransferTable(cast(Any, engine))
        for clock.now in (0.0, 0.9, 1.0, 1.9, 2.0, 2.5, 3.5, 4.0, 4.5):
            table.step()
    assert times == [1.0, 2.0, 3.5, 4.5]


@pytest.mark.parametrize("num_right", range(4))
def test_each_step_visits_every_pull(num_right: int) -> None:
    """Whatever comes of those before it."""
    key, layout = make_digest_key(), describe(OFFERED, num_blocks=1)
    engine: Any = SimpleNamespace(maintain_every_s=None)
    begun: list[ScriptedPull] = []

    def begin(*_: object) -> ScriptedPull:
        begun.append(ScriptedPull(key))
        begun[-1].written.update(range(NUM_PIECES))
        for piece, array in enumerate(begun[-1].arrays):
            array[:] = OFFERED[piece] + (len(begun) > num_right)
        return begun[-1]

    engine.pull = begin
    table = transfer_table.TransferTable(engine)
    digests = digest_arrays(OFFERED, key)
    for number in range(3):
        info = PullInfo(PART._replace(part=number), layout, digests, "x", b"", key)
        table.pull(info.part_id, PullEntry(info, layout, math.inf))
    assert table.step()
    rights = min(num_right, 3)
    outcomes = [outcome(each) for each in table.take_events()]
    assert outcomes == [Received] * rights + [Fault.CORRUPT] * (3 - rights)
    assert table.parts_received == rights
    assert table.bytes_received == rights * layout.num_bytes
    assert not table.step() and table.wait_s() is None


def test_what_has_arrived_by_its_deadline_is_received(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if nobody looked until then, as when the process was stopped."""
    clock, key = Clock(), make_digest_key()
    monkeypatch.setattr(transfer_table, "time", clock)
    pull = ScriptedPull(key)
    table = transfer_table.TransferTable(cast(Any, Engine(pull)))
    layout = describe(OFFERED, num_blocks=1)
    info = PullInfo(PART, layout, digest_arrays(OFFERED, key), "x", b"", key)
    table.pull(PART, PullEntry(info, layout, 3.0))
    for piece, array in enumerate(pull.arrays):
        array[:] = OFFERED[piece]
        pull.written.add(piece)
    clock.now = 4.0
    assert table.step() and table.take_events() == [Received(PART, pull.arrays)]
    assert table.faults == {}


def test_pulls_are_abandoned_before_their_engine_closes() -> None:
    pull = ScriptedPull(make_digest_key())
    engine: Any = Engine(pull)
    states: list[str] = []
    engine.close = lambda: states.append(pull.state)
    table = transfer_table.TransferTable(engine)
    layout = describe(OFFERED, num_blocks=1)
    table.pull(PART, PullEntry(PullInfo(PART, layout, (), "x", b""), layout, math.inf))
    table.step()
    table.close()
    assert states == ["abandoned"]


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
