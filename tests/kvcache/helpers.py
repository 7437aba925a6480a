"""Helpers that bring a manager into a state."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.kvcache import CacheManager, Lease


def start(manager: CacheManager, tokens: Sequence[int], namespace: bytes = b"") -> Lease:
    """Admit a request for tokens; nothing of it is published yet."""
    return manager.admit(manager.match(tokens, namespace))


def serve(manager: CacheManager, tokens: Sequence[int], namespace: bytes = b"") -> list[int]:
    """Run a whole request: its full blocks stay cached. Returns its block table."""
    lease = start(manager, tokens, namespace)
    manager.publish(lease, tokens)
    table = lease.block_table.tolist()
    manager.release(lease)
    manager.check()
    return table


def hit(manager: CacheManager, tokens: Sequence[int], namespace: bytes = b"") -> int:
    """How many blocks of tokens are published."""
    return manager.match(tokens, namespace).num_blocks
