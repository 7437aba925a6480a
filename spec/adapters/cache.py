"""What the specification asks of a cache manager: half a dozen methods, and what it promises."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, TypeAlias


class Manager(Protocol):
    """A cache manager at depth ``api``: all that a scheduler needs of it.

    A request is a name. Its tokens are those of its prompt and then those appended. A method that
    refuses returns None or False and leaves everything as it was.
    """

    def admit(self, name: str, tokens: Sequence[int], namespace: bytes) -> int | None:
        """Hold a block for each of tokens, cached ones where there are some.

        Returns:
            How many leading tokens are cached, so that their KV is read and not computed; None if
            there are too few blocks.
        """

    def append(self, name: str, tokens: Sequence[int]) -> bool:
        """Make room for tokens that follow; False if there are too few blocks."""

    def publish(self, name: str, tokens: Sequence[int]) -> None:
        """Learn that the KV of tokens, from the request's first on, is written."""

    def release(self, name: str) -> None:
        """End the request: finished, aborted or preempted."""

    def block_table(self, name: str) -> Sequence[int]:
        """Return the ids of its blocks, in the order of its tokens."""

    def available(self) -> int:
        """Return how many blocks are free or could be evicted now."""


class Events(Protocol):
    """Where a manager reports what it does, at depth ``events``, the moment it does it."""

    def allocated(self, name: str, blocks: Sequence[int]) -> None:
        """Blocks that nobody had belong to a request now."""

    def freed(self, blocks: Sequence[int]) -> None:
        """Blocks belong to nobody now."""

    def published(self, name: str, blocks: Sequence[int]) -> None:
        """The next blocks of a request can be shared from now on."""

    def evicted(self, blocks: Sequence[int]) -> None:
        """Blocks cannot be found any more; to be given to somebody or freed in the same call."""


@dataclass(frozen=True)
class Snapshot:
    """All that a manager keeps, at depth ``full``, in the terms of the specification.

    Attributes:
        free: the ids in its pool.
        cached: the block of each published prefix: by namespace and all tokens up to its last.
        users: how many requests use it, by the same key.
        idle: the blocks that nobody uses, coldest first: the order in which they would go.
        rows: the row of each request in a matrix of block tables, if there is one.
        next_blocks: by request, what identifies the first block that it has yet to publish; None
            if its tokens do not fill one.
        waiting_blocks: the same for requests that wait; None also where the first block that they
            miss follows none that a request has yet to publish.
        available_after: by waiting request, what would be available if its match were held.
        counts: counters that are reported, by name.
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


@dataclass(frozen=True)
class Promises:
    """What a manager claims beyond safety. A rule about a claim binds only those who make it.

    Attributes:
        hits_all: a request hits all that is published of it, up to `hits_last`.
        hits_last: the hit may cover the last token of a request; without it, a hit leaves one.
        lru: the victim is the least recently used leaf, block by block.
        evicts_exactly: no more is evicted than is short.
        exact: `available` counts every free block and every block that nobody uses, and a request
            is refused only if it needs more.
        shares_duplicates: of two equal blocks one is given back as soon as both are published.
        ignores_late: publishing fewer tokens than before changes nothing; without it, a publication
            is repeated with the same tokens only.
    """

    hits_all: bool = False
    hits_last: bool = False
    lru: bool = False
    evicts_exactly: bool = False
    exact: bool = False
    shares_duplicates: bool = False
    ignores_late: bool = False

    @classmethod
    def all(cls) -> Promises:
        """Claim everything."""
        return cls(**{promise.name: True for promise in fields(cls)})


Factory: TypeAlias = Callable[[int, int], Any]
"""Makes an adapter from ``(num_blocks, block_size)``.

It has the methods of `Manager`, and may have more: ``evict(num_blocks) -> int``, ``reset()``,
``match(name, tokens, namespace) -> int`` (a match that the next `admit` of that name uses),
``append_batch(names) -> bool`` (one token each), `promises`, ``report_to(events)`` for depth
``events``, ``snapshot()`` for depth ``full``, ``refusal() -> (needed, available)`` of the last
refusal, ``misuse(kind, name)`` that makes a wrong call and sees it refused, and ``check()`` for its
own invariants.
"""


class AdapterError(TypeError):
    """The adapter is not what the specification can drive; says what it must do."""
