"""The model of the tiers, driven by hand: the owners of host blocks, and the uses of prefixes."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from radixkv.scheduler.fuzz.tiers import adapter as tier_adapter
from radixkv.spec.harness.tiers import requests, take
from radixkv.spec.harness.tiers.checks import check_parked
from radixkv.spec.harness.tiers.world import TierSubject
from radixkv.spec.model.promises import Promises
from radixkv.spec.model.tiers.operations import TierModel
from radixkv.spec.model.tiers.residency import Place, Prefixes, Residency, Step
from radixkv.spec.model.tiers.uses import HostOrder, WriteThrough
from radixkv.spec.rules.rule import Violation

from .violations import code

NOTHING = Residency({}, {}, {}, frozenset(), 0, ())


def host_of(state: str) -> TierModel:
    """A model whose host block 3 is in a state."""
    model = TierModel(4, 1, Promises.all())
    if state != "free":
        model.host_allocated([3])
    if state not in ("free", "new"):
        model.dispatched("op 1", [3], [])
    if state in ("cached", "read"):
        model.written("op 1", [3])
    if state == "read":
        model.dispatched("op 2", [], [3])
    return model


@pytest.mark.parametrize(
    ("state", "allocated", "freed", "written", "read"),
    [
        ("free", "", "T42", "T11", "T10"),
        ("new", "T42", "", "", ""),
        ("being written", "T42", "T11", "T11", ""),
        ("cached", "T42", "", "T11", ""),
        ("read", "T42", "T10", "T11", ""),
    ],
)
def test_what_may_happen_to_a_host_block(
    state: str, allocated: str, freed: str, written: str, read: str
) -> None:
    assert code(host_of(state).host_allocated, [3]) == allocated
    assert code(host_of(state).host_freed, [3]) == freed
    assert code(host_of(state).dispatched, "op 3", [3], []) == written
    assert code(host_of(state).dispatched, "op 3", [], [3]) == read
    assert code(host_of(state).host_allocated, [1, 2]) == ""


def test_a_fence_ends_what_its_operation_does_and_no_other() -> None:
    for op, may_free in (("op 1", ""), ("op 2", "T11")):
        model = host_of("being written")
        model.fenced(op)
        assert code(model.host_freed, [3]) == may_free
    for op, may_free in (("op 2", ""), ("op 1", "T10")):
        model = host_of("read")
        model.fenced(op)
        assert code(model.host_freed, [3]) == may_free


def test_an_operation_is_abandoned_once() -> None:
    model = TierModel(4, 1, Promises.all())
    assert code(model.abandoned, "op 1") == "T41"


def prefixes_of(*path: int) -> Prefixes:
    """Prefixes of one path: each follows the one before."""
    prefixes = Prefixes()
    for depth, tag in enumerate(path):
        prefixes.depth[tag], prefixes.parent[tag] = depth, path[depth - 1] if depth else 0
        prefixes.path[tag] = [*path[: depth + 1]]
    return prefixes


@pytest.mark.parametrize(
    ("copied", "num_free", "rule"),
    [
        ({11: 1, 12: 2}, 2, ""),
        ({}, 1, ""),  # there is room for one of two
        ({}, 2, "T19"),
        ({11: 1, 12: 2, 13: 3}, 0, "T18"),  # nobody asked for the last one
        ({11: 9}, 0, "T19"),  # another block than that on the device
    ],
)
def test_what_is_written_through(copied: dict[int, int], num_free: int, rule: str) -> None:
    through = WriteThrough(0, is_on=True)
    through.published([11, 12])
    before = Residency({11: 1, 12: 2, 13: 3}, {}, {}, frozenset(), num_free, ())
    offloading = dict.fromkeys(copied, 0)
    now = Residency(before.device, {}, offloading, frozenset(), num_free - len(copied), ())
    prefixes = prefixes_of(11, 12, 13)
    assert code(through.check, before, now, copied, prefixes) == rule
    if not rule:
        assert code(through.check, before, before, {}, prefixes) == "", "it was asked once"


@pytest.mark.parametrize("num_hits", [0, 1, 2])
@pytest.mark.parametrize("is_on", [True, False])
def test_a_block_is_due_after_its_hits(num_hits: int, is_on: bool) -> None:
    device = Residency({11: 1}, {}, {}, frozenset(), 1, ())
    for number in range(3):
        through = WriteThrough(num_hits, is_on=is_on)
        through.published([11])
        for _ in range(number):
            through.hit([11], device)
        is_due = is_on and number >= num_hits
        found = code(through.check, device, device, {}, prefixes_of(11))
        assert found == ("T19" if is_due else "")


def test_hits_of_what_the_host_has_do_not_count() -> None:
    for there in (
        Residency({11: 1}, {11: 5}, {}, frozenset(), 1, ()),
        Residency({11: 1}, {}, {11: 5}, frozenset(), 1, ()),
    ):
        through = WriteThrough(1, is_on=True)
        through.hit([11], there)
        assert not through.hits[11]


def test_the_host_drops_in_the_order_of_uses() -> None:
    order = HostOrder()
    order.use([11, 12])
    order.use([13])
    for idle, rule in (
        ([11, 12, 13], ""), ([12, 11, 13], ""), ([13, 11], "T23"), ([11, 13, 12], "T23"),
        ([13, 14], "T23"),
    ):  # fmt: skip
        assert code(order.check, idle) == rule
    order.touch([11])
    assert code(order.check, [12, 13, 11]) == "", "a copy may count as a use"
    assert code(order.check, [11, 12, 13]) == "", "and need not"
    with pytest.raises(Violation, match=r"\[T23 .* after those that were used 1 later"):
        order.check([13, 12])
    order.use([15])
    order.use([13])
    order.touch([12])
    assert code(order.check, [13, 12, 15]) == "T23", "whatever the age of the one between them"


@pytest.mark.parametrize("takes_room", [True, False])
@pytest.mark.parametrize("num_free", [0, 1])
@pytest.mark.parametrize("held", [(), (11,)])
@pytest.mark.parametrize("place", ["host", "offloading", "promoting"])
def test_only_what_is_found_on_the_host_is_dropped_for_room(
    place: Place, held: tuple[int, ...], num_free: int, takes_room: bool
) -> None:
    before = Residency(
        {},
        {11: 1} if place == "host" else {},
        {11: 1} if place == "offloading" else {},
        frozenset([11] if place == "promoting" else []),
        num_free,
        (),
    )
    step = Step(before, "back", takes_room=takes_room, is_eviction=False)
    after = Residency({}, {}, {}, frozenset(), num_free, ())
    found = code(step.allow, after, prefixes_of(11), held)
    if held:
        assert found == "T5"
    else:
        assert found == ("" if place == "host" and takes_room and not num_free else "T24")


@pytest.mark.parametrize(
    ("where", "on_host", "is_kept"),
    [("host", True, True), ("host", False, False), ("storage", False, True)],
)
def test_a_request_is_parked_where_it_was_asked_for(
    where: str, on_host: bool, is_kept: bool
) -> None:
    parked = SimpleNamespace(is_saved=True, where=where, path=[1])
    world: Any = SimpleNamespace(
        tiers=SimpleNamespace(
            parked={"r1": parked}, now=SimpleNamespace(host={1: 0} if on_host else {})
        ),
        executor=SimpleNamespace(storage={b"key": b"KV"}),
        prefixes=SimpleNamespace(key={1: b"key"}),
        config={"storage": True},
    )
    if is_kept:
        check_parked(world)
    else:
        assert code(check_parked, world) == "T37"


@pytest.mark.parametrize("tail", [0, 1])
@pytest.mark.parametrize("num_free", range(5))
@pytest.mark.parametrize("num_idle", range(3))
def test_a_request_is_parked_where_the_host_has_room_for_what_it_lacks(
    num_idle: int, num_free: int, tail: int
) -> None:
    """Of its four blocks the host has one, and another is on its way there."""
    path, others = [11, 12, 13, 14], [21, 22][:num_idle]
    host = {11: 1, **dict(zip(others, (5, 6), strict=False))}
    before = Residency({}, host, {12: 2}, frozenset(), num_free, (1, 5, 6))
    world: Any = SimpleNamespace(situations=Counter())
    is_refused_rightly = 2 + tail > num_free + num_idle
    found = code(requests._check_room, world, before, path, tail)
    assert found == ("" if is_refused_rightly else "T33")
    assert world.situations["not parked"] == is_refused_rightly


def test_no_call_is_under_way_between_two_operations() -> None:
    """Then the model would allow what only the end of a load, or a reset, may do."""
    subject = TierSubject(tier_adapter.make_factory())
    seen: Counter[str] = Counter()
    for seed in range(3):
        below = random.Random(seed).randrange
        world = subject.world({**subject.configure(below), "storage": 1, "law": 0})
        for _ in range(250):
            word, *_ = operation = world.draw(below)
            world.apply(operation)
            assert not world.tiers.ending and not world.tiers.resetting, operation
            seen[word] += 1
        seen.update(world.situations)
    assert seen["reset"] and seen["loaded for an ended request"] + seen["released while loading"]


@pytest.mark.parametrize(
    ("stored", "rule"),
    [
        ([[11, 13]], ""), ([[13], [11]], ""), ([[11]], "T27"), ([], "T27"),
        ([[11, 12, 13]], ""),  # it was dropped after it was read
        ([[11, 13, 14]], "T27"), ([[11, 13], [11]], "T27"), ([[11, 11, 13]], "T27"),
    ],
)  # fmt: skip
def test_each_new_copy_on_the_host_is_stored_once(stored: list[list[int]], rule: str) -> None:
    """What was dropped before need not be stored, also not when it comes again."""
    tiers = SimpleNamespace(to_store={11, 12, 13}, now=SimpleNamespace(host={11: 1, 13: 3, 14: 4}))
    world: Any = SimpleNamespace(tiers=tiers)
    flights: list[Any] = [SimpleNamespace(kind="store", tags=tags) for tags in stored]
    flights.append(SimpleNamespace(kind="out", tags=[14]))
    assert code(take._check_stores, world, flights) == rule
    assert rule or not tiers.to_store
