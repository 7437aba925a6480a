"""Our adapters pass on what they are given, and return what they get, unchanged."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from radixkv import scheduler as own_scheduler
from radixkv.kvcache import RequestTooLargeError
from radixkv.scheduler.fuzz.scheduler_adapter import BETWEEN, IN_FLIGHT, MixedAdapter
from radixkv.spec.adapters.scheduler import SchedulerPromises, Submission

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
