"""No call changes what it is given: the calls of all adapters are checked, and ours show it."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from radixkv import kvcache as own_kvcache
from radixkv.kvcache import RecycleError
from radixkv.kvcache.storage.keys import StorageNamespace
from radixkv.scheduler.fuzz import pool_adapter
from radixkv.scheduler.fuzz.lent_tokens import lend, listed, take_back
from radixkv.scheduler.fuzz.scheduler_adapter import MixedAdapter
from radixkv.scheduler.fuzz.tiers import adapter as tier_adapter
from radixkv.spec.adapters.cache import Manager
from radixkv.spec.adapters.tier_target import TierTarget
from radixkv.spec.adapters.tiers import TierManager
from radixkv.spec.harness.random_engine import run
from radixkv.spec.harness.tiers.world import TierSubject
from radixkv.spec.rules.rule import Violation

from .toys import Plain

TAKE_LISTS = [
    (name, [number for number, each in enumerate(found) if "Sequence" in str(each.annotation)])
    for kind in (Manager, TierManager)
    for name, method in vars(kind).items()
    if inspect.isfunction(method) and not name.startswith("_")
    and (found := list(inspect.signature(method).parameters.values())[1:])
]  # fmt: skip
"""Methods of a manager, with the places of their arguments that are lists."""


@pytest.mark.parametrize(("method", "places"), [each for each in TAKE_LISTS if each[1]])
def test_a_changed_argument_of_any_method_is_a_violation(method: str, places: list[int]) -> None:
    def changing(self: Any, *arguments: Any) -> int:
        arguments[places[0]].append(7)
        return 0

    adapter = type("Mine", (Plain,), {method: changing})
    arguments: list[Any] = [[1, 2] if place in places else "r1" for place in range(places[0] + 1)]
    with pytest.raises(Violation) as caught:
        TierTarget(adapter, 4, 2, "api").ask(method, *arguments)
    assert caught.value.rule.code == "C3"
    assert caught.value.why == f"{method} was given [1, 2], and changed it to [1, 2, 7]"
    assert arguments[places[0]] == [1, 2]


def test_these_are_the_methods_that_take_lists() -> None:
    assert {name for name, places in TAKE_LISTS if places} == {
        "admit", "append", "publish", "complete", "tier_match", "park", "fork", "prefetch", "keys",
        "reset_but",
    }  # fmt: skip


def test_storage_keys_that_change_their_tokens_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    block_keys = StorageNamespace.block_keys

    def changing(self: StorageNamespace, tokens: Any, *more: Any) -> list[bytes]:
        keys = block_keys(self, tokens, *more)
        tokens[:1] = [int(token) + 1 for token in tokens[:1]]
        return keys

    monkeypatch.setattr(StorageNamespace, "block_keys", changing)
    found = run(TierSubject(tier_adapter.make_factory()), 1, 1_000).finding
    assert found is not None and found.rule.startswith("C3"), found


@pytest.mark.parametrize("number", range(18))
def test_tokens_are_lent_in_every_form_and_come_back(number: int) -> None:
    tokens = list(range(number))
    lent = lend(tokens)
    assert listed(lent) == tokens
    is_list, is_read_only = number % 4 == 3, number % 4 == 0
    assert isinstance(lent, list) == is_list
    if not isinstance(lent, list):
        assert lent.flags.writeable != is_read_only
        assert lent.dtype == (np.int64 if number % 8 == 5 else np.int32)
        if not is_read_only:
            lent += 1
    take_back(lent, tokens)
    first = 0 if is_list or is_read_only else 1
    assert tokens == list(range(first, first + number))
    assert lent is tokens or listed(lent) == [-7] * number


class Changing:
    """Stands for a manager: changes and keeps the arrays that it is given, and may then raise."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.kept: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> Any:
            for each in given:
                if isinstance(each, np.ndarray):
                    each += 1
                    self.kept.append(each)
            if self.error is not None:
                raise self.error
            return SimpleNamespace(num_blocks=0, num_host_blocks=0, first_block=0, num_tokens=0)

        return call


CONFIG = {"num_blocks": 8, "block_size": 2, "host_blocks": 4, "write": "back", "hits": 0,
          "storage": 1, "law": 0, "at_once": 0}  # fmt: skip
LENDING: dict[str, Callable[[Any, list[int]], object]] = {
    "publish": lambda adapter, tokens: adapter.publish("r1", tokens),
    "tier_match": lambda adapter, tokens: adapter.tier_match(tokens, b""),
    "park": lambda adapter, tokens: adapter.park("r1", tokens, "host"),
    "keys": lambda adapter, tokens: adapter.keys(tokens, b""),
    "prefetch": lambda adapter, tokens: adapter.prefetch("r1", tokens, b""),
    "recycle": lambda adapter, ids: adapter.recycle(ids),
    "update": lambda adapter, tokens: adapter.update(tokens),
}


@pytest.mark.parametrize("error", [None, RecycleError([], 2), KeyError("a refusal of its own")])
@pytest.mark.parametrize("word", LENDING)
def test_our_adapters_show_what_a_call_changes_and_leave_it_nothing(
    word: str, error: Exception | None
) -> None:
    changing: Any = Changing(error)
    adapter: Any
    if word == "recycle":
        adapter = pool_adapter.PoolAdapter(own_kvcache, 4)
        adapter.pool = changing
    elif word == "update":
        adapter = MixedAdapter.__new__(MixedAdapter)
        adapter.plans, adapter.scheduler = deque([None]), changing
    else:
        adapter = tier_adapter.TierAdapter(own_kvcache, CONFIG)
        adapter.manager = adapter.tiers = adapter._keys = changing
        adapter.leases["r1"] = None
    given = [5, 6]
    with suppress(KeyError, RecycleError, TypeError):  # some results must be iterable
        LENDING[word](adapter, given)
    assert given == [6, 7], "the world sees the change"
    assert [each.tolist() for each in changing.kept] == [[-7, -7]], "what is kept is overwritten"


@pytest.mark.parametrize("error", [None, KeyError("a refusal of its own")])
@pytest.mark.parametrize("word", ["append_batch", "next_block"])
def test_our_adapter_judges_rows_and_tokens_of_its_own(word: str, error: Exception | None) -> None:
    """The world does not know these lists, so the adapter says that they were changed."""
    changing: Any = Changing(error)
    adapter: Any = tier_adapter.TierAdapter(own_kvcache, CONFIG)
    adapter.manager = changing
    for row in (1, 2):
        adapter.leases[f"r{row}"] = SimpleNamespace(row=row, num_blocks=0, block_table=[])
    with pytest.raises(KeyError if error else Violation):
        if word == "append_batch":
            adapter.append_batch(["r1", "r2"])
        else:
            adapter._next_block("r1", [1, 2])
    assert [each.tolist() for each in changing.kept] == [[-7, -7]]
