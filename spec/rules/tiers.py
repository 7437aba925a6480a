"""The rules of the tiers below the device. All rules of the device hold beside them.

An *operation* copies blocks between tiers. The manager hands it out, it ends with a result for each
block, and it is *fenced* when its blocks are no longer in use: with its result, or later. Its
destinations are *in flight* until it has its result.
"""

from __future__ import annotations

from typing import Final

from .rule import Rule, rule

# Match

T1: Final = rule(
    "T1 host-hit-is-longest",
    "A match lists all host blocks that follow the hit on the device, and is renewed when they "
    "have changed.",
)
T2: Final = rule(
    "T2 found-block-holds-its-prefix",
    "A block that can be found in a tier holds its own prefix there.",
)
T3: Final = rule(
    "T3 in-flight-is-not-found", "A block cannot be found while an operation writes to it."
)

# Prefetch from storage, while a request waits

T4: Final = rule(
    "T4 prefetch-looks-up-uncached-blocks",
    "A prefetch looks up the blocks that follow the cached ones, and loads those that storage has.",
)
T5: Final = rule(
    "T5 prefetched-blocks-are-found",
    "A prefetch ends with its copy and keeps the host blocks before it until then; loaded "
    "blocks can be found if those before them can.",
)

# Admission: load from the host

T6: Final = rule(
    "T6 admission-loads-whole-host-hit",
    "An admission loads all host blocks of the match, into the blocks that follow its hit.",
)
T7: Final = rule(
    "T7 request-continues-after-loaded-blocks",
    "A request continues after the leading blocks that were loaded successfully, and not before "
    "their fence.",
)
T8: Final = rule(
    "T8 moved-blocks-are-not-lost",
    "Blocks that the host gave up for a request arrive and are cached even if the request ends "
    "during the load.",
)

# Operations: every copy between tiers

T9: Final = rule(
    "T9 one-destination-per-source",
    "An operation names one source and one destination for each block.",
)
T10: Final = rule(
    "T10 source-stays-intact",
    "The source of an operation holds the KV of a prefix, unchanged until it has been read.",
)
T11: Final = rule(
    "T11 one-writer",
    "A block that an operation writes to has no other owner until the operation is fenced.",
)
T12: Final = rule(
    "T12 one-result-per-block",
    "A completion whose number of results is wrong is refused with a typed error.",
)
T13: Final = rule(
    "T13 operation-ends-once",
    "An operation has one result; a late, repeated or unknown result changes nothing.",
)
T14: Final = rule(
    "T14 copied-block-is-found", "A block that was copied to the host can be found there."
)
T15: Final = rule(
    "T15 failed-copy-is-not-found",
    "A block whose copy has failed cannot be found in the destination tier.",
)
T16: Final = rule(
    "T16 in-flight-has-an-operation",
    "A copy is in flight only while an operation that writes or reads it is not fenced.",
)
T17: Final = rule(
    "T17 nothing-else-moves",
    "An operation copies, moves and drops no other blocks than those that it is about.",
)

# Write-through, after a publication

T18: Final = rule(
    "T18 write-through-waits-for-hits",
    "Write-through copies no block before it has enough hits, nor without a publication or a "
    "hit since.",
)
T19: Final = rule(
    "T19 write-through-copies-due-blocks",
    "Write-through copies the blocks that are due while there is room, before their eviction; "
    "the blocks before them stay on the host.",
)

# Demotion and loss, at an eviction

T20: Final = rule(
    "T20 evicted-blocks-are-demoted",
    "Blocks evicted from the device move to the host if it has room; a full host makes no "
    "eviction fail.",
)
T21: Final = rule(
    "T21 drop-redundant-copies-first",
    "No block is lost for room while the host has a copy to drop of a block that the device "
    "has, unless evictions copy nothing.",
)
T22: Final = rule(
    "T22 host-drops-in-reported-order",
    "An eviction drops host blocks in the order that the host reports, and the blocks that it "
    "demotes last.",
)
T23: Final = rule(
    "T23 host-drops-least-recently-used",
    "The host drops the least recently used of the blocks that only it has.",
)
T24: Final = rule(
    "T24 no-needless-loss",
    "Cached blocks are lost only to make room, and no more than necessary, by a failed copy or "
    "by a reset.",
)
T25: Final = rule(
    "T25 exclusive-tiers-do-not-overlap",
    "With exclusive tiers, a block is in one tier only, unless a copy is in use.",
)
T26: Final = rule(
    "T26 exclusive-tiers-equal-two-lru-lists",
    "Exclusive tiers of g and h blocks hit, demote and drop like LRU lists of g and of g + h "
    "blocks.",
)

# Storage

T27: Final = rule(
    "T27 host-copy-is-stored-once", "Each new copy on the host is written to storage once."
)
T28: Final = rule(
    "T28 stored-value-matches-its-key",
    "A value written to storage is the KV that its key stands for.",
)
T29: Final = rule(
    "T29 uses-are-reported",
    "Storage gets a report of its blocks on each path that is hit, stored or loaded, unless "
    "they were reported recently.",
)
T30: Final = rule(
    "T30 only-uses-are-reported",
    "Storage gets no other reports, and no repetition before an interval has passed, but with "
    "that of the block before.",
)
T31: Final = rule(
    "T31 reports-list-last-block-first",
    "A report names a block once, after all blocks that follow it.",
)
T32: Final = rule(
    "T32 storage-keeps-whole-prefixes",
    "An LRU storage with room for all blocks of the device evicts no block before one that "
    "follows it.",
)

# Parking: preempt, and resume

T33: Final = rule(
    "T33 refuse-parking-only-without-room", "Parking is refused only if the host has no room."
)
T34: Final = rule(
    "T34 parking-keeps-blocks-until-copied",
    "A parked request keeps its device blocks until each copy of them, for it or for others, "
    "has its result, and no longer.",
)
T35: Final = rule(
    "T35 parked-blocks-leave-host-once-stored",
    "The host may drop blocks parked in storage once they are stored, and not before.",
)
T36: Final = rule(
    "T36 failed-parking-is-marked",
    "A parked request is marked as failed if part of its KV was not saved.",
)
T37: Final = rule(
    "T37 parked-kv-is-kept",
    "The saved KV of a parked request stays until the request resumes, which recomputes none of "
    "it.",
)
T38: Final = rule(
    "T38 parked-kv-is-released-once",
    "The KV of a parked request is given up once; a second time is refused.",
)

# Cancellation and resets

T39: Final = rule(
    "T39 cancelled-operation-adds-nothing", "A cancelled operation adds nothing to a tier."
)
T40: Final = rule(
    "T40 reset-keeps-named-namespaces",
    "A reset keeps all published blocks of the namespaces to keep, and none of the others.",
)
T41: Final = rule(
    "T41 old-epoch-only-frees",
    "The end of an operation from before a reset only frees its blocks.",
)

# The host pool, and after everything has ended

T42: Final = rule(
    "T42 host-pool-is-consistent",
    "A host block is allocated only if it is free, and freed only if it is allocated.",
)
T43: Final = rule(
    "T43 no-host-leak",
    "A host block that is not free is cached, or some operation or request needs it.",
)
T44: Final = rule(
    "T44 drained-host-is-available",
    "When all requests and operations have ended, each host block is free or can be dropped.",
)

TIER_RULES: Final = tuple(value for value in list(globals().values()) if isinstance(value, Rule))
"""Every rule above, in order."""
