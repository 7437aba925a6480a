"""The rules of a hand-off between prefill and decode nodes: chapter X of the specification.

A client's *request* is served by *attempts*, one after another. In an attempt, the gateway lets a
prefill node (P) compute the prompt, and P hands its KV over to a decode node (D), which generates
the tokens. Messages may be lost, doubled, late or out of order, and nodes and gateways may lose
their memory. The rules stand in the order of a request's life.
"""

from __future__ import annotations

from typing import Final

from .rule import Rule, rule

# An attempt begins

X1: Final = rule(
    "X1 begun-once",
    "An attempt begins at most once, however often and late the message that begins it arrives.",
)
X2: Final = rule(
    "X2 acknowledged-is-not-resent",
    "A message is not sent again once its sender has the acknowledgement.",
)
X3: Final = rule(
    "X3 old-epoch-changes-nothing",
    "A message from an earlier epoch of a node changes nothing at the gateway.",
)
X4: Final = rule(
    "X4 newest-attempt-only",
    "A decode node grants no attempt beside another one of its request, nor after a newer one that "
    "it remembers.",
)

# P computes the prompt

X5: Final = rule(
    "X5 hit-is-due",
    "A node publishes each full block that it has computed or received, and an attempt hits the "
    "longest prefix that its node has published and not evicted.",
)
X6: Final = rule(
    "X6 hits-plus-computed-is-prompt",
    "The prompt of a computed attempt is as long as its hits in all tiers and its computed tokens "
    "together, and its hits are those of its answer.",
)
X7: Final = rule(
    "X7 hits-are-counted-once",
    "A prefill node and its cache count the hits of each attempt once, and those of a refused one "
    "not at all.",
)
X8: Final = rule(
    "X8 reads-own-prefix",
    "Each read of a block, in any tier, finds the KV of the reader's prefix, in all groups of "
    "layers.",
)

# The KV moves from P to D

X9: Final = rule(
    "X9 sent-once",
    "A block is not sent to a decode node for two prompts at a time if they are half the same.",
)
X10: Final = rule(
    "X10 pulls-what-is-offered",
    "A decode node pulls only parts that a prefill node has offered to its present epoch.",
)
X11: Final = rule(
    "X11 offered-blocks-stay", "The blocks of a part keep the offered KV while it is served."
)
X12: Final = rule("X12 attempt-starts-once", "An attempt starts to decode at most once.")

# D decodes

X13: Final = rule(
    "X13 full-reservation-never-preempts",
    "No request is preempted on a decode node that reserves blocks to the end of each request.",
)
X14: Final = rule(
    "X14 step-in-flight-keeps-blocks",
    "No block that a step in flight reads or writes is given up, or filled by a transfer or a copy "
    "from the host.",
)
X15: Final = rule(
    "X15 end-after-last-step",
    "A decode node reports the end of an attempt once, after the last step that computes it.",
)
X16: Final = rule(
    "X16 output-is-the-models",
    "The tokens of an answer are those that one node alone would generate.",
)

# The request ends

X17: Final = rule("X17 one-answer", "A request has exactly one final answer.")
X18: Final = rule(
    "X18 fail-only-after-all-attempts",
    "A request fails only after its nodes have given all of its attempts up, after its time limit, "
    "or for a reason that no attempt can mend. An attempt that is lost with a node or a "
    "connection, or that the gateway ends because its request is preempted, does not count.",
)
X19: Final = rule(
    "X19 bounded-overtaking",
    "A decode node admits at most a fixed number of later requests before one that it refused and "
    "that keeps asking, unless they leave room for its prompt.",
)
X20: Final = rule(
    "X20 bounded-rounds",
    "All requests end, without new ones and without faults, within a number of rounds that their "
    "work bounds.",
)
X21: Final = rule(
    "X21 no-starvation",
    "Every request ends within a bounded number of rounds, however many arrive after it.",
)
X22: Final = rule(
    "X22 a-loss-costs-no-attempt",
    "An attempt succeeds on idle nodes whichever one of its messages is lost.",
)
# Everything has ended

X23: Final = rule("X23 no-leak", "Every block is free or can be evicted when all has ended.")
X24: Final = rule(
    "X24 idle-gateway-counts-no-load",
    "The gateway counts no load on any node when all requests have ended.",
)
X25: Final = rule("X25 no-unexpected-error", "A valid call raises nothing.")

# The client is told tokens before the answer

X26: Final = rule(
    "X26 told-is-a-prefix",
    "The tokens that a client has been told are at any time a prefix of those that it is told "
    "later, and of its answer, whichever attempts generate them.",
)
X27: Final = rule(
    "X27 asked-is-told",
    "A decode node reports the tokens of an attempt before its end only if the gateway has asked, "
    "or while the attempt is preempted.",
)

# Links are cut

X28: Final = rule(
    "X28 one-pair-is-enough",
    "While a prefill node, a decode node and the gateway hear each other, all requests end within "
    "a bounded number of rounds, whichever other links are cut, in one direction or in both.",
)

# Storage

X29: Final = rule(
    "X29 stored-is-not-sent",
    "A prefill node sends no full block that storage held when the decode node was asked, if the "
    "decode node's host has room, and storage answers without fault and before a peer would count "
    "as silent.",
)

X30: Final = rule(
    "X30 moved-goes-on",
    "The prompt of an attempt is that of its request, and the first tokens of its output, of which "
    "a decode node has reported all when it was preempted.",
)
X31: Final = rule(
    "X31 left-before-moved",
    "A gateway ends a preempted attempt before it begins the one that goes on with its tokens.",
)

# A part travels in pieces

X32: Final = rule(
    "X32 part-arrives-whole",
    "A part has arrived when all of its pieces have, such as the heads of each shard, and no "
    "attempt starts without a part that is on its way or has failed.",
)
X33: Final = rule(
    "X33 late-writer-keeps-blocks",
    "A block that a pull may write, even one that has failed or was cancelled, is used for nothing "
    "else.",
)

HANDOFF_RULES: Final = tuple(value for value in list(globals().values()) if isinstance(value, Rule))
"""Every rule above, in order."""
