"""Our adapters pass on what they are given, and return what they get, unchanged."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from radixkv import scheduler as own_scheduler
from radixkv.kvcache import CacheManager, HostConfig, OutOfBlocksError, RequestTooLargeError
from radixkv.kvcache.tiers.host_tier import WritePolicy
from radixkv.scheduler.fuzz import (
    cache_adapter,
    handoff_adapter,
    scheduler_adapter,
    tiered_scheduler_adapter,
)
from radixkv.scheduler.fuzz.scheduler_adapter import BETWEEN, IN_FLIGHT, MixedAdapter
from radixkv.scheduler.fuzz.tiered_scheduler_adapter import (
    TieredDecodeAdapter,
    TieredMixedAdapter,
)
from radixkv.scheduler.fuzz.tiers import adapter as tier_adapter
from radixkv.spec.adapters.scheduler import SchedulerPromises, Submission
from radixkv.spec.rules.rule import Violation

from .recording import Recorder

# The mixed scheduler

CONFIG = {"num_blocks": 5, "block_size": 3, "prefix_cache": False, "token_budget": 11,
          "max_running": 7, "policy": "fcfs", "reserve_tokens": 13}  # fmt: skip


class Package:
    """A scheduler package that notes what it is asked to make."""

    StepOrderError, RequestError = own_scheduler.StepOrderError, own_scheduler.RequestError
    Request, Fcfs, Priority = own_scheduler.Request, own_scheduler.Fcfs, own_scheduler.Priority

    def __init__(self) -> None:
        self.scheduler = Recorder()

    def MixedScheduler(self, manager: Any, *, depth: int, policy: Any, **options: Any) -> Any:
        self.given = {**options, "depth": depth, "policy": type(policy).__name__}
        vars(self.scheduler)["depth"] = depth
        return self.scheduler


def adapter_of(**config: Any) -> tuple[MixedAdapter, Package]:
    package = Package()
    return MixedAdapter({**CONFIG, **config}, package, SchedulerPromises()), package


@pytest.mark.parametrize(
    ("config", "given"),
    [
        ({}, {}),
        ({"policy": "priority"}, {"policy": "Priority"}),
        ({"depth": 2, "preempt": "host"}, {"depth": 2, "preempt": "host"}),
        ({"prefix_cache": True}, {"prefix_cache": True}),
    ],
)
def test_a_scheduler_has_the_options_of_its_configuration(
    config: dict[str, Any], given: dict[str, Any]
) -> None:
    adapter, package = adapter_of(**config)
    assert package.given == {
        "prefix_cache": False, "token_budget": 11, "max_running": 7, "reserve_tokens": 13,
        "policy": "Fcfs", "depth": 1, "preempt": "recompute", **given,
    }  # fmt: skip
    assert (adapter.manager.num_blocks, adapter.manager.block_size) == (5, 3)
    assert adapter.depth == given.get("depth", 1)


def test_only_the_growth_of_singles_extends_one_at_a_time() -> None:
    kinds = [type(adapter_of(**more)[0].manager).__name__ for more in ({}, {"growth": "singles"})]
    assert kinds == ["CacheManager", "SinglesManager"]


def test_only_leaders_let_others_overtake() -> None:
    for leaders, most in ((False, 4), (True, 5 * 3 * 7)):
        promises = SchedulerPromises(leaders=leaders, max_overtaken=4)
        assert MixedAdapter(CONFIG, Package(), promises).promises.max_overtaken == most


def test_a_request_is_submitted_as_it_is() -> None:
    adapter, package = adapter_of()
    first = Submission("r1", [4, 5, 6, 7], 3, 2, [8, 9], b"tenant")
    assert adapter.add(first)
    assert adapter.add(Submission("r2", [4, 5, 6, 7], 3, 0, (), b"tenant", sample_of="r1"))
    [[_, made], [_, sample]] = package.scheduler.calls
    assert made.tokens.tolist() == [4, 5, 6, 7] and made.request_id == "r1"
    assert (made.max_new_tokens, made.priority, made.namespace) == (3, 2, b"tenant")
    assert set(made.stop_token_ids) == {8, 9} and made.sample_of is None
    assert sample.sample_of is made
    package.scheduler.answers["add"] = RequestTooLargeError(1, 9, 5)
    assert not adapter.add(Submission("r3", [4], 1, 0, (), b"")) and "r3" not in adapter.requests


def request(name: str, *table: int) -> Any:
    lease = SimpleNamespace(block_table=np.array(table, np.int32), num_hit_blocks=2)
    return SimpleNamespace(request_id=name, lease=lease if table else None, num_computed=len(name))


def test_a_plan_is_shown_as_it_is() -> None:
    adapter, package = adapter_of()
    one, two, owner = request("r1", 3, 4), request("r22", 1, 2), request("r3", 0)
    adapter.requests = {each.request_id: each for each in (one, two, owner)}
    chunk = SimpleNamespace(request=two, start=4, length=3)
    copy = SimpleNamespace(owner=owner, source=0, destination=2)
    of_none = SimpleNamespace(owner=owner, source=0, destination=9)
    plan = SimpleNamespace(chunks=[chunk], copies=[copy, of_none], admitted=[one, two])
    package.scheduler.answers["schedule"] = plan
    assert adapter.schedule() == [("r22", 4, 3)] and list(adapter.plans) == [plan]
    assert adapter.copies() == [("r22", "r3", 0, 2), ("", "r3", 0, 9)]
    package.scheduler.answers["schedule"] = SimpleNamespace(chunks=[], copies=[], admitted=[])
    assert adapter.schedule() == [] and adapter.copies() == [] and list(adapter.plans) == [plan]


def test_results_go_to_the_first_plan_in_flight() -> None:
    adapter, package = adapter_of(depth=2)
    adapter.plans = deque(["first", "second"])
    package.scheduler.answers["update"] = [request("r2"), request("r1")]
    tokens = [7, 8]
    assert adapter.update(tokens) == ["r2", "r1"] and tokens == [7, 8]
    assert package.scheduler.calls == [("update", "first", [7, 8])]
    assert list(adapter.plans) == ["second"] and adapter.last_plan == "first"


def test_a_request_is_shown_as_it_is() -> None:
    adapter, package = adapter_of()
    adapter.requests = {each.request_id: each for each in (request("r1", 3, 4), request("r22"))}
    assert (adapter.block_table("r1"), adapter.num_hit("r1")) == ([3, 4], 2 * 3)
    assert (adapter.block_table("r22"), adapter.num_hit("r22")) == ([], 0)
    assert (adapter.num_computed("r1"), adapter.num_computed("r22")) == (2, 3)
    package.scheduler.answers["abort"] = True
    assert adapter.abort("r9") is True and package.scheduler.calls == [("abort", "r9")]
    for names in ("running", "waiting"):
        vars(package.scheduler)[names] = [request("r5"), request("r4")]
        assert getattr(adapter, names)() == ["r5", "r4"]
    stats = SimpleNamespace(host_hit_tokens=20, storage_hit_tokens=3, steps=4)
    package.scheduler.answers["stats"] = stats
    assert adapter.counts() == {**vars(stats), "lower_hit_tokens": 23}


# Its wrong calls


@dataclass
class Plan:
    """A plan of two chunks."""

    chunks: tuple[int, ...] = (1, 2)


@pytest.mark.parametrize("is_refused", [False, True])
@pytest.mark.parametrize("kind", range(2 * len(IN_FLIGHT)))
def test_a_wrong_call_while_a_step_is_in_flight(kind: int, is_refused: bool) -> None:
    for num_plans, depth in ((1, 1), (1, 2), (2, 2)):
        adapter, package = adapter_of(depth=depth)
        adapter.plans = deque(Plan() for _ in range(num_plans))
        if is_refused:
            refused = own_scheduler.StepOrderError("no")
            package.scheduler.answers = {"schedule": refused, "update": refused}
        assert adapter.misuse(kind, "r1") == is_refused
        [[called, *given]] = package.scheduler.calls
        what = IN_FLIGHT[kind % len(IN_FLIGHT)]
        if what == "schedule too far ahead" and num_plans == depth:
            assert called == "schedule"
        elif what == "update with a token too few":
            assert called == "update" and given[0] is adapter.plans[0] and given[1] == [0]
        else:
            assert called == "update" and given[0] is not adapter.plans[0]
            assert given == [Plan(), [0, 0]]


@pytest.mark.parametrize("is_refused", [False, True])
@pytest.mark.parametrize("what", BETWEEN)
def test_a_wrong_call_between_two_steps(what: str, is_refused: bool) -> None:
    adapter, package = adapter_of()
    if is_refused:
        package.scheduler.answers = {
            "update": own_scheduler.StepOrderError("no"), "abort": False,
            "add": own_scheduler.RequestError("no"),
        }  # fmt: skip
    else:
        package.scheduler.answers = {"abort": True}
    live, ended = (SimpleNamespace(finish_reason=reason) for reason in (None, "stop"))
    adapter.requests = {"live": live, "ended": ended}
    kind = BETWEEN.index(what)
    calls = package.scheduler.calls
    if what == "add a twin":
        assert adapter.misuse(kind, "r9") and not calls
        assert adapter.misuse(kind, "live") == adapter.misuse(kind, "ended") == is_refused
        [[_, twin], [_, again]] = calls
        assert again is ended and twin is not live and twin.request_id == "live"
    elif what == "update the last plan again":
        assert adapter.misuse(kind, "live") and not calls
        adapter.last_plan = Plan()
        assert adapter.misuse(kind, "live") == is_refused
        assert calls == [("update", Plan(), [0, 0])]
    else:
        assert adapter.misuse(kind, "live") == is_refused
        assert calls == [("abort", "live.unknown")]


# Schedulers over tiers


def over_tiers(tiers: Any, **more: Any) -> Any:
    """Return what an adapter over tiers needs of itself."""
    manager = SimpleNamespace(tiers=tiers, **more)
    own: Any = TieredMixedAdapter.__new__(TieredMixedAdapter)
    own.manager, own.requests = manager, {}
    return own


@pytest.mark.parametrize("storage", [0, 1])
def test_a_manager_over_tiers_has_the_sizes_of_its_configuration(storage: int) -> None:
    config = {"num_blocks": 5, "block_size": 3, "host_blocks": 4, "write": "through",
              "storage": storage}  # fmt: skip
    own = over_tiers(None)
    own.manager = manager = own._make_manager(config)
    assert (manager.num_blocks, manager.block_size) == (5, 3)
    assert manager.stats().tiers.host_blocks == 4
    assert (own.tiers.storage is not None) == bool(storage)
    keys = own.keys((1, 2, 3, 4), b"a")
    assert len(keys) == storage and keys == own.keys((1, 2, 3), b"a")
    assert not storage or keys != own.keys((1, 2, 3), b"b")


def test_figures_of_tiers_are_shown_as_they_are() -> None:
    stats = SimpleNamespace(parked=3, host_blocks=50, host_free_blocks=20, host_cached_blocks=7)
    tiers = SimpleNamespace(num_open_operations=6, stats=lambda: stats)
    match = SimpleNamespace(num_blocks=4, num_host_blocks=50)
    given: list[Any] = []

    def match_of(*arguments: Any) -> Any:
        given.append(arguments)
        return match

    own = over_tiers(tiers, match=match_of)
    own.requests = {"r1": SimpleNamespace(tokens="tokens", namespace=b"a")}
    assert (own.num_copies(), own.num_parked(), own.num_pinned()) == (6, 3, 50 - 20 - 7)
    assert own.num_cached("r1") == 54 and given == [("tokens", b"a")]
    for status, loads in (("loading", True), ("running", False)):
        own.requests["r1"].status = SimpleNamespace(value=status)
        assert own.is_loading("r1") is loads
    own.scheduler = scheduler = Recorder()
    own.reset((b"a", b"b"), "new weights")
    assert scheduler.calls == [("reset_cache", [b"a", b"b"], "new weights")]


DECODE = {"num_blocks": 9, "block_size": 2, "host_blocks": 4, "write": "back", "storage": 0,
          "prefix_cache": True, "token_budget": 11, "max_running": 7, "policy": "fcfs",
          "reserve_tokens": 2}  # fmt: skip


class DecodePackage(Package):
    """A scheduler package that notes what decode scheduler it is asked to make."""

    handoff = own_scheduler.handoff

    def DecodeScheduler(self, manager: Any, *, timing: Any, policy: Any, **options: Any) -> Any:
        self.given = {**options, "policy": type(policy).__name__}
        vars(self.scheduler)["depth"] = options["depth"]
        return self.scheduler


def decode_adapter(**config: Any) -> tuple[TieredDecodeAdapter, DecodePackage]:
    package = DecodePackage()
    adapter = TieredDecodeAdapter({**DECODE, **config}, package, SchedulerPromises())
    package.scheduler.answers.update(take_actions=[])
    return adapter, package


def test_a_decode_scheduler_has_the_options_of_its_configuration() -> None:
    for more in ({}, {"depth": 2, "policy": "priority", "preempt": "host"}):
        _, package = decode_adapter(**more)
        assert package.given == {
            "epoch": 1, "token_budget": 11, "max_running": 7, "reserve_tokens": 2,
            "preempt": "recompute", "depth": 1, **more,
            "policy": "Priority" if more else "Fcfs",
        }  # fmt: skip


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_prefill_node_asks_in_order_until_one_is_granted(policy: str) -> None:
    adapter, package = decode_adapter(policy=policy)
    for name, priority in (("r1", 1), ("r2", 0), ("r3", 1)):
        assert adapter.add(Submission(name, [4, 5, 6], 3, priority, [8], b"a", first_token=7))
    asked = [call[2] for call in package.scheduler.calls if call[0] == "receive"]
    ask = asked[0]
    assert ask.header.key == own_scheduler.handoff.AttemptKey("r1", 1)
    assert np.frombuffer(ask.prompt, "<i4").tolist() == [4, 5, 6] and ask.namespace == b"a"
    assert (ask.block_size, ask.num_groups, ask.max_new_tokens, ask.priority) == (2, 1, 3, 1)
    order = ["r1", "r2", "r3"] if policy == "fcfs" else ["r2", "r1", "r3"]
    vars(package.scheduler)["waiting"] = [request("r9")]
    assert adapter.waiting() == ["r9", *order]
    package.scheduler.calls.clear()
    assert not adapter.ask()
    assert package.scheduler.calls[0] == ("tick", 1)
    again = [call[2].header.key.request_id for call in package.scheduler.calls
             if call[0] == "receive"]  # fmt: skip
    assert again == order
    handoff = own_scheduler.handoff
    grant = handoff.Grant(handoff.Header(handoff.AttemptKey("r1", 1), 1, grant=5), 1, 2)
    late = handoff.Grant(handoff.Header(handoff.AttemptKey("r1", 9), 1, grant=5), 1, 2)
    for message in (late, grant):
        adapter._act(Post(message))
    package.scheduler.calls.clear()
    assert adapter.ask() and adapter._grants == [grant], "nobody else is asked for"
    assert package.scheduler.calls == [("tick", 2), ("take_actions",)]


@dataclass
class Post:
    """An action of a decode scheduler."""

    message: Any


def test_a_request_that_is_too_large_is_not_asked_for_again() -> None:
    adapter, package = decode_adapter()
    handoff = own_scheduler.handoff
    header = handoff.Header(handoff.AttemptKey("r1", 1), 1)
    too_large = [Post(handoff.Refuse(header, "too large", 9, 5))]
    for actions, is_added in (([], True), (too_large, False)):
        left = iter([actions])
        vars(package.scheduler)["take_actions"] = lambda left=left: next(left, [])
        assert adapter.add(Submission("r1", [4, 5, 6], 3, 0, (), b"")) == is_added
    no_room = Post(handoff.Refuse(header, "out of blocks", 9, 5))
    adapter._asked = {"r1": Submission("r1", [4], 1, 0, (), b"")}
    adapter._act(no_room)
    assert adapter._asked


def test_a_reset_of_a_decode_node_begins_new_attempts() -> None:
    adapter, package = decode_adapter()
    adapter.reset((b"a",), "new weights")
    assert package.scheduler.calls[-2:] == [
        ("drain", "the weights change"), ("reset_cache", [b"a"], "new weights")
    ]  # fmt: skip
    adapter.add(Submission("r1", [4], 1, 0, (), b""))
    [key] = [call[2].header.key for call in package.scheduler.calls if call[0] == "receive"]
    assert key.attempt == 2


def test_an_abort_ends_what_the_prefill_node_asks_for() -> None:
    adapter, package = decode_adapter()
    adapter.add(Submission("r1", [4], 1, 0, (), b""))
    assert adapter.abort("r1") and adapter.requests["r1"].finish_reason == "abort"
    assert ("abort", "r1") in package.scheduler.calls and not adapter._queue()
    package.scheduler.calls.clear()
    assert not adapter.abort("r1") and not package.scheduler.calls
    adapter.requests["r2"] = running = SimpleNamespace(finish_reason=None)
    assert adapter.abort("r2") and running.finish_reason is None, "the scheduler says why"


def test_wrong_calls_of_a_decode_node_are_those_of_any_but_for_a_twin() -> None:
    adapter, package = decode_adapter()
    adapter.requests["r1"] = request("r1")
    package.scheduler.answers["abort"] = True
    assert [adapter._misuse_between(what, "r1") for what in BETWEEN] == [True, True, False]
    assert package.scheduler.calls == [("abort", "r1.unknown")]


@pytest.mark.parametrize(
    ("first_block", "num_hit_blocks", "num_cached", "num_on_device", "part"),
    [(0, 0, 0, 0, (0, 3)), (1, 2, 2, 2, (1, 2)), (2, 1, 4, 2, (2, 1)), (3, 3, 6, 6, None)],
)
def test_a_granted_request_is_sent_what_it_lacks_and_its_first_token(
    first_block: int, num_hit_blocks: int, num_cached: int, num_on_device: int,
    part: tuple[int, int] | None,
) -> None:  # fmt: skip
    adapter, package = decode_adapter()
    handoff, scheduler = own_scheduler.handoff, package.scheduler
    given = Submission("r1", [4, 5, 6, 7, 8, 9], 3, 0, [8, 9], b"", first_token=7)
    adapter.add(given)
    table = np.array([3, 1, 2], np.int32)
    lease = SimpleNamespace(block_table=table, num_hit_blocks=num_hit_blocks)
    others = SimpleNamespace(request_id="r2", lease=None)
    receiving = SimpleNamespace(request_id="r1", lease=lease)
    vars(scheduler)["_side"] = SimpleNamespace(receiving=[others, receiving])
    key = handoff.AttemptKey("r1", 1)
    later = handoff.Grant(handoff.Header(handoff.AttemptKey("r2", 1), 1, grant=6), 0, 2)
    adapter._grants = [handoff.Grant(handoff.Header(key, 1, grant=5), first_block, 2), later]
    runs = SimpleNamespace(request_id="r1", arrival=12, lease=None)
    answers: list[list[Any]] = [*([[Pull("a part")]] if part else []), [Started(runs)]]
    done = iter(answers)
    scheduler.calls.clear()

    def act() -> list[Any]:
        return next(done, [])

    vars(scheduler)["take_actions"] = act
    assert adapter.block_table("r1") == [3, 1, 2]
    received = adapter.receive()
    assert received == ("r1", 12, num_cached, num_on_device, [3, 1, 2])
    header = handoff.Header(key, 1, 1, 5)
    commit = handoff.Commit(
        header, int(part is not None), 7, 6, handoff.Hits(), stop_token_ids=(8, 9)
    )
    sent = [("receive", "p0", handoff.Send(header, 0, *part, 0))] if part else []
    assert [call for call in scheduler.calls if call[0] == "receive"] == [
        *sent, ("receive", "p0", commit)
    ]  # fmt: skip
    assert (("pulled", "a part") in scheduler.calls) == bool(part)
    assert adapter._grants == [later] and not adapter._asked
    assert adapter.requests == {"r1": runs}


@dataclass
class Pull:
    """An action of a decode scheduler, which wants a part."""

    part_id: Any


@dataclass
class Started:
    """An action of a decode scheduler, which runs a request."""

    request: Any


def test_a_grant_of_what_was_given_up_is_none() -> None:
    adapter, _ = decode_adapter()
    handoff = own_scheduler.handoff
    adapter.add(Submission("r1", [4], 1, 0, (), b""))
    grants = [
        handoff.Grant(handoff.Header(handoff.AttemptKey(name, attempt), 1, grant=5), 1, 2)
        for name, attempt in (("r1", 1), ("r1", 2), ("r2", 1))
    ]
    for grant in grants:
        adapter._act(Post(grant))
    assert adapter._grants == grants[:1]


# What an adapter itself holds, makes and judges


NODE = {"prefill_blocks": 9, "decode_blocks": 9, "host_blocks": 0, "block_size": 2,
        "num_groups": 1, "budget": 5, "max_running": 4, "order": "early", "reserve_tokens": 6,
        "max_overtaken": 256}  # fmt: skip


@pytest.mark.parametrize(
    "make",
    [
        lambda: cache_adapter.make_factory()(8, 2),
        lambda: tier_adapter.make_factory()({**DECODE, "hits": 0, "law": 0, "at_once": 0}),
        lambda: scheduler_adapter.make_factory()(CONFIG),
        lambda: tiered_scheduler_adapter.make_factory()(DECODE),
        lambda: tiered_scheduler_adapter.make_factory()({**DECODE, "decode": 1}),
        lambda: handoff_adapter.PrefillNode(NODE, 1, 0),
        lambda: handoff_adapter.DecodeNode(NODE, 1, 0),
    ],
    ids=["cache", "tiers", "mixed", "tiered mixed", "tiered decode", "prefill node", "decode node"],
)
def test_a_broken_invariant_of_a_manager_is_found(make: Callable[[], Any]) -> None:
    adapter = make()
    adapter.check()
    adapter.manager._pool.allocate(1)  # nobody owns it
    with pytest.raises(AssertionError):
        adapter.check()


@pytest.mark.parametrize(
    ("make", "kinds"),
    [
        (scheduler_adapter.make_factory, ("MixedAdapter", "MixedAdapter")),
        (tiered_scheduler_adapter.make_factory, ("TieredMixedAdapter", "TieredDecodeAdapter")),
    ],
)
def test_a_factory_makes_adapters_of_its_package_with_its_promises(
    make: Any, kinds: tuple[str, str]
) -> None:
    package, promises = DecodePackage(), SchedulerPromises(max_overtaken=4)
    for number, kind in enumerate(kinds):
        config = {**DECODE, "decode": number}
        ours, other = make()(config), make(package, promises)(config)
        assert type(ours).__name__ == type(other).__name__ == kind
        assert ours.package is own_scheduler and other.package is package
        assert other.promises == promises
        longest = 9 * 2 * 7
        assert ours.promises == replace(SchedulerPromises.all(), max_overtaken=longest)
        names = [type(each.scheduler).__name__ for each in (ours, other)]
        assert names[0].endswith("Scheduler") and names[1] == "Recorder"


@pytest.mark.parametrize("write", ["back", "through", "exclusive"])
def test_a_manager_over_tiers_writes_as_its_configuration_says(write: WritePolicy) -> None:
    manager = over_tiers(None)._make_manager({**DECODE, "write": write})
    held: list[Any] = []
    for made in (manager, CacheManager(9, 2, host=HostConfig(4, write))):
        tiers = made.tiers
        assert tiers is not None
        lease = made.admit(made.match([1, 2, 3, 4]))
        made.publish(lease, [1, 2, 3, 4])
        made.release(lease)
        for _ in range(2):
            made.evict(9)
            for copy in tiers.take_operations():
                tiers.complete(copy.id, [True] * copy.num_blocks, fenced=True)
            held.append(made.stats())
            made.admit(made.match([1, 2, 3, 4, 5]))
            held.append(made.stats())
    assert held[:4] == held[4:]


def test_what_a_request_has_generated_is_shown_as_a_copy() -> None:
    adapter, _ = adapter_of()
    tokens = np.array([4, 5, 6, 7], np.int32)
    adapter.requests["r1"] = made = SimpleNamespace(
        tokens=tokens, num_prompt_tokens=2, output_tokens=[6, 7], finish_reason="stop"
    )
    output = adapter.output("r1")
    assert output == [6, 7] and output is not made.output_tokens and adapter.reason("r1") == "stop"
    made.output_tokens = [6]
    with pytest.raises(AssertionError, match="has two outputs"):
        adapter.output("r1")


@pytest.mark.parametrize("changed", ["prompt", "stop"])
def test_a_request_that_changes_what_it_is_given_is_found(changed: str) -> None:
    adapter, package = adapter_of()

    def make(name: str, prompt: Any, *_: Any, stop_token_ids: list[int], **named: Any) -> None:
        (prompt if changed == "prompt" else stop_token_ids)[0] = 1

    vars(package)["Request"] = make
    with pytest.raises(Violation, match="a request was given") as caught:
        adapter.add(Submission("r1", [4, 5, 6], 3, 0, [8, 9], b""))
    assert caught.value.rule.code == "C3"
    given, found = ([4, 5, 6], [8, 9]), {"prompt": ([1, 5, 6], [8, 9]), "stop": ([4, 5, 6], [1, 9])}
    assert caught.value.why == f"a request was given {given}, and changed it to {found[changed]}"
    assert not adapter.requests and not package.scheduler.calls


def test_the_tokens_of_an_update_are_lent() -> None:
    adapter, package = adapter_of()
    kept: list[Any] = []

    def update(_: Any, tokens: Any) -> list[Any]:
        kept.extend((tokens, tokens.tolist()))
        return []

    vars(package.scheduler)["update"] = update
    adapter.plans = deque(["a plan"])
    tokens = [7, 8]
    assert adapter.update(tokens) == [] and tokens == kept[1] == [7, 8]
    assert kept[0].tolist() == [-7, -7], "a scheduler that keeps them finds others"


def test_what_can_be_evicted_is_available() -> None:
    adapter, _ = adapter_of()
    manager = adapter.manager
    lease = manager.admit(manager.match([1, 2, 3]))
    manager.publish(lease, [1, 2, 3])
    assert adapter.available() == 4
    manager.release(lease)
    assert adapter.available() == 5 and manager.stats().free_blocks == 4


@pytest.mark.parametrize("num_blocks", [3, 4, 5, 6])
@pytest.mark.parametrize("lengths", [(1, 3), (2, 3), (2, 4), (4, 2, 1)])
def test_a_manager_that_extends_one_at_a_time_is_equivalent(
    num_blocks: int, lengths: tuple[int, ...]
) -> None:
    """Also in what is refused, with which numbers, and that nothing changes then."""
    seen = []
    for make in (CacheManager, scheduler_adapter.SinglesManager):
        manager = make(num_blocks, 2)
        try:
            leases = [manager.admit(manager.match([7 + length] * length)) for length in lengths]
        except OutOfBlocksError:
            return  # too few even for the leases
        told: list[Any] = []
        for rows in ([], [lease.row for lease in reversed(leases)]):
            for _ in range(3):
                try:
                    manager.extend_batch(rows)
                except OutOfBlocksError as error:
                    told.append((error.needed, error.available))
                manager.check()
                told += [(each.num_tokens, each.num_blocks, manager.available) for each in leases]
        seen.append(told)
    assert seen[0] == seen[1]


def test_keys_whose_use_is_to_be_reported_are_taken_with_the_operations() -> None:
    tiers = Recorder(take_operations=[], take_used=[b"k"])
    assert over_tiers(tiers).take() == []
    assert tiers.calls == [("take_used",), ("take_operations",)]
