"""What must hold in the simulation, whatever fails: each rule has a name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Invariant:
    """A rule.

    Attributes:
        name: stands in front of the message of what breaks it.
        text: what must hold.
    """

    name: str
    text: str


ONE_START: Final = Invariant("H1 one-start", "an attempt starts to decode at most once")
ONE_ANSWER: Final = Invariant("H2 one-answer", "a request has exactly one final answer")
SAME_TOKENS: Final = Invariant("H3 same-tokens", "its tokens are those that one node alone gives")
OWN_CONTENT: Final = Invariant(
    "H4 own-content",
    "whoever reads a block, in any tier, finds the KV of its own prefix, in all groups of layers",
)
OFFERS_STAY: Final = Invariant(
    "H5 offers-stay", "while a part is served, its blocks hold what was offered"
)
NO_LEAK: Final = Invariant("H6 no-leak", "when everything has ended, every block is free")
ALL_END: Final = Invariant("H7 all-end", "when the faults stop, everything ends")
NO_EVICT: Final = Invariant(
    "H8 no-evict", "where D reserves to the end of each request, none is preempted"
)
COUNTED_ONCE: Final = Invariant(
    "H9 counted-once", "hits of all tiers and computed tokens are the prompt, counted once"
)
SENT_ONCE: Final = Invariant(
    "H10 sent-once",
    "no block is granted for two prompts at a time on one decode node if half of them is the same",
)
BEGUN_ONCE: Final = Invariant(
    "H11 begun-once",
    "an attempt begins at most once, however often the gateway asks for it, and however late",
)
HEARD: Final = Invariant("H12 heard", "who is told that a message was heard does not say it again")
ALL_ATTEMPTS: Final = Invariant(
    "H13 all-attempts",
    "no request fails before all of its attempts have, but for what no attempt can mend",
)
OLD_LIVES: Final = Invariant(
    "H14 old-lives", "what an earlier life of a node has said changes nothing at the gateway"
)
IDLE_NODES: Final = Invariant(
    "H15 idle-nodes", "when everything has ended, the gateway takes no node for busy"
)

INVARIANTS: Final = (
    ONE_START,
    ONE_ANSWER,
    SAME_TOKENS,
    OWN_CONTENT,
    OFFERS_STAY,
    NO_LEAK,
    ALL_END,
    NO_EVICT,
    COUNTED_ONCE,
    SENT_ONCE,
    BEGUN_ONCE,
    HEARD,
    ALL_ATTEMPTS,
    OLD_LIVES,
    IDLE_NODES,
)


class SimulationError(AssertionError):
    """The simulation has seen what must not happen."""

    def __init__(self, broken: Invariant, what: str) -> None:
        super().__init__(f"[{broken.name}] {what}")
        self.broken = broken
