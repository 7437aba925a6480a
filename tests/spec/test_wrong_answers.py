"""A manager of tiers, or a scheduler over one, with one wrong answer breaks the rule about it.

The answers are those that no planted bug of our code makes wrong.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any, Final, TypeAlias
from unittest.mock import Mock

import pytest

from radixkv import kvcache
from radixkv import scheduler as own_scheduler
from radixkv.scheduler.fuzz.cache_adapter import CacheAdapter
from radixkv.scheduler.fuzz.handoff_adapter import HandoffAdapter
from radixkv.scheduler.fuzz.scheduler_adapter import MixedAdapter
from radixkv.scheduler.fuzz.tiered_scheduler_adapter import TieredDecodeAdapter, TieredMixedAdapter
from radixkv.scheduler.fuzz.tiers.adapter import TierAdapter
from radixkv.spec.adapters.handoff import NodeCounts
from radixkv.spec.adapters.scheduler import SchedulerPromises
from radixkv.spec.adapters.tiers import Copy
from radixkv.spec.harness.cache.world import CacheSubject
from radixkv.spec.harness.engine import Config, Subject, Trace, replay
from radixkv.spec.harness.handoff import drain
from radixkv.spec.harness.handoff.drain import bound_of, flood_bound, partition_bound
from radixkv.spec.harness.handoff.world import HandoffSubject, HandoffWorld
from radixkv.spec.harness.random_engine import run
from radixkv.spec.harness.scheduler import operations
from radixkv.spec.harness.scheduler.counts import Books, Counts
from radixkv.spec.harness.scheduler.operations import most_steps
from radixkv.spec.harness.scheduler.world import SchedulerSubject
from radixkv.spec.harness.tiers.world import TierSubject
from radixkv.spec.model.handoff import Request
from radixkv.spec.rules.rule import Violation

from .violations import code

Lie: TypeAlias = Callable[..., Any]
"""Makes another answer: of the adapter, the true answer and the arguments of the call."""


def lying(kind: type[Any], method: str, lie: Lie) -> type[Any]:
    """Return a class of adapters, one of whose methods gives other answers."""

    def answer(self: Any, *arguments: Any) -> Any:
        return lie(self, getattr(super(liar, self), method)(*arguments), *arguments)

    liar = type("Liar", (kind,), {method: answer})
    return liar


def assert_found(subject: Subject, text: str) -> None:
    """Assert that a random run breaks a rule with a text; a wrong answer may break others, too."""
    found = []
    for seed in (3, 1):
        finding = run(subject, seed, 4_000).finding
        assert finding is not None, "it is not found"
        found.append(f"{finding.rule} {finding.why}")
        if re.match(text, found[-1]):
            return
    raise AssertionError(f"found are {found}")


def swapped(kind: str) -> Lie:
    """Let the copies of a kind go to each other's blocks."""

    def lie(_: TierAdapter, copies: list[Copy]) -> list[Copy]:
        return [
            replace(each, destinations=each.destinations[::-1]) if each.kind == kind else each
            for each in copies
        ]

    return lie


def without_tail(manager: TierAdapter, copies: list[Copy]) -> list[Copy]:
    """Copy another block than that of the last tokens, which is not published."""
    published = manager.snapshot().cached.values()
    return [
        replace(each, sources=(*each.sources[:-1], each.sources[0]))
        if each.kind == "out" and each.sources[-1] not in published
        else each
        for each in copies
    ]


def without_moves(manager: TierAdapter, copies: list[Copy]) -> list[Copy]:
    """Lose the copies that move blocks from the host to the device."""
    moved = {
        manager.tier_snapshot().host.get(prefix) for prefix in manager.tier_snapshot().promoting
    }
    return [each for each in copies if each.kind != "in" or not moved]


def still_loading(manager: Any, copy: int | None, name: str) -> int | None:
    """Name the copy that loaded a request also after it has ended."""
    if copy is not None:
        manager.copy_of = {**getattr(manager, "copy_of", {}), name: copy}
    found: int | None = getattr(manager, "copy_of", {}).get(name)
    return found


def again(manager: Any, copies: list[Copy]) -> list[Copy]:
    """Name a copy that was taken before."""
    manager.first = [*getattr(manager, "first", []), *copies][:1]
    return copies or manager.first


def refusing(manager: Any, is_grown: bool, *_: object) -> bool:
    """Note whether growth was refused."""
    manager.has_refused = not is_grown
    return is_grown


def less_after_a_refusal(manager: Any, number: int) -> int:
    """Count a block less as long as nothing has grown since growth was refused."""
    return number - getattr(manager, "has_refused", False)


def moved_by(method: str) -> type[Any]:
    """A manager whose host has a free block less after a call that should change nothing."""

    def lie(manager: Any, answer: Any, *_: object) -> Any:
        manager.has_moved = method != "admit" or answer is None
        return answer

    def shown(manager: Any, shot: Any) -> Any:
        has_moved = getattr(manager, "has_moved", False)
        return replace(shot, free=shot.free[:-1]) if has_moved and shot.free else shot

    return lying(lying(TierAdapter, method, lie), "tier_snapshot", shown)


class IgnoresResets(TierAdapter):
    """Its leases outlive a reset."""

    def reset_but(self, keep: Sequence[bytes]) -> None:
        if not self.leases:
            super().reset_but(keep)


class LosesABlock(TierAdapter):
    """As soon as no request runs, it counts one block less."""

    def available(self) -> int:
        return super().available() - bool(self.ended and not self.leases)


TIERS: Final[dict[str, tuple[type[Any], str]]] = {
    "a fence is not heard": (
        lying(TierAdapter, "fence", lambda *_: False), "T13 .*the fence of .* has no effect",
    ),
    "a copy ends before it is taken": (
        lying(TierAdapter, "early", lambda _, answer: (answer[0], 1)),
        "T13 .*1 operations ended that were not taken",
    ),
    "a copy is taken twice": (lying(TierAdapter, "take", again), "T13 .*is taken again"),
    "a result that is not to be heard moves blocks": (
        moved_by("wrong_result"), "T12 .*is not to be heard, and blocks move",
    ),
    "a refused admission moves blocks": (moved_by("admit"), "A8 .*was refused, and tiers changed"),
    "blocks are promoted before their copy ends": (
        lying(TierAdapter, "promoted", lambda _, answer, name: answer + 1),
        "T7 .*at its admission",
    ),
    "tokens are ready before their copy ends": (
        lying(TierAdapter, "ready", lambda _, answer, name: answer + 1), "T7 .*at its admission",
    ),
    "a request loads after its copy has ended": (
        lying(TierAdapter, "loading", still_loading), "T7 .*still loads",
    ),
    "a lookup is for nobody": (
        lying(TierAdapter, "asking", lambda *_: -1), "T4 .*is for nobody",
    ),
    "what is loaded comes into other blocks": (
        lying(TierAdapter, "take", swapped("in")), "T6 .*is loaded into blocks",
    ),
    "what is written to the host comes into other blocks": (
        lying(TierAdapter, "take", swapped("out")), "T2 .*it is awaited in",
    ),
    "the tail of a parked request is not saved": (
        lying(TierAdapter, "take", without_tail), "T10 .*the tail of .* is not saved",
    ),
    "a move to the device never begins": (
        lying(TierAdapter, "take", without_moves),
        "T16 .*copies are under way by nothing",
    ),
    "a block is missing after refused growth": (
        lying(lying(TierAdapter, "append", refusing), "available", less_after_a_refusal),
        "A8 .*available after a refusal",
    ),
    "leases outlive a reset": (IgnoresResets, "R4 .*have leases after a reset"),
}  # fmt: skip


@pytest.mark.parametrize("name", TIERS)
def test_a_wrong_answer_of_tiers_breaks_its_rule(name: str) -> None:
    kind, text = TIERS[name]
    subject = TierSubject(lambda config: kind(kvcache, config))
    assert_found(subject, text)


def test_a_block_that_is_missing_when_all_have_ended_is_noticed() -> None:
    subject = TierSubject(lambda config: LosesABlock(kvcache, config))
    config = subject.configure(lambda bound: bound - 1)
    trace: Trace = [["submit", "r1", [0], 0, 0], ["admit", "r1"], ["drain"]]
    violation = replay(subject, config, trace)
    assert violation is not None and violation.rule.code == "D1"


NEW: Final = kvcache.CacheManager(1, 1).epoch


def one_before_a_reset(scheduler: TieredMixedAdapter, number: int) -> int:
    """Count one more, before another rule looks."""
    return number + (scheduler.manager.epoch == NEW)


def over_a_store(scheduler: Any, copies: list[Copy]) -> list[Copy]:
    """Write to a host block that is being stored."""
    stores = [each for each in copies if each.kind == "store"]
    scheduler.read = getattr(scheduler, "read", ()) or [each.sources for each in stores][:1]
    return [
        replace(each, destinations=(scheduler.read[0][0], *each.destinations[1:]))
        if each.kind == "out" and scheduler.read
        else each
        for each in copies
    ]


def with_nobody(_: Any, names: list[str]) -> list[str]:
    """Name a request that nobody has submitted, too."""
    return [*names, "nobody"]


def copying_nobody(scheduler: Any, chunks: list[Any]) -> list[Any]:
    """Name a copy of the tokens of nobody, too."""
    copies = scheduler.copies()
    scheduler.copies = lambda: [*copies, ("nobody", "nobody", 1, 1)]
    return chunks


SCHEDULERS: Final[dict[str, tuple[type[Any], str]]] = {
    "a result is not heard": (
        lying(TieredMixedAdapter, "complete", lambda *_: False),
        "Q35 .*the result of .* is not believed",
    ),
    "a fence is not heard": (
        lying(TieredMixedAdapter, "fence", lambda *_: False),
        "Q35 .*the fence of .* is not believed",
    ),
    "a host block is written while it is stored": (
        lying(TieredMixedAdapter, "take", over_a_store),
        "T10 .*reads blocks that were written since",
    ),
    "a request is parked when all have ended": (
        lying(TieredMixedAdapter, "num_parked", one_before_a_reset),
        "Q38 .*all have ended, .* 1 are",
    ),
    "a host block is held when all have ended": (
        lying(TieredMixedAdapter, "num_pinned", lambda *_: 1), "Q38 .*all have ended, .* 1 host",
    ),
    "a copy goes on when all have ended": (
        lying(TieredMixedAdapter, "num_copies", lambda _, number: number + 1),
        "Q38 .*all have ended, 1 copies",
    ),
    "nobody runs": (
        lying(TieredMixedAdapter, "running", with_nobody), "Q2 .*nobody runs, and is not live",
    ),
    "nobody is computed": (
        lying(TieredMixedAdapter, "schedule", lambda _, chunks: [*chunks, ("nobody", 0, 1)]),
        "Q2 .*nobody is computed, and is not live",
    ),
    "nobody is copied": (
        lying(TieredMixedAdapter, "schedule", copying_nobody), "Q2 .*is copied, and not live",
    ),
    "nobody is received": (
        lying(TieredDecodeAdapter, "receive", lambda _, got: got._replace(name="nobody")),
        "Q2 .*nobody is received, and is not live",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_wrong_answer_of_a_scheduler_breaks_its_rule(name: str) -> None:
    kind, text = SCHEDULERS[name]
    right = TieredMixedAdapter if issubclass(kind, TieredDecodeAdapter) else TieredDecodeAdapter

    def make(config: Config) -> Any:
        is_of_kind = issubclass(kind, TieredDecodeAdapter) == bool(config["decode"])
        return (kind if is_of_kind else right)(config, own_scheduler, SchedulerPromises.all())

    assert_found(SchedulerSubject(make, has_tiers=True), text)


def of_system(part: str, method: str, lie: Lie) -> type[HandoffAdapter]:
    """Return a class of systems whose nodes, or gateway, give other answers."""

    def made(_: HandoffAdapter, part: Any, *__: object) -> Any:
        answer = getattr(part, method)
        setattr(part, method, lambda *arguments: lie(part, answer(*arguments), *arguments))
        return part

    return lying(HandoffAdapter, part, made)


def in_use_when_idle(_: object, counts: NodeCounts) -> NodeCounts:
    """Count a block as used that nobody holds."""
    return counts if counts.held else counts._replace(available=counts.num_blocks - 1)


HANDOFFS: Final[dict[str, tuple[type[HandoffAdapter], str]]] = {
    "a block is missing when all have ended": (
        of_system("node", "num_free", lambda _, number: number - 1), "X23 .* free blocks",
    ),
    "a lease is held when all have ended": (
        of_system("node", "counts", lambda _, counts: counts._replace(held=1)), "X23 .* has NodeC",
    ),
    "a block is in use when all have ended": (
        of_system("node", "counts", in_use_when_idle), "X23 .* has NodeC",
    ),
    "a load is left when all have ended": (
        of_system("gateway", "loads", lambda *_: {"p0": 0, "d0": 1}), "X24 .*the loads are",
    ),
    "a gateway forgets to answer": (
        of_system("gateway", "take_answers", lambda *_: []), "X20 .* have no answer",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HANDOFFS)
def test_a_wrong_answer_of_a_handoff_breaks_its_rule(name: str) -> None:
    kind, text = HANDOFFS[name]
    assert_found(HandoffSubject(kind), text)


def in_a_step(factory: Callable[[Config], HandoffAdapter], role: str) -> tuple[HandoffWorld, str]:
    """Return a world that a node of a role has a step in flight in, and the node's name."""
    generator = Random(1)

    def below(bound: int) -> int:
        return int(generator.random() * bound)

    subject = HandoffSubject(factory)
    world = subject.world(subject.configure(below))
    while not (found := [n for n in world.live() if n.flights and n.name[0] == role]):
        world.apply(world.draw(below))
    return world, found[0].name


@pytest.mark.parametrize("role", ["p", "d"])
def test_a_node_resets_between_steps_only(role: str) -> None:
    resets_at_once = of_system("node", "reset", lambda *_: True)
    world, name = in_a_step(resets_at_once, role)
    assert world.apply(["reset", name])
    with pytest.raises(Violation, match=rf"\[X14 .*{name} resets with 1 steps in flight"):
        world.apply(["tick", 1])
    world, name = in_a_step(HandoffAdapter, role)
    number = world.situations["reset"]
    for operation in (["reset", name], ["tick", 1], ["drain"]):
        assert world.apply(operation)
    assert world.situations["reset"] > number


def smallest(factory: Callable[[Config], HandoffAdapter], **sizes: Any) -> HandoffWorld:
    """Return a world of the simplest configuration, but for some sizes."""
    subject = HandoffSubject(factory)
    world = subject.world({**subject.configure(lambda bound: 0), "request_s": 5_000, **sizes})
    assert world.apply(["submit", "r1", [1, 2, 3], 3, 0])
    return world


STUCK: Final[list[tuple[list[Any], str, Callable[[HandoffWorld], int]]]] = [
    (["drain"], "X20 .*there are", bound_of),
    (["flood", "f1", [1], 2], "X21 .*there is no answer to", lambda world: flood_bound(world, 3)),
    (["partition", "p0+d0", "r2", [1], 2, [0, 1, 2, 3, 4, 5]], "X28 .*there is no answer to",
     partition_bound),
]  # fmt: skip


@pytest.mark.parametrize(("operation", "text", "bound"), STUCK, ids=["drain", "flood", "partition"])
def test_requests_that_never_end_are_waited_for_as_long_as_they_may_take(
    operation: list[Any], text: str, bound: Callable[[HandoffWorld], int]
) -> None:
    never_works = of_system("node", "has_work", lambda *_: False)
    world = smallest(never_works, num_prefill=2, num_decode=2, max_overtaken=1)
    if operation[0] == "partition":  # which submits a request
        world.apply(["submit", *operation[2:5], 0])
        due = bound(world)
        world = smallest(never_works, num_prefill=2, num_decode=2, max_overtaken=1)
    else:
        due = bound(world)
    begin = world.now
    with pytest.raises(Violation, match=rf"\[{text}") as caught:
        world.apply(operation)
    assert world.now - begin == due and f" {due} rounds" in str(caught.value)
    right = smallest(HandoffAdapter, num_prefill=2, num_decode=2, max_overtaken=1)
    assert right.apply(operation) and right.now < due


def test_a_reset_that_waits_is_pending() -> None:
    world = smallest(HandoffAdapter)
    assert world.apply(["reset", "p0"]) and drain.pending(world)["resets"] == 1
    assert world.apply(["reset", "d0"]) and drain.pending(world)["resets"] == 2
    assert world.apply(["drain"]) and drain.is_drained(world) and world.situations["reset"] == 2


def test_all_caches_check_themselves_at_the_end_and_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = smallest(HandoffAdapter)
    monkeypatch.setattr(world, "check_caches", check := Mock())
    for number in range(1, 70):  # the request was the first operation
        assert check.call_count == number // 32
        assert world.apply(["tick", 1])
    monkeypatch.setattr(drain, "run_rounds", lambda world: None)
    idle = HandoffSubject(HandoffAdapter).world(world.config)
    monkeypatch.setattr(idle, "check_caches", check := Mock())
    drain.drain(idle)
    check.assert_called_once_with()


def test_requests_of_a_scheduler_that_never_end_are_waited_for_as_long_as_they_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[object] = []
    monkeypatch.setattr(operations, "run_step", steps.append)
    monkeypatch.setattr(operations, "settle", lambda world: None)
    submitted: list[str] = []
    monkeypatch.setattr(operations, "submit", lambda world, name, *_: submitted.append(name))
    live = {"r1": SimpleNamespace(name="r1", max_kv_tokens=4, is_live=True)}
    world: Any = SimpleNamespace(
        live=live, past=[], running=[], target=SimpleNamespace(depth=1), copies=None,
        is_decode_node=False, config={"max_running": 3}, names=lambda each: "r1",
        situations=Counter(),
    )  # fmt: skip
    bound = most_steps(world)
    with pytest.raises(Violation, match=rf"\[Q30 .*\] {bound} steps, and r1 have not ended"):
        operations.drain(world)
    assert len(steps) == bound == 1 * 2 * 5
    steps.clear()
    due = bound + (3 + 1) * (2 + 7)
    with pytest.raises(Violation, match=rf"\[Q31 .*\] {due} steps, and r1 have not ended"):
        operations.flood(world, "f1", [1, 2], 7)
    assert len(steps) == due and submitted == [f"f1.{number}" for number in range(1, due + 1)]


@pytest.mark.parametrize("is_loading", [True, False])
@pytest.mark.parametrize("is_seen", [True, False])
def test_counts_are_unknown_after_a_load_that_nobody_saw(is_seen: bool, is_loading: bool) -> None:
    request: Any = SimpleNamespace(
        name="r1", is_loading=is_loading, prefilling=True, num_preemptions=0
    )
    step: Any = SimpleNamespace(
        chunks=[], preempted=[request], admitted=[], begun={}, running=[],
        loading={"r1"} if is_seen else {"r2"},
    )  # fmt: skip
    counts = Counts(Counter())
    counts.before(step, {}, 4)
    assert counts.are_known == (is_seen or not is_loading)
    counts.before(SimpleNamespace(**{**vars(step), "preempted": []}), {}, 4)  # type: ignore[arg-type]
    assert counts.are_known == (is_seen or not is_loading), "for ever"
    for preemptions, error in ((1, ""), (2, "Q37" if counts.are_known else "")):
        assert code(counts.compare, {"preemptions": preemptions}) == error


def test_the_longest_time_that_a_handoff_may_take() -> None:
    """Of the requests 8 and 14 tokens are in steps of two groups of layers, 8 in a round."""
    known = {"r1": Request((1,) * 5, 3, 0), "r2": Request((1,) * 5, 9, 0)}
    names = ["r1"]
    world: Any = SimpleNamespace(
        config={"host_blocks": 0, "max_overtaken": 3}, num_groups=1, requests=known,
        model=SimpleNamespace(open=lambda: names), prefill_names=["p0", "p1"], decode_names=["d0"],
    )  # fmt: skip
    assert bound_of(world) == 19 + 11 + 2
    assert flood_bound(world, 6) == 2 * (32 + (6 + 2) * (3 + 8))
    assert partition_bound(world) == 32 * 2 * (1 + 2)
    names.append("r2")
    assert bound_of(world) == 19 + 11 + 2 + 11 + 4
    world.config["host_blocks"] = 4
    assert bound_of(world) == 19 + 13 + 2 + 13 + 4
    world.config["storage"] = True
    assert bound_of(world) == 19 + 17 + 2 + 17 + 4


def test_the_most_steps_that_requests_of_a_scheduler_may_take() -> None:
    live = {name: SimpleNamespace(max_kv_tokens=number) for name, number in (("r1", 4), ("r2", 2))}
    world: Any = SimpleNamespace(live=live, target=SimpleNamespace(depth=2), copies=None)
    assert most_steps(world) == 2 * 3 * (5 + 3)
    world.copies = object()
    assert most_steps(world) == 8 * 48 + 100


# Counters

TIER_CONFIG: Final[Config] = {
    "num_blocks": 4, "block_size": 2, "host_blocks": 3, "write": "back", "hits": 0, "storage": 1,
    "law": 0, "at_once": 0,
}  # fmt: skip


def one_less(name: str) -> Lie:
    """Report one less in a counter, as soon as it has counted something."""

    def lie(_: object, answer: Any) -> Any:
        counts = answer if isinstance(answer, dict) else answer.counts
        wrong = {**counts, name: counts[name] - (counts[name] > 0)}
        return wrong if isinstance(answer, dict) else replace(answer, counts=wrong)

    return lie


def assert_counter_is_compared(subject: Subject, rules: str, name: str) -> None:
    """Assert that each finding of some runs is that of the wrong counter."""
    finding = run(subject, 1, 8_000).finding
    assert finding is not None, f"{name} is not compared"
    assert re.fullmatch(rf"({rules}) \S+ {name} is \d+, .*\d+", f"{finding.rule} {finding.why}")


@pytest.mark.parametrize("name", TierAdapter(kvcache, TIER_CONFIG).tier_snapshot().counts)
def test_each_counter_of_the_tiers_is_compared(name: str) -> None:
    kind = lying(TierAdapter, "tier_snapshot", one_less(name))
    subject = TierSubject(lambda config: kind(kvcache, config))
    assert_counter_is_compared(subject, "S3", name)


@pytest.mark.parametrize("name", CacheAdapter(kvcache, 4, 2).snapshot().counts)
def test_each_counter_of_the_device_is_compared(name: str) -> None:
    kind = lying(CacheAdapter, "snapshot", one_less(name))
    subject = CacheSubject(lambda *sizes: kind(kvcache, *sizes), "full")
    assert_counter_is_compared(subject, "S3", name)


@pytest.mark.parametrize("name", vars(Books()))
def test_each_counter_of_a_scheduler_is_compared(name: str) -> None:
    kind = lying(MixedAdapter, "counts", one_less(name))
    promises, has_tiers = SchedulerPromises.all(), name == "lower_hit_tokens"
    tiered = lying(TieredMixedAdapter, "counts", one_less(name))

    def make(config: Config) -> Any:
        if config.get("decode"):
            return TieredDecodeAdapter(config, own_scheduler, promises)
        return (tiered if has_tiers else kind)(config, own_scheduler, promises)

    assert_counter_is_compared(SchedulerSubject(make, has_tiers), "Q13|Q37", name)
