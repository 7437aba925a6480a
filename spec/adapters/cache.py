"""Protocol of a cache manager under test: methods, events, snapshot and promises."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from ..model.promises import Promises as Promises
from ..rules.rule import Rule, Violation


class Manager(Protocol):
    """A cache manager at depth ``api``: the methods that a scheduler needs.

    Requests have names. The tokens of a request are its prompt and then the appended tokens. A
    method that refuses returns None or False and changes nothing.
    """

    def admit(self, name: str, tokens: Sequence[int], namespace: bytes) -> int | None:
        """Hold blocks for all tokens, using cached blocks where possible.

        Returns:
            The number of leading tokens whose KV is cached and thus not computed; None if there
            are too few blocks.
        """

    def append(self, name: str, tokens: Sequence[int]) -> bool:
        """Allocate blocks for the tokens that follow; False if there are too few blocks."""

    def publish(self, name: str, tokens: Sequence[int]) -> None:
        """Publish the blocks of the request's first tokens: the KV of ``tokens`` is written."""

    def release(self, name: str) -> None:
        """End the request: finished, aborted or preempted."""

    def block_table(self, name: str) -> Sequence[int]:
        """Return the block ids of the request, in token order."""

    def available(self) -> int:
        """Return the number of blocks that are free or can be evicted now."""


class Events(Protocol):
    """Receives what a manager does, at depth ``events``, as it happens.

    A call may report its events in any order that passes a block from owner to owner: a block is
    free, or evicted in this call, before it is allocated. ``reset`` may report any block as freed
    once, whoever had it, or report nothing; afterwards all blocks are free.
    """

    def allocated(self, name: str, blocks: Sequence[int]) -> None:
        """Free or evicted blocks were appended to the block table of a request."""

    def published(self, name: str, blocks: Sequence[int]) -> None:
        """Blocks in the table of a request were published: others can hit them from now on."""

    def used(self, blocks: Sequence[int]) -> None:
        """Published blocks were used; only for ``lru`` without ``ages_from_release``."""

    def evicted(self, blocks: Sequence[int]) -> None:
        """Published blocks left the cache; the same call allocates or frees them."""

    def replaced(self, name: str, blocks: Sequence[int]) -> None:
        """Duplicates in the table of a request were replaced by the published blocks.

        They are not free yet, because steps in flight may read them: ``freed`` reports them when
        the last of these steps has ended. Only for a manager with ``begin_step`` and ``end_step``.
        """

    def freed(self, blocks: Sequence[int]) -> None:
        """Evicted blocks became free, or blocks of a request that are not published.

        A running request frees a block only if another block is published for its prefix; its
        table points to that block afterwards.
        """


@dataclass(slots=True)  # not frozen: one is made in each step, and that takes three times as long
class Snapshot:
    """The complete state of a manager, at depth ``full``, in the terms of the specification.

    Attributes:
        free: block ids in the pool.
        cached: block of each published prefix, by namespace and all tokens of the prefix.
        users: number of requests that use each prefix, by the same key.
        idle: published blocks without users, in eviction order.
        rows: row of each request in padded block tables, if the manager has them.
        next_blocks: by request, an identifier of the first block that it will publish; None if
            its tokens do not fill one.
        waiting_blocks: the same for waiting requests, of the first block that is not cached; None
            also if no running request will publish that block or one before it.
        available_after: by waiting request, the available blocks if its match were pinned.
        counts: reported counters, by name.
    """

    free: Sequence[int]
    cached: dict[tuple[bytes, tuple[int, ...]], int]
    users: dict[tuple[bytes, tuple[int, ...]], int]
    idle: Sequence[int]
    rows: Mapping[str, Sequence[int]] = field(default_factory=dict)
    next_blocks: Mapping[str, Hashable] = field(default_factory=dict)
    waiting_blocks: Mapping[str, Hashable] = field(default_factory=dict)
    available_after: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)


Factory: TypeAlias = Callable[[int, int], Any]
"""Makes an adapter from ``(num_blocks, block_size)``.

The adapter has the methods of `Manager`. It may also have ``evict(num_blocks) -> int``,
``reset()``, ``match(name, tokens, namespace) -> int`` (a match that the next ``admit`` of that
name uses), ``append_batch(names) -> bool`` (one token each), ``promises``, ``report_to(events)``
for depth ``events``, ``snapshot()`` for depth ``full``, ``refusal() -> (needed, available)`` of the
last refusal, ``begin_step()`` (a step was dispatched that reads the block tables as they are now)
and ``end_step()`` (the first step in flight has ended), ``misuse(kind, name)``, which makes a wrong
call and checks that it is refused, and ``check()`` for the manager's own invariants, and
``size() -> int``, the number of references that the manager holds: see
``radixkv.spec.adapters.references.count_references``, and ``kv_events()`` and ``replay(seq)``, the
batches of KV events (``radixkv.spec.model.events.Batch``) since the last call, or again.

The factory itself, a function or a class, may have ``block_sizes`` and ``pool_sizes``: the block
sizes and numbers of blocks to choose from, if the manager does not have all of them.
"""


class AdapterError(TypeError):
    """The adapter lacks a method or returns a wrong type; the message says what is expected."""


def call(adapter: object, method: str, arguments: Sequence[Any], rule: Rule) -> Any:
    """Call a method of an adapter.

    Raises:
        Violation: ``rule``, if it raises anything but a finding of its own or an `AdapterError`.
    """
    try:
        return getattr(adapter, method)(*arguments)
    except (Violation, AdapterError):
        raise
    except (Exception, SystemExit) as error:
        shown = f"{method}({', '.join(map(repr, arguments))})"
        raise Violation(rule, describe_error(shown, error)) from error


def describe_error(call: str, error: BaseException) -> str:
    """Return what a call raised, and the line of code that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{call} raised {error!r} at {Path(frame.filename).name}:{frame.lineno}"


def sizes_of(factory: Factory, kind: Literal["block_sizes", "pool_sizes"]) -> Sequence[int]:
    """Return the sizes that a factory is restricted to; empty if it is not.

    Raises:
        AdapterError: they are no positive integers.
    """
    sizes = getattr(inspect.unwrap(factory), kind, ())
    if not isinstance(sizes, Iterable) or not all(
        isinstance(size, int) and size > 0 for size in sizes
    ):
        raise AdapterError(f"{kind} must be positive integers, got {sizes!r}")
    return tuple(sizes)
