"""The design of a cache manager, as promises. A rule about a promise applies only if it is made."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Promises:
    """Guarantees of a manager beyond safety. A rule about a promise applies only if it is made.

    Attributes:
        hits_all: a request hits all published blocks of its prefix, up to `hits_last`.
        hits_last: a hit may cover the last token of a request; otherwise at least one is left.
        refuses_only_short: a request is refused only if it needs more blocks than are free or
            unused.
        holds_exactly: a request holds no more blocks than its tokens need.
        one_copy: a prefix is cached in at most one block.
        shares_duplicates: of two equal blocks, one is freed as soon as both are published.
        ignores_late: publishing fewer tokens than before changes nothing; otherwise the
            specification repeats a publication only with the same tokens.
        leaves_first: a block leaves the cache after all blocks that follow it.
        evicts_exactly: an eviction takes only as many blocks as are missing.
        lru: the eviction victim is the least recently used leaf.
        ages_from_release: the last use of a block is the last release of a request that holds it;
            otherwise the adapter reports each use with `Events.used`.
        frees_at_once: the release of a request frees its blocks before it returns.
        counts_available: ``available`` counts every free and every unused block.
    """

    hits_all: bool = False
    hits_last: bool = False
    refuses_only_short: bool = False
    holds_exactly: bool = False
    one_copy: bool = False
    shares_duplicates: bool = False
    ignores_late: bool = False
    leaves_first: bool = False
    evicts_exactly: bool = False
    lru: bool = False
    ages_from_release: bool = False
    frees_at_once: bool = False
    counts_available: bool = False

    @classmethod
    def all(cls) -> Promises:
        """Make all promises."""
        return cls(**{promise.name: True for promise in fields(cls)})
