"""Calls that must be refused, each with the type and the text of its error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from radixkv.kvcache import Lease

if TYPE_CHECKING:
    from .harness import Harness, Request

Call: TypeAlias = tuple[str, str, Callable[[], object]]
"""The name of the error, or "" if the call is harmless; its text; the call."""


def wrong_calls(harness: Harness) -> Iterator[Call]:
    manager = harness.manager
    bad_namespace: Any = "tenant"
    yield "CountError", "num_blocks must be at least 0, got -1", lambda: manager.evict(-1)
    yield (
        "TokenError",
        "token 1 is 2147483648, outside int32",
        lambda: manager.match([0, 2**31]),
    )
    yield (
        "NamespaceError",
        "namespace must be bytes, got 'tenant'",
        lambda: manager.match([0], bad_namespace),
    )


def wrong_calls_of(harness: Harness, request: Request) -> Iterator[Call]:
    manager, lease, room = harness.manager, request.lease, harness.room(request)
    yield (
        "LeaseError",
        f"{room + 1} tokens published on a lease with room for {room}",
        lambda: manager.publish(lease, [0] * (room + 1)),
    )
    yield (
        "CountError",
        "num_tokens must be at least 0, got -2",
        lambda: manager.extend(lease, -2),
    )
    yield (
        "LeaseError",
        f"rows [{lease.row}, {lease.row}] name a lease twice",
        lambda: manager.extend_batch(np.array([lease.row, lease.row], np.int32)),
    )
    needed = len(harness.free_ids) + harness.oracle.num_idle + 1
    yield (
        "OutOfBlocksError",
        f"needs {needed} blocks, but only {needed - 1} are free or evictable",
        lambda: manager.extend(lease, needed * harness.config.block_size),
    )


def calls_of_ended(harness: Harness, lease: Lease) -> Iterator[Call]:
    manager = harness.manager
    message = "the lease was released, or is of another manager"
    if lease.epoch != manager.epoch:
        message = f"the lease is of epoch {lease.epoch}, the cache of {manager.epoch}"
        yield "", "", lambda: manager.release(lease)  # it ended with the reset: harmless
    else:
        yield "LeaseError", message, lambda: manager.release(lease)
    yield "LeaseError", message, lambda: manager.publish(lease, [])
    yield "LeaseError", message, lambda: manager.extend(lease, 1)
    yield "LeaseError", message, lambda: manager.next_block(lease, [0, 0])
