"""The rules of the tiers below the device. All rules of the device hold beside them.

An *operation* copies blocks between tiers. It is taken, it has a result for each of its blocks, and
it is *fenced* when nobody uses its blocks any more: with its result, or later. What it writes is
*landing* until it has its result.
"""

from __future__ import annotations

from typing import Final

from .rule import Rule, rule

T1: Final = rule("T1 landing-is-unread", "Nobody finds a block that is still being written.")
T2: Final = rule(
    "T2 source-is-intact",
    "What an operation reads is the KV of a prefix, and stays it until it has been read.",
)
T3: Final = rule(
    "T3 one-writer", "A block that an operation writes is nobody else's until that is fenced."
)
T4: Final = rule(
    "T4 found-is-the-prefix", "A block that can be found in a tier holds its own prefix there."
)
T5: Final = rule(
    "T5 storage-is-its-key", "What is written to storage is the KV that its key stands for."
)
T6: Final = rule(
    "T6 ends-once", "An operation has one end: a result that is late, again or unknown changes "
    "nothing.",
)  # fmt: skip
T7: Final = rule(
    "T7 a-result-per-block", "Another number of results than blocks is refused by type."
)
T8: Final = rule(
    "T8 host-hit-is-longest", "A match names all blocks on the host that follow those on the "
    "device, and is made anew when they have changed.",
)  # fmt: skip
T9: Final = rule(
    "T9 promotion-is-all",
    "An admission loads all that was found on the host, into the blocks that follow its hit.",
)
T10: Final = rule(
    "T10 ready-is-what-arrived",
    "A request goes on after the leading blocks that were loaded well, and not before their fence.",
)
T11: Final = rule("T11 arrived-is-found", "A copy that was written to the host can be found.")
T12: Final = rule("T12 failed-is-not-found", "A block whose copy has failed is not found there.")
T13: Final = rule(
    "T13 demote-what-leaves",
    "What the device evicts moves to the host, but for what finds no room; an eviction never "
    "fails for that.",
)
T14: Final = rule(
    "T14 lost-with-reason",
    "Cached blocks are lost only for room, no more than it takes, by a failed copy or by a reset.",
)
T15: Final = rule(
    "T15 one-tier-at-a-time", "With exclusive tiers a block is in one, unless a copy is in use."
)
T16: Final = rule(
    "T16 two-tier-law",
    "Exclusive tiers of g and h blocks hit, demote and drop as lists of g and of g + h blocks do.",
)
T17: Final = rule(
    "T17 write-through-copies",
    "With write-through, what is to be copied is copied while there is room, before its eviction; "
    "and what it follows stays.",
)
T18: Final = rule(
    "T18 write-through-waits",
    "Nothing is written through before enough hits, nor without a publication or a hit since.",
)
T19: Final = rule("T19 stored-once", "Each new copy on the host is written to storage, once.")
T20: Final = rule(
    "T20 park-waits",
    "The blocks of a parked request are its own until each copy of them, for it or for others, has "
    "its result, and no longer.",
)
T21: Final = rule("T21 park-with-reason", "A request is not parked only if the host has no room.")
T22: Final = rule(
    "T22 parked-is-kept", "What was parked well stays until it is resumed, which computes nothing."
)
T23: Final = rule(
    "T23 parked-ends-once", "What a parked request keeps is given up once; again is refused."
)
T24: Final = rule(
    "T24 failed-park-is-told", "A parked request of which some was not saved is told so."
)
T25: Final = rule(
    "T25 prefetch-asks-for-the-rest",
    "A prefetch asks for the blocks that follow the cached ones, and loads those that are there.",
)
T26: Final = rule(
    "T26 prefetch-arrives",
    "A prefetch ends when its copy has, and until then what it follows on the host stays there; "
    "what came well can be found if what it follows can.",
)
T27: Final = rule("T27 cancelled-leaves-nothing", "What was cancelled brings nothing to a tier.")
T28: Final = rule(
    "T28 reset-by-namespace",
    "A reset keeps all that is published in the namespaces to keep, and nothing of the others.",
)
T29: Final = rule(
    "T29 old-epoch-is-harmless", "The end of an operation of before a reset only frees its blocks."
)
T30: Final = rule(
    "T30 drained-tiers", "When all has ended, each host block is free or can be dropped."
)
T31: Final = rule(
    "T31 host-pool", "A host block is taken only if it is free, and freed only if it is taken."
)
T32: Final = rule(
    "T32 no-host-leak", "A host block that is not free is cached, or some operation or request "
    "needs it.",
)  # fmt: skip
T33: Final = rule(
    "T33 under-way-by-an-operation",
    "A copy is landing or leaving only while an operation is not fenced that writes or reads it.",
)
T34: Final = rule(
    "T34 parked-in-storage",
    "What was parked in storage can be dropped from the host when it was stored, and not before.",
)
T35: Final = rule(
    "T35 block-by-block",
    "An operation names, for each block that it copies, one place to read and one to write.",
)
T36: Final = rule(
    "T36 spare-copies-first",
    "Unless an eviction copies nothing, nothing is lost for room while the host has a copy to drop "
    "of what the device has.",
)
T37: Final = rule(
    "T37 dropped-in-order",
    "An eviction drops from the host in the order that the host tells; what it demotes is last.",
)
T38: Final = rule(
    "T38 host-lru",
    "Of what the host alone has, it drops first what requests have not used for the longest time.",
)
T39: Final = rule(
    "T39 moved-is-not-lost",
    "What the host gave up for a request that ends while it is loaded arrives all the same, and is "
    "then cached.",
)
T40: Final = rule(
    "T40 uses-are-told",
    "Storage is told as used what it has of the path that a request hits, or that came to storage "
    "or from there: now, unless it was a short while ago.",
)
T41: Final = rule(
    "T41 told-from-the-end", "Storage is told of a block once, and after all blocks that follow it."
)
T42: Final = rule(
    "T42 told-of-uses",
    "Storage is told of nothing else, nor of the same again before a while has passed.",
)
T43: Final = rule(
    "T43 beginnings-stay",
    "A storage that forgets what was used longest ago, and has room for what the device holds, "
    "forgets no block before one that follows it.",
)

TIER_RULES: Final = tuple(value for value in list(globals().values()) if isinstance(value, Rule))
"""Every rule above, in order."""
