"""The named invariants that hold in the simulation under all faults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Invariant:
    """An invariant.

    Attributes:
        name: prefix of the error message of a violation.
        text: statement of the invariant.
    """

    name: str
    text: str


ONE_START: Final = Invariant("H1 one-start", "an attempt starts to decode at most once")
ONE_ANSWER: Final = Invariant("H2 one-answer", "a request has exactly one final answer")
SAME_TOKENS: Final = Invariant(
    "H3 same-tokens", "its tokens are those that one node alone generates"
)
OWN_CONTENT: Final = Invariant(
    "H4 own-content",
    "each read of a block, in any tier, finds the KV of the reader's prefix, in all layer groups",
)
OFFERS_STAY: Final = Invariant(
    "H5 offers-stay", "while a part is served, its blocks keep the offered KV"
)
NO_LEAK: Final = Invariant("H6 no-leak", "when everything has ended, every block is free")
ALL_END: Final = Invariant("H7 all-end", "when the faults stop, everything ends")
NO_EVICT: Final = Invariant(
    "H8 no-evict", "no request is preempted on a D that reserves to the end of each request"
)
COUNTED_ONCE: Final = Invariant(
    "H9 counted-once", "hits of all tiers and computed tokens add up to the prompt"
)
SENT_ONCE: Final = Invariant(
    "H10 sent-once",
    "a decode node does not receive a block for two prompts at a time if they are half the same",
)
BEGUN_ONCE: Final = Invariant(
    "H11 begun-once",
    "an attempt begins at most once, however often and late RunPrefill arrives",
)
NO_RESEND: Final = Invariant("H12 no-resend", "an acknowledged message is not sent again")
ALL_ATTEMPTS: Final = Invariant(
    "H13 all-attempts",
    "a request fails only after all attempts, or for a reason that no attempt can mend",
)
OLD_EPOCHS: Final = Invariant(
    "H14 old-epochs", "a message from an earlier epoch of a node changes nothing at the gateway"
)
IDLE_NODES: Final = Invariant(
    "H15 idle-nodes", "when everything has ended, the gateway counts no load on any node"
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
    NO_RESEND,
    ALL_ATTEMPTS,
    OLD_EPOCHS,
    IDLE_NODES,
)


class SimulationError(AssertionError):
    """An invariant is broken."""

    def __init__(self, broken: Invariant, what: str) -> None:
        super().__init__(f"[{broken.name}] {what}")
        self.broken = broken
