"""Rules of an order, by states that break them: each pair of neighbours counts."""

from __future__ import annotations

from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest

from radixkv.spec.harness.cache import checks
from radixkv.spec.model import scheduler_policies
from radixkv.spec.rules.rule import Violation


def entry(last_use: int, depth: int) -> Any:
    return SimpleNamespace(last_use=last_use, depth=depth)


def test_idle_blocks_are_in_order_of_use_and_leaves_before_their_parents() -> None:
    unused = {1: entry(5, 0), 2: entry(5, 1), 3: entry(5, 2), 4: entry(7, 0)}
    model: Any = SimpleNamespace(unused=lambda: unused, promises=SimpleNamespace(lru=True))
    for idle in permutations(unused):
        shot: Any = SimpleNamespace(idle=list(idle))
        if idle == (3, 2, 1, 4):
            checks._check_idle(model, shot)
            continue
        with pytest.raises(Violation) as caught:
            checks._check_idle(model, shot)
        text = f"the idle blocks {shot.idle} are not in order"
        assert (caught.value.rule.code, caught.value.why) == ("W5", text)


@pytest.mark.parametrize("orders", list(permutations(range(4), 2)))
def test_nobody_goes_on_who_comes_after_any_that_is_preempted(orders: tuple[int, ...]) -> None:
    requests: list[Any] = [SimpleNamespace(order=order) for order in range(4)]
    preempted = [requests[order] for order in orders]
    running = [each for each in requests if each not in preempted]
    model: Any = SimpleNamespace(promised={"policy"})
    step: Any = SimpleNamespace(preempted=preempted, running=running)
    if set(orders) == {2, 3}:
        scheduler_policies.check_preempted(model, step)
        return
    with pytest.raises(Violation) as caught:
        scheduler_policies.check_preempted(model, step)
    assert caught.value.rule.code == "Q26"
