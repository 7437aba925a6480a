"""No call changes what it is given: the calls of all adapters are checked, and ours show it."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from radixkv.kvcache.storage.keys import StorageNamespace
from radixkv.scheduler.fuzz import tier_adapter
from radixkv.scheduler.fuzz.lent_tokens import lend, listed, take_back
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
