"""Snapshot of the host tier of our cache, read from its tree and its matches."""

from __future__ import annotations

from typing import Any

from ....spec.adapters.tiers import Prefix, TierSnapshot
from ....spec.rules.rule import require
from ....spec.rules.tiers import T1
from ..protocols import TiersUnderTest


def snapshot_of(adapter: TiersUnderTest) -> TierSnapshot:
    """Return the state of the host tier."""
    _check_matches(adapter)
    tiers = adapter.tiers
    found: dict[str, dict[Prefix, int]] = {"host": {}, "offloading": {}, "promoting": {}}
    for namespace, root in tiers.state.tree.roots.items():
        stack: list[tuple[Any, tuple[int, ...]]] = [(child, ()) for child in root.children.values()]
        while stack:
            node, before = stack.pop()
            tokens = _add_node(adapter.manager.block_size, namespace, node, before, found)
            stack += [(child, tokens) for child in node.children.values()]
    idle: list[int] = []
    for run in tiers.state.host.idle_runs():
        blocks = memoryview(run.blocks).cast("i").tolist()
        idle += blocks if tiers.state.host.is_redundant(run) else reversed(blocks)
    stats = tiers.stats()
    return TierSnapshot(
        tiers.state.host.pool.free_ids().tolist(),
        found["host"],
        found["offloading"],
        set(found["promoting"]),
        idle,
        {
            **{name: getattr(stats, name) for name in stats.__dataclass_fields__},
            "operations": tiers.num_open_operations,
        },
    )


def _check_matches(adapter: TiersUnderTest) -> None:
    """Check that a match which counts as current equals a new one."""
    for name, (match, array) in adapter.matches.items():
        if match._version == adapter.tiers.state.tree.version:
            now = adapter.manager.match(array, match._namespace)
            same = (match.num_blocks, match.num_host_blocks, match.host_runs) == (
                now.num_blocks, now.num_host_blocks, now.host_runs
            )  # fmt: skip
            require(same, T1, "the match of {} is outdated, but counts as current", name)


def _add_node(
    block_size: int,
    namespace: bytes,
    node: Any,
    before: tuple[int, ...],
    found: dict[str, dict[Prefix, int]],
) -> tuple[int, ...]:
    """Add the host blocks of a node by state and prefix; return the tokens up to its end."""
    end = len(before) + node.num_blocks * block_size
    tokens = (*before, *memoryview(node.tokens).cast("i").tolist())[:end]
    run = node.host
    if run is not None:
        state = "offloading" if run.in_flight else "promoting" if run.promoting else "host"
        if state != "promoting" or not node.device_blocks:
            ids = memoryview(run.blocks).cast("i").tolist()
            for index, block in enumerate(ids, 1):
                found[state][namespace, tokens[: len(before) + index * block_size]] = block
    return tokens
