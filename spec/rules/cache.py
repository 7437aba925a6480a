"""The rules of a KV cache, chapter by chapter, in the order of a request's life.

A block is *free*, *private* to one request, or *published*: the cache owns it, and requests find it
by its prefix and share it. The rules say when a block may pass from one owner to another. Those
about a policy apply only to a manager that promises it (`Promises`).
"""

from __future__ import annotations

from typing import Final

from .rule import Rule, rule

# H: hits

H1: Final = rule(
    "H1 hit-is-published",
    "A hit contains only blocks that are published in the namespace of the request.",
)
H2: Final = rule("H2 hit-is-longest", "A hit is the longest published prefix of the request.")
H3: Final = rule(
    "H3 hit-is-whole-blocks", "A hit is a whole number of blocks, and no longer than the tokens."
)
H4: Final = rule(
    "H4 hit-leaves-last-token",
    "A hit leaves the last token of a request to compute, for its logits.",
)
H5: Final = rule(
    "H5 written-block-is-hit",
    "Every written block is hit, as long as no eviction can have been necessary.",
)
H6: Final = rule("H6 match-predicts-hit", "A match predicts the hit of the admission.")
H7: Final = rule(
    "H7 next-block-names-its-prefix",
    "Two requests name the same next block if, and only if, that block would hold the same prefix.",
)
H8: Final = rule(
    "H8 hits-equal-lru",
    "Requests that run one after another hit at least the blocks that an LRU list of the pool's"
    " size holds.",
)

# A: admission, allocation and growth

A1: Final = rule("A1 allocate-only-free", "Only free blocks are allocated to a request.")
A2: Final = rule("A2 allocate-in-range", "No block outside the pool is ever allocated.")
A3: Final = rule("A3 allocate-distinct", "A block table contains each block at most once.")
A4: Final = rule("A4 table-covers-tokens", "A block table has room for all tokens of its request.")
A5: Final = rule("A5 no-excess-blocks", "A request holds no more blocks than its tokens need.")
A6: Final = rule(
    "A6 refuse-only-when-short",
    "A request is refused only if it needs more blocks than are free or unused.",
)
A7: Final = rule(
    "A7 refusal-reports-numbers",
    "A refusal reports how many blocks are needed and how many are available.",
)
A8: Final = rule("A8 refusal-changes-nothing", "A refused call changes nothing.")
A9: Final = rule(
    "A9 refuse-too-large-as-such",
    "A request that exceeds the whole pool is refused as too large, not as out of blocks for now.",
)
A10: Final = rule(
    "A10 batch-equals-singles",
    "A call that grows several requests has the result of growing each of them: all grow, or none.",
)

# C: content, while a request computes

C1: Final = rule("C1 read-own-prefix", "Every read of a request finds the KV of its own prefix.")
C2: Final = rule(
    "C2 write-own-blocks", "A request writes only to blocks that no other request reads."
)
C3: Final = rule(
    "C3 inputs-stay-unchanged",
    "A call changes nothing that it is given: neither tokens nor block ids, rows or results.",
)

# P: publishing

P1: Final = rule("P1 publish-own", "A request publishes only its own private blocks.")
P2: Final = rule("P2 publish-once", "A prefix is published at most once.")
P3: Final = rule("P3 publish-computed", "A block is published only after all of its KV is written.")
P4: Final = rule("P4 publish-promptly", "Every full block that was computed is published.")
P5: Final = rule(
    "P5 first-publisher-wins",
    "The first published copy of a block stays, and the table of the other request points to it.",
)
P6: Final = rule("P6 republish-changes-nothing", "A second publication of a block changes nothing.")

# E: eviction

E1: Final = rule("E1 evict-published", "Only published blocks are evicted.")
E2: Final = rule("E2 evict-unused", "A block that a request uses is not evicted.")
E3: Final = rule("E3 evict-leaves-first", "A block is evicted after all blocks that follow it.")
E4: Final = rule("E4 evict-least-recently-used", "The least recently used leaf is evicted first.")
E5: Final = rule("E5 evict-no-more-than-missing", "No more blocks are evicted than are missing.")
E6: Final = rule(
    "E6 evict-requested-count",
    "A call to evict n blocks evicts n, or all unused ones if there are fewer.",
)

# F: freeing

F1: Final = rule("F1 free-only-own", "A block is freed only by its owner, and only once.")
F2: Final = rule(
    "F2 free-only-duplicates-while-running",
    "A running request frees only blocks that duplicate published ones.",
)
F3: Final = rule(
    "F3 wrong-ids-are-refused",
    "A call that recycles ids refuses wrong ids by id, and recycles the others.",
)
F4: Final = rule(
    "F4 recycle-batch-equals-singles",
    "A call that recycles several ids has the result of recycling each of them.",
)
F5: Final = rule(
    "F5 allocate-exact-count",
    "An allocation of n blocks returns n distinct free ids, or changes nothing.",
)
F6: Final = rule(
    "F6 step-in-flight-keeps-duplicates",
    "A duplicate that a step in flight may read is freed only after the step has ended.",
)

# R: leases, their end, resets and misuse

R1: Final = rule(
    "R1 table-is-shared-then-private",
    "A block table lists the shared blocks first, then the private ones.",
)
R2: Final = rule(
    "R2 tables-have-own-rows",
    "Each request has its own row in the block tables, padded with zeros.",
)
R3: Final = rule(
    "R3 release-ends-lease", "A released request holds no block and has no further effect."
)
R4: Final = rule(
    "R4 reset-empties-cache",
    "A reset frees every block, ends every hit, and leaves old leases without effect.",
)
R5: Final = rule(
    "R5 misuse-is-refused", "A wrong call is refused with a typed error that carries numbers."
)

# S: after each call

S1: Final = rule("S1 no-leak", "Every block is free, published or private after each call.")
S2: Final = rule(
    "S2 available-is-free-plus-unused",
    "The available blocks are the free ones and the unused ones.",
)
S3: Final = rule("S3 counts-match-events", "The reported counts agree with the reported events.")
S4: Final = rule("S4 no-unexpected-error", "A valid call raises nothing but refusals.")
S5: Final = rule(
    "S5 work-is-local",
    "The work of a call depends on the blocks that it touches, not on the number of idle blocks.",
)
S6: Final = rule(
    "S6 evicted-branches-cost-nothing",
    "A request on a path costs no more if the path had branches that are evicted, once it was hit"
    " again.",
)

# W: internal state

W1: Final = rule(
    "W1 pool-holds-free-blocks", "The pool contains exactly the free blocks, each once."
)
W2: Final = rule(
    "W2 tree-holds-published-blocks", "The tree contains exactly the published blocks, by prefix."
)
W3: Final = rule(
    "W3 user-count-is-lease-count", "The user count of a block is the number of leases that use it."
)
W4: Final = rule(
    "W4 idle-list-holds-unused-blocks",
    "The idle list contains exactly the unused blocks, each once.",
)
W5: Final = rule(
    "W5 idle-list-is-in-eviction-order",
    "The idle list is in order of last use, and within one path from its tail.",
)
W6: Final = rule("W6 own-check-passes", "The invariants that the manager asserts itself hold.")

# D: after all requests have ended

D1: Final = rule(
    "D1 drained-pool-is-whole", "When all requests have ended, all blocks are available."
)
D2: Final = rule(
    "D2 whole-pool-is-usable", "An idle cache admits a request that needs the whole pool."
)
D3: Final = rule(
    "D3 ended-requests-leave-nothing",
    "An empty cache holds no more references than a new one, however many requests and operations"
    " have ended.",
)

CACHE_RULES: Final = tuple(value for value in list(globals().values()) if isinstance(value, Rule))
"""Every rule above, in order."""
