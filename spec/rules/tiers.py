"""The rules of the tiers below the device. All rules of the device hold beside them.

An *operation* copies blocks between tiers. The manager hands it out, it ends with a result for each
block, and it is *fenced* when its blocks are no longer in use: with its result, or later. Its
destinations are *in flight* until it has its result.
"""

from __future__ import annotations

from typing import Final

from .rule import Rule, rule

# Match

T8: Final = rule(
    "T8 host-hit-is-longest",
    "A match lists all host blocks that follow the hit on the device, and is renewed when they "
    "have changed.",
)
T4: Final = rule(
    "T4 found-is-the-prefix", "A block that can be found in a tier holds its own prefix there."
)
T1: Final = rule("T1 landing-is-unread", "A block cannot be found while an operation writes to it.")

# Prefetch from storage, while a request waits

T25: Final = rule(
    "T25 prefetch-asks-for-the-rest",
    "A prefetch looks up the blocks that follow the cached ones, and loads those that storage has.",
)
T26: Final = rule(
    "T26 prefetch-arrives",
    "A prefetch ends with its copy and keeps the host blocks before it until then; loaded "
    "blocks can be found if those before them can.",
)

# Admission: load from the host

T9: Final = rule(
    "T9 promotion-is-all",
    "An admission loads all host blocks of the match, into the blocks that follow its hit.",
)
T10: Final = rule(
    "T10 ready-is-what-arrived",
    "A request continues after the leading blocks that were loaded successfully, and not before "
    "their fence.",
)
T39: Final = rule(
    "T39 moved-is-not-lost",
    "Blocks that the host gave up for a request arrive and are cached even if the request ends "
    "during the load.",
)

# Operations: every copy between tiers

T35: Final = rule(
    "T35 block-by-block", "An operation names one source and one destination for each block."
)
T2: Final = rule(
    "T2 source-is-intact",
    "The source of an operation holds the KV of a prefix, unchanged until it has been read.",
)
T3: Final = rule(
    "T3 one-writer",
    "A block that an operation writes to has no other owner until the operation is fenced.",
)
T7: Final = rule(
    "T7 a-result-per-block",
    "A completion whose number of results is wrong is refused with a typed error.",
)
T6: Final = rule(
    "T6 ends-once",
    "An operation has one result; a late, repeated or unknown result changes nothing.",
)
T11: Final = rule("T11 arrived-is-found", "A block that was copied to the host can be found there.")
T12: Final = rule(
    "T12 failed-is-not-found",
    "A block whose copy has failed cannot be found in the destination tier.",
)
T33: Final = rule(
    "T33 under-way-by-an-operation",
    "A copy is in flight only while an operation that writes or reads it is not fenced.",
)
T44: Final = rule(
    "T44 nothing-else-moves",
    "An operation copies, moves and drops no other blocks than those that it is about.",
)

# Write-through, after a publication

T18: Final = rule(
    "T18 write-through-waits",
    "Write-through copies no block before it has enough hits, nor without a publication or a "
    "hit since.",
)
T17: Final = rule(
    "T17 write-through-copies",
    "Write-through copies the blocks that are due while there is room, before their eviction; "
    "the blocks before them stay on the host.",
)

# Demotion and loss, at an eviction

T13: Final = rule(
    "T13 demote-what-leaves",
    "Blocks evicted from the device move to the host if it has room; a full host makes no "
    "eviction fail.",
)
T36: Final = rule(
    "T36 spare-copies-first",
    "No block is lost for room while the host has a copy to drop of a block that the device "
    "has, unless evictions copy nothing.",
)
T37: Final = rule(
    "T37 dropped-in-order",
    "An eviction drops host blocks in the order that the host reports, and the blocks that it "
    "demotes last.",
)
T38: Final = rule(
    "T38 host-lru", "The host drops the least recently used of the blocks that only it has."
)
T14: Final = rule(
    "T14 lost-with-reason",
    "Cached blocks are lost only to make room, and no more than necessary, by a failed copy or "
    "by a reset.",
)
T15: Final = rule(
    "T15 one-tier-at-a-time",
    "With exclusive tiers, a block is in one tier only, unless a copy is in use.",
)
T16: Final = rule(
    "T16 two-tier-law",
    "Exclusive tiers of g and h blocks hit, demote and drop like LRU lists of g and of g + h "
    "blocks.",
)

# Storage

T19: Final = rule("T19 stored-once", "Each new copy on the host is written to storage once.")
T5: Final = rule(
    "T5 storage-is-its-key", "A value written to storage is the KV that its key stands for."
)
T40: Final = rule(
    "T40 uses-are-told",
    "Storage gets a report of its blocks on each path that is hit, stored or loaded, unless "
    "they were reported recently.",
)
T42: Final = rule(
    "T42 told-of-uses",
    "Storage gets no other reports, and no repetition before an interval has passed.",
)
T41: Final = rule(
    "T41 told-from-the-end", "A report names a block once, after all blocks that follow it."
)
T43: Final = rule(
    "T43 beginnings-stay",
    "An LRU storage with room for all blocks of the device evicts no block before one that "
    "follows it.",
)

# Parking: preempt, and resume

T21: Final = rule("T21 park-with-reason", "Parking is refused only if the host has no room.")
T20: Final = rule(
    "T20 park-waits",
    "A parked request keeps its device blocks until each copy of them, for it or for others, "
    "has its result, and no longer.",
)
T34: Final = rule(
    "T34 parked-in-storage",
    "The host may drop blocks parked in storage once they are stored, and not before.",
)
T24: Final = rule(
    "T24 failed-park-is-told",
    "A parked request is marked as failed if part of its KV was not saved.",
)
T22: Final = rule(
    "T22 parked-is-kept",
    "The saved KV of a parked request stays until the request resumes, which recomputes none of "
    "it.",
)
T23: Final = rule(
    "T23 parked-ends-once", "The KV of a parked request is given up once; a second time is refused."
)

# Cancellation and resets

T27: Final = rule("T27 cancelled-leaves-nothing", "A cancelled operation adds nothing to a tier.")
T28: Final = rule(
    "T28 reset-by-namespace",
    "A reset keeps all published blocks of the namespaces to keep, and none of the others.",
)
T29: Final = rule(
    "T29 old-epoch-is-harmless",
    "The end of an operation from before a reset only frees its blocks.",
)

# The host pool, and after everything has ended

T31: Final = rule(
    "T31 host-pool",
    "A host block is allocated only if it is free, and freed only if it is allocated.",
)
T32: Final = rule(
    "T32 no-host-leak",
    "A host block that is not free is cached, or some operation or request needs it.",
)
T30: Final = rule(
    "T30 drained-tiers",
    "When all requests and operations have ended, each host block is free or can be dropped.",
)

TIER_RULES: Final = tuple(value for value in list(globals().values()) if isinstance(value, Rule))
"""Every rule above, in order."""
