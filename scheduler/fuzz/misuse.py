"""Wrong calls to our cache manager, each with the error that it must raise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ...spec.rules.cache import R3, R4, R5
from ...spec.rules.rule import Rule, require
from .protocols import CacheUnderTest

Int64Array: TypeAlias = npt.NDArray[np.int64]

Call: TypeAlias = tuple[Rule, str, Callable[[], object]]
"""The rule that breaks if the call is not refused; the type and text of the error, or "" for a
harmless call; the call."""


class _DeviceArray:
    """Stands for an array of JAX, which NumPy can read unless it was deleted."""

    def __init__(self, values: Int64Array | None) -> None:
        self._values = values

    def __array__(self, dtype: object = None, copy: object = None) -> Int64Array:
        if self._values is None:
            raise RuntimeError("it was deleted")
        return self._values


def misuse(adapter: CacheUnderTest, kind: int, name: str, *, is_first: bool) -> None:
    """Make some wrong calls; later checks reveal whether they changed anything.

    Args:
        adapter: Adapter of the manager to call.
        kind: Selects the calls: to the manager, with rows, with a live lease, with an ended lease.
        name: A request that holds blocks, or "".
        is_first: Make those calls too that depend only on their arguments.
    """
    for lease in adapter.ended:
        if lease.epoch == adapter.manager.epoch:
            held = lease.num_blocks, lease.num_tokens, lease.loading
            require(held == (0, 0, None), R3, "a released lease has {} blocks, tokens, loads", held)
    for lease in adapter.leases.values():
        require(not lease.block_table.flags.writeable, R5, "a block table can be written")
    of_each = [list(_wrong_arguments(adapter)), list(_wrong_rows(adapter))]
    if name:
        of_each.append(list(_wrong_of(adapter, adapter.leases[name])))
    if adapter.ended:
        of_each.append(list(_wrong_of_ended(adapter, adapter.ended[kind % len(adapter.ended)])))
    for calls in of_each:
        make(adapter, calls[kind % len(calls)])
    for call in _independent_calls(adapter) if is_first else ():
        make(adapter, call)


def make(adapter: CacheUnderTest, wrong: Call) -> None:
    """Make a wrong call, and check its error."""
    rule, wanted, call = wrong
    try:
        call()
        found = ""
    except adapter.kvcache.RadixKVError as error:
        found = f"{type(error).__name__}: {error}"
    require(found == wanted, rule, "refused with {!r}, should be {!r}", found, wanted)


def _independent_calls(adapter: CacheUnderTest) -> Iterator[Call]:
    """Yield calls that depend only on their arguments; all of them are made, once."""
    manager, kvcache = adapter.manager, adapter.kvcache
    for name, sizes, message in (
        ("num_blocks", (0, 1), "must be at least 1, got 0"),
        ("block_size", (1, 0), "must be at least 1, got 0"),
        ("num_blocks", (2.0, 1), "must be an integer, got 2.0"),
    ):
        yield R5, f"CountError: {name} {message}", partial(kvcache.CacheManager, *sizes)
    yield R5, "", lambda: kvcache.CacheManager(1, np.int64(1))
    yield R5, "CountError: num_blocks must be at least 1, got 0", lambda: kvcache.BlockPool(0)
    yield (
        R5,
        "CountError: num_blocks must be at least 0, got -1",
        lambda: kvcache.BlockPool(1).allocate(-1),
    )
    yield (
        R5,
        "IdError: block ids must be int32, got float64",
        lambda: kvcache.BlockPool(1).recycle(np.zeros(1)),
    )
    for count in (True, 1.5):
        text = f"CountError: num_blocks must be an integer, got {count}"
        yield R5, text, partial(manager.evict, count)
    yield R5, "", lambda: manager.evict(np.int64(0))
    if adapter.steps_begun == adapter.steps_ended:
        text = f"StepError: a step ends, and all {adapter.steps_begun} that began have ended"
        yield R5, text, manager.end_step
    several: Any
    for several in (b"tenant", "tenant", 5, ["tenant"]):
        text = "NamespaceError: keep must be a list of namespaces, each of them bytes"
        yield R5, text, partial(manager.reset, several)
    least, most = -(2**31), 2**31 - 1
    text = f"TokenError: token 1 is {least - 1}, outside int32"
    yield R5, text, lambda: manager.match([0, least - 1])
    text = f"TokenError: token 1 is {most + 1}, outside int32"
    yield R5, text, lambda: manager.match(np.array([0, most + 1]))
    text = "TokenError: tokens cannot be read from _DeviceArray: it was deleted"
    yield R5, text, lambda: manager.match(_DeviceArray(None))
    for tokens in (
        [least, most],
        [np.int64(1), np.uint8(2)],
        np.array([least, most]),
        np.array([most], np.uint32),
        _DeviceArray(np.array([least, most])),
        np.zeros(3, np.dtype(np.int32, metadata={"of": "tokens"})),  # equal, not the same dtype
    ):
        yield R5, "", partial(manager.match, tokens)


def _wrong_arguments(adapter: CacheUnderTest) -> Iterator[Call]:
    manager = adapter.manager
    bad: Any = "tenant"
    yield R5, "CountError: num_blocks must be at least 0, got -1", lambda: manager.evict(-1)
    yield R5, "TokenError: token 1 is 2147483648, outside int32", lambda: manager.match([0, 2**31])
    yield (
        R5,
        "NamespaceError: namespace must be bytes, got 'tenant'",
        lambda: manager.match([0], bad),
    )
    yield R5, "TokenError: token 0 must be an integer, got 1.5", lambda: manager.match([1.5])
    yield R5, "TokenError: token 0 must be an integer, got True", lambda: manager.match([True, 0])
    text = "TokenError: tokens must have one dimension, got shape ()"
    nothing: Any = np.int32(1)
    yield R5, text, partial(manager.match, nothing)
    for nothing in (None, b"a", {1}):
        text = f"TokenError: tokens must be an int32 array or a list, got {nothing}"
        yield R5, text, partial(manager.match, nothing)
    yield (
        R5,
        "TokenError: tokens must be int32, got bool",
        lambda: manager.match(np.zeros(2, bool)),
    )
    yield (
        R5,
        "TokenError: tokens must have one dimension, got shape (1, 2)",
        lambda: manager.match(np.zeros((1, 2), np.int32)),
    )


def _wrong_rows(adapter: CacheUnderTest) -> Iterator[Call]:
    manager = adapter.manager
    live = [lease.row for lease in adapter.leases.values()]
    dead = next(row for row in range(len(live) + 1) if row not in live)
    for rows in ([dead], [*live, dead], [-1], [*live, len(manager.tables.live)]):
        yield (
            R5,
            f"LeaseError: rows {rows} are not all rows of live leases",
            partial(manager.extend_batch, np.array(rows, np.int32)),
        )

    yield R5, "IdError: row 0 must be an integer, got 0.5", lambda: manager.extend_batch([0.5])
    yield R5, "", lambda: manager.extend_batch([])


def _wrong_of(adapter: CacheUnderTest, lease: Any) -> Iterator[Call]:
    manager, room = adapter.manager, lease.num_tokens
    yield (
        R5,
        f"LeaseError: {room + 1} tokens published on a lease with room for {room}",
        lambda: manager.publish(lease, [0] * (room + 1)),
    )
    yield (
        R5,
        "CountError: num_tokens must be at least 0, got -2",
        lambda: manager.extend(lease, -2),
    )
    yield (
        R5,
        f"LeaseError: rows [{lease.row}, {lease.row}] name a lease twice",
        lambda: manager.extend_batch(np.array([lease.row, lease.row], np.int32)),
    )


def _wrong_of_ended(adapter: CacheUnderTest, lease: Any) -> Iterator[Call]:
    manager = adapter.manager
    rule, text = R3, "LeaseError: the lease was released or belongs to another manager"
    if lease.epoch != manager.epoch:
        rule = R4
        text = f"LeaseError: the lease is of epoch {lease.epoch}, "
        text += f"but the cache is at epoch {manager.epoch}"
        yield rule, "", lambda: manager.release(lease)  # harmless: the reset ended it
    else:
        yield rule, text, lambda: manager.release(lease)
    yield rule, text, lambda: manager.publish(lease, [])
    yield rule, text, lambda: manager.extend(lease, 1)
    yield rule, text, lambda: manager.count_hit(lease)
    yield rule, text, lambda: manager.next_block(lease, [0, 0])
