"""A match may be as old as one likes: admitting it does what admitting a new one does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.kvcache import CacheManager, HostConfig, Match, OutOfBlocksError

PROMPTS: list[tuple[bytes, list[int]]] = [
    (namespace, tokens)
    for namespace in (b"", b"a")
    for tokens in ([1, 1], [1, 1, 2, 2], [1, 1, 2, 2, 3, 3, 3], [1, 1, 4, 4], [5])
]
CALLS = ["match", "match", "admit", "admit", "publish", "release", "evict", "extend", "complete"]


class Driver:
    """Serves requests as they are drawn, and keeps the matches that it has made."""

    def __init__(self, manager: CacheManager) -> None:
        self.manager = manager
        self.matches: list[tuple[Match, bytes, list[int]]] = []
        self.leases: list[tuple[Any, list[int]]] = []

    def call(self, name: str, prompt: int, place: int) -> None:
        manager, (namespace, tokens) = self.manager, PROMPTS[prompt]
        if name == "match":
            self.matches.append((manager.match(tokens, namespace), namespace, tokens))
        elif name == "admit":
            try:
                lease = manager.admit(manager.match(tokens, namespace))
            except OutOfBlocksError:
                return
            self.leases.append((lease, tokens))
        elif name == "evict":
            manager.evict(place)
        elif name == "reset":
            manager.reset()
            self.leases.clear()
        elif name == "complete":
            self.complete()
        elif self.leases:
            lease, tokens = self.leases[place % len(self.leases)]
            if name == "extend" and manager.available:
                manager.extend(lease, 1)
            elif name == "publish" and lease.loading is None:
                manager.publish(lease, tokens)
            elif name == "release":
                manager.release(lease)
                self.leases.remove((lease, tokens))

    def complete(self) -> None:
        """End the copies that the manager has asked for."""
        if self.manager.tiers is not None:
            for operation in self.manager.tiers.take_operations():
                self.manager.tiers.complete(operation.id, [True] * operation.num_blocks)

    def outcome(self, place: int, *, is_new: bool) -> object:
        """Admit the tokens of a match on a copy, by itself or by a new one, and end the request."""
        twin = copy.deepcopy(self)
        manager, (match, namespace, tokens) = twin.manager, twin.matches[place]
        if is_new:
            match = manager.match(tokens, namespace)
        seen: list[object] = [manager.available_after(match)]
        try:
            lease = manager.admit(match)
        except OutOfBlocksError as error:
            return [*seen, str(error)]
        manager.check()
        seen += [lease.num_hit_blocks, lease.block_table.tolist(), lease.loading is None]
        twin.complete()
        manager.publish(lease, tokens)
        manager.release(lease)
        manager.check()
        hits = [manager.match(tokens, namespace).num_blocks for namespace, tokens in PROMPTS]
        return [*seen, hits, manager.available]


@pytest.mark.parametrize("host_blocks", [0, 6])
@settings(max_examples=40)
@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from([*CALLS, "reset"]),
            st.integers(0, len(PROMPTS) - 1),
            st.integers(0, 5),
        ),
        min_size=6,
        max_size=25,
    )
)
def test_an_old_match_is_admitted_as_a_new_one(
    host_blocks: int, calls: list[tuple[str, int, int]]
) -> None:
    host = HostConfig(host_blocks, "back") if host_blocks else None
    driver = Driver(CacheManager(8, 2, host=host))
    for call in calls:
        driver.call(*call)
        for place in range(max(0, len(driver.matches) - 4), len(driver.matches)):
            by_old = driver.outcome(place, is_new=False)
            assert by_old == driver.outcome(place, is_new=True), driver.matches[place]
