"""The rules of a KV cache, chapter by chapter. Read them in order: they are the specification.

A block belongs to nobody (it is *free*), to one request (it is *private*), or to the cache (it is
*published*: found by its prefix, and shared). The rules say who may pass a block to whom, and when.
"""

from __future__ import annotations

from typing import Final

from .rule import Rule, rule

# A: a request gets blocks

A1: Final = rule("A1 allocate-only-free", "A request is given only blocks that nobody has.")
A2: Final = rule("A2 allocate-in-range", "No more blocks exist than the pool was made with.")
A3: Final = rule("A3 allocate-distinct", "A block stands once in a block table.")
A4: Final = rule("A4 a-block-for-each-token", "A block table has room for all of its tokens.")
A5: Final = rule("A5 no-block-too-many", "A request holds no more blocks than its tokens need.")
A6: Final = rule(
    "A6 refuse-with-reason",
    "A request is refused only if it needs more blocks than are free or unused.",
)
A7: Final = rule("A7 refuse-with-numbers", "A refusal names what is needed and what there is.")
A8: Final = rule("A8 refused-changes-nothing", "What is refused leaves all as it was.")
A9: Final = rule(
    "A9 too-large-is-told", "A request that the whole pool cannot hold is told so, not put off."
)
A10: Final = rule(
    "A10 batch-is-singles", "Growing a batch of requests is growing each of them, all or none."
)

# F: blocks go back

F1: Final = rule("F1 free-only-own", "A block is freed only by who has it, and only once.")
F2: Final = rule(
    "F2 free-only-spare", "While a request runs, of its blocks only the copies of others' go back."
)
F3: Final = rule(
    "F3 wrong-ids-are-refused",
    "Of ids to recycle, those that nobody was given are refused by id, and the others recycled.",
)
F4: Final = rule(
    "F4 recycling-is-singles", "Recycling ids in one call is recycling them one by one."
)
F5: Final = rule(
    "F5 allocate-exactly", "Allocating n blocks gives n distinct free ids, or changes nothing."
)

# H: a request finds what is cached

H1: Final = rule("H1 hit-is-published", "What a request hits is published, in its namespace.")
H2: Final = rule("H2 hit-is-longest", "A request hits all that is published of it.")
H3: Final = rule("H3 hit-is-whole-blocks", "A hit is whole blocks, and no more than the tokens.")
H4: Final = rule("H4 hit-leaves-one", "A hit leaves the last token to compute, for its logits.")
H5: Final = rule(
    "H5 no-pressure-no-miss", "Before anything can have been evicted, all that was written is hit."
)
H6: Final = rule("H6 match-is-admission", "A match says what an admission would hit.")
H7: Final = rule(
    "H7 same-next-block",
    "Two requests name the same next block if, and only if, it would hold the same prefix.",
)

# P: a request shares what it computed

P1: Final = rule("P1 publish-own", "A request publishes only blocks that are private to it.")
P2: Final = rule("P2 publish-once", "No prefix is published twice.")
P3: Final = rule("P3 publish-computed", "A block is published only when all of its KV is written.")
P4: Final = rule("P4 publish-promptly", "Every whole block that was computed is published.")
P5: Final = rule(
    "P5 first-publisher-wins",
    "Of two copies the published one stays, and the other's table is pointed to it.",
)
P6: Final = rule("P6 publish-again-is-nothing", "Publishing what is published changes nothing.")

# E: the cache gives blocks up

E1: Final = rule("E1 evict-published", "What is evicted was published.")
E2: Final = rule("E2 evict-unused", "No block is evicted that a request uses.")
E3: Final = rule("E3 evict-leaf", "A block is evicted after all that follow it.")
E4: Final = rule("E4 evict-coldest", "The leaf that was used longest ago is evicted first.")
E5: Final = rule("E5 evict-no-more", "No more blocks are evicted than are short.")
E6: Final = rule("E6 evict-as-asked", "Asked for n blocks, the cache evicts n, or all unused ones.")

# C: content

C1: Final = rule("C1 read-own-prefix", "Whatever a request reads is the KV of its own prefix.")
C2: Final = rule("C2 write-own-blocks", "A request writes only blocks that nobody else reads.")
C3: Final = rule("C3 inputs-are-the-callers", "The cache never changes the tokens it is given.")

# R: requests and their leases

R1: Final = rule("R1 table-is-its-blocks", "A table is the shared blocks, then the private ones.")
R2: Final = rule(
    "R2 tables-lie-apart", "In the matrix of tables each request has its own row, zeros behind."
)
R3: Final = rule(
    "R3 misuse-is-refused", "A call that cannot be right is refused by type, with its numbers."
)
R4: Final = rule("R4 release-ends-it", "After its release a request has no block and no say.")
R5: Final = rule(
    "R5 reset-forgets",
    "After a reset every block is free, nothing is hit, and old leases are void.",
)

# D: drained

D1: Final = rule("D1 drained-is-whole", "When all requests have ended, all blocks can be had.")
D2: Final = rule("D2 whole-pool-is-usable", "An idle cache admits a request of the whole pool.")

# S: after each call

S1: Final = rule("S1 no-leak", "After a call, every block is free, published or private.")
S2: Final = rule("S2 available-is-counted", "What is available is what is free or unused.")
S3: Final = rule("S3 counts-are-true", "The counts that are reported are those of the events.")
S4: Final = rule("S4 no-surprise", "A call with right arguments raises nothing but refusals.")

# W: inside

W1: Final = rule("W1 pool-is-the-free", "The pool holds the free blocks, each once.")
W2: Final = rule("W2 tree-is-the-published", "The tree holds the published blocks, by prefix.")
W3: Final = rule("W3 users-are-the-leases", "A block's user count is the leases that use it.")
W4: Final = rule("W4 idle-is-the-unused", "The list of idle blocks holds the unused, each once.")
W5: Final = rule(
    "W5 idle-in-order", "The idle list is in order of last use, and of one path from its tail."
)
W6: Final = rule("W6 own-check-passes", "The invariants that the manager asserts itself hold.")

CACHE_RULES: Final = tuple(value for value in list(globals().values()) if isinstance(value, Rule))
"""Every rule above, in order."""
