"""The rules of KV events: what a manager tells routers about the blocks that it has.

A *consumer* applies the events in order and knows nothing else of the manager. A *medium* is a tier
as events name it. An event names each block by a hash, and its prefix by the hash of the block
before it, its parent.
"""

from __future__ import annotations

from typing import Final

from .rule import Rule, rule

# The state of a consumer

K1: Final = rule(
    "K1 consumer-equals-manager",
    "A consumer that has applied all events has, in each tier, the blocks that can be found there;"
    " of storage, the last ones that the manager learned of.",
)
K2: Final = rule(
    "K2 hash-names-one-prefix",
    "A hash names the same prefix in all events, and each prefix has one hash.",
)

# One event

K3: Final = rule(
    "K3 parent-is-known",
    "The parent of a stored block was stored before it, and not cleared since.",
)
K4: Final = rule(
    "K4 store-what-is-missing", "A block is stored in a tier only if the tier does not have it."
)
K5: Final = rule("K5 remove-what-is-there", "A block is removed only from a tier that has it.")
K6: Final = rule(
    "K6 stored-blocks-are-whole",
    "A stored event has one or more blocks, and the tokens of whole blocks, all of one size.",
)

# Batches that were missed

K7: Final = rule(
    "K7 gap-is-seen", "The numbers of batches begin at 0, and each is one more than the last."
)
K8: Final = rule(
    "K8 replay-closes-a-gap",
    "A replay brings every batch since the one that it begins with, unchanged.",
)

# Indexes of routers

K9: Final = rule(
    "K9 index-equals-manager",
    "After a moment in which no message is lost, a router's index of a node has the blocks that can"
    " be found in each tier of the node.",
)

EVENT_RULES: Final = tuple(value for value in list(globals().values()) if isinstance(value, Rule))
"""Every rule above, in order."""
