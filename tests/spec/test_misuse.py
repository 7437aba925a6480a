"""Wrong calls of the fuzzer: a refusal must have the whole text that is wanted."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from radixkv import kvcache
from radixkv.kvcache import CountError
from radixkv.scheduler.fuzz import cache_adapter
from radixkv.scheduler.fuzz import misuse as misuse_module
from radixkv.scheduler.fuzz.misuse import Call, make
from radixkv.scheduler.fuzz.tiers import adapter as tier_adapter
from radixkv.scheduler.fuzz.tiers.misuse import wrong_calls
from radixkv.spec.rules import cache as rules
from radixkv.spec.rules.rule import Violation

ADAPTER: Any = SimpleNamespace(kvcache=kvcache)


def refuse(text: str) -> Callable[[], Any]:
    def call() -> None:
        raise CountError(text)

    return call


@pytest.mark.parametrize(
    ("wanted", "call", "found"),
    [
        ("CountError: no", refuse("no"), None),
        ("CountError: no", refuse("no, never"), "CountError: no, never"),
        ("CountError: no", refuse("n"), "CountError: n"),
        ("CountError: no", lambda: None, ""),
        ("", lambda: None, None),
        ("", refuse("no"), "CountError: no"),
    ],
)
def test_a_wrong_call_has_the_wanted_end_and_no_other(
    wanted: str, call: Callable[[], Any], found: str | None
) -> None:
    if found is None:
        make(ADAPTER, (rules.R3, wanted, call))
        return
    with pytest.raises(Violation) as caught:
        make(ADAPTER, (rules.R3, wanted, call))
    assert caught.value.rule is rules.R3
    assert caught.value.why == f"refused with {found!r}, should be {wanted!r}"


# Each wrong call of our adapters, on a manager that swallows it

NUM_KINDS = 13
"""As many as there are calls in the longest list of the fuzzer."""


def new_cache(num_blocks: int) -> Any:
    return cache_adapter.make_factory()(num_blocks, 2)


def new_tiers(storage: int = 0) -> Any:
    config = {"num_blocks": 8, "block_size": 2, "host_blocks": 4, "write": "back", "hits": 0,
              "storage": storage, "law": 0, "at_once": 0}  # fmt: skip
    return tier_adapter.make_factory()(config)


def used(adapter: Any) -> Any:
    """Let a request end by a reset, one by a release, and one live."""
    adapter.admit("r1", [1, 2, 3], b"")
    adapter.reset()
    adapter.admit("r2", [1, 2, 3], b"")
    adapter.release("r2")
    adapter.admit("r3", [1, 2, 3, 4, 5], b"")
    return adapter


def in_flight(adapter: Any) -> Any:
    adapter.begin_step()
    return adapter


def parked(*, saved: bool) -> Any:
    adapter = new_tiers()
    adapter.report_to(Mock())
    adapter.admit("r1", [1, 2, 3, 4, 5], b"")
    assert adapter.park("r1", [1, 2, 3, 4], "host")
    if saved:
        complete_all(adapter)
    assert adapter.parked("r1")[1] == saved
    return adapter


def complete_all(adapter: Any) -> None:
    for copy in adapter.take():
        assert adapter.complete(copy.id, [True] * copy.num_blocks, True)


def loading() -> Any:
    adapter = new_tiers()
    adapter.admit("r1", [1, 2, 3, 4], b"")
    adapter.publish("r1", [1, 2, 3, 4])
    adapter.release("r1")
    adapter.evict(2)
    complete_all(adapter)
    adapter.evict(2)
    adapter.admit("r2", [1, 2, 3, 4, 5], b"")
    assert adapter.loading("r2") is not None
    return adapter


STATES: dict[str, tuple[Callable[[], Any], dict[str, int]]] = {
    "new": (lambda: new_cache(8), {"R5": 32, "all": 102}),
    "used": (lambda: used(new_cache(9)), {"R5": 36, "R3": 5, "R4": 5, "all": 297}),
    "a step in flight": (
        lambda: in_flight(used(new_cache(8))),
        {"R5": 35, "R3": 5, "R4": 5, "all": 296},
    ),
    "tiers with storage": (lambda: used(new_tiers(1)), {"R5": 45, "R3": 5, "R4": 5, "all": 999}),
    "tiers": (lambda: used(new_tiers()), {"R5": 46, "R3": 5, "R4": 5, "all": 1_077}),
    "parking": (lambda: parked(saved=False), {"R5": 11, "all": 429}),
    "parked": (lambda: parked(saved=True), {"R5": 41, "all": 453}),
    "loading": (loading, {"R5": 50, "R3": 5, "all": 1_389}),
}
"""Adapters by state, and how many different wrong calls belong to each, by the rule that they
break; with equal ones, and harmless ones, there are more in all."""


def misuse_all(adapter: Any) -> None:
    for kind in range(NUM_KINDS * 3):
        for name in ["", *adapter.leases]:
            adapter.misuse(kind, name)


def methods_of(call: Any) -> tuple[str, ...]:
    """Return the names of the methods that a wrong call calls."""
    if isinstance(call, partial):
        return (call.func.__name__,)
    names: tuple[str, ...] = (call.__name__, *call.__code__.co_names)
    return names


def swallow(patch: pytest.MonkeyPatch, swallowed: str, methods: Collection[str]) -> None:
    """Let some methods of the manager return None where they would refuse with a text."""

    def wrapped(method: Any) -> Any:
        @wraps(method)
        def call(*given: Any, **named: Any) -> Any:
            try:
                return method(*given, **named)
            except kvcache.RadixKVError as error:
                if f"{type(error).__name__}: {error}" == swallowed:
                    return None
                raise

        return call

    for kind in (kvcache.CacheManager, kvcache.BlockPool, kvcache.Tiers, kvcache.HostConfig):
        for name, method in vars(kind).items():
            if inspect.isfunction(method) and (name in methods or name.startswith("__")):
                patch.setattr(kind, name, wrapped(method))


@pytest.mark.parametrize("state", STATES)
def test_each_wrong_call_is_made_and_found_if_it_is_not_refused(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_adapter, number = STATES[state]
    made: Counter[tuple[str, str, tuple[str, ...]]] = Counter()

    def note(adapter: Any, wrong: Call) -> None:
        rule, text, call = wrong
        made[rule.code, text, methods_of(call)] += 1
        make(adapter, wrong)

    with monkeypatch.context() as patch:
        for module in (misuse_module, tier_adapter):
            patch.setattr(module, "make", note)
        misuse_all(make_adapter())
    different = Counter(code for code, _, _ in made)
    assert {**different, "all": made.total()} == number
    for code, text, methods in made:
        if text:
            adapter = make_adapter()
            with monkeypatch.context() as patch:
                swallow(patch, text, methods)
                with pytest.raises(Violation) as caught:
                    misuse_all(adapter)
            why = f"refused with '', should be {text!r}"
            assert (caught.value.rule.code, caught.value.why) == (code, why)


@pytest.mark.parametrize("held", [{"num_blocks": 1}, {"num_tokens": 1}, {"loading": 4}])
def test_an_ended_lease_that_holds_something_is_found(held: dict[str, int]) -> None:
    adapter = new_cache(8)
    nothing = {"num_blocks": 0, "num_tokens": 0, "loading": None}
    adapter.ended = [SimpleNamespace(epoch=adapter.manager.epoch, **{**nothing, **held})]
    with pytest.raises(Violation, match="a released lease has") as caught:
        adapter.misuse(0, "")
    assert caught.value.rule is rules.R3


def test_a_block_table_that_can_be_written_is_found() -> None:
    adapter = used(new_cache(8))
    adapter.leases["r4"] = SimpleNamespace(block_table=np.zeros(1, np.int32))
    with pytest.raises(Violation, match="a block table can be written") as caught:
        adapter.misuse(0, "")
    assert caught.value.rule is rules.R5


def test_each_of_the_ended_leases_is_checked() -> None:
    adapter = new_cache(8)
    nothing = SimpleNamespace(epoch=adapter.manager.epoch, num_blocks=0, num_tokens=0, loading=None)
    held = SimpleNamespace(epoch=adapter.manager.epoch, num_blocks=1, num_tokens=0, loading=None)
    for ended in ([held, nothing, nothing], [nothing, held, nothing], [nothing, nothing, held]):
        adapter.ended = ended
        with pytest.raises(Violation, match="a released lease has"):
            adapter.misuse(0, "")


def test_an_error_of_another_kind_is_none_of_a_wrong_call() -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        make(ADAPTER, (rules.R3, "ValueError: no", fail))


def test_steps_and_rows_that_were_in_use_make_no_call_legal() -> None:
    """The first wrong calls come when steps have ended, and rows between live ones are free."""
    for released in ("r1", "r2", "r3"):
        adapter = new_cache(8)
        for name in ("r1", "r2", "r3"):
            adapter.admit(name, [1], b"")
        for _ in range(2):
            adapter.begin_step()
            adapter.end_step()
        adapter.release(released)
        misuse_all(adapter)
        adapter.check()
    texts = [text for _, text, _ in misuse_module._independent_calls(adapter)]
    assert "StepError: a step ends, and all 2 that began have ended" in texts
    adapter.begin_step()
    texts = [text for _, text, _ in misuse_module._independent_calls(adapter)]
    assert not any(text.startswith("StepError") for text in texts)


def test_wrong_calls_are_made_with_each_lease_and_each_parked_request() -> None:
    adapter = new_tiers()
    for number in range(4):
        name = f"r{number}"
        adapter.admit(name, [number, number], b"")
        adapter.publish(name, [number, number])
    nobody = len(list(wrong_calls(new_tiers())))
    with_leases = len(list(wrong_calls(adapter)))
    assert (with_leases - nobody) % 4 == 0 and with_leases > nobody
    for name in ("r0", "r1"):
        assert adapter.park(name, [int(name[1])] * 2, "host")
    complete_all(adapter)
    of_two = (with_leases - nobody) // 2
    assert len(list(wrong_calls(adapter))) == nobody + of_two + 2
