"""For each rule of the hand-off, a planted bug that breaks it."""

from __future__ import annotations

from typing import Final

BITES: Final = {
    "begun-once": "P begins an attempt at each copy of RunPrefill",
    "acknowledged-is-not-resent": "an acknowledged message is resent",
    "old-epoch-changes-nothing": "messages of any epoch are accepted",
    "hit-is-due": "P publishes nothing that it computed",
    "hits-plus-computed-is-prompt": "P forgets host hits",
    "hits-are-counted-once": "P counts the hits of refused attempts",
    "reads-own-prefix": "D publishes at the grant",
    "sent-once": "a block is granted for two prompts at once",
    "offered-blocks-stay": "P releases offered blocks before the fence",
    "attempt-starts-once": "a start is reported twice",
    "full-reservation-never-preempts": "nothing is reserved for requests being received",
    "step-in-flight-keeps-blocks": "a stopped request gives up blocks that steps in flight use",
    "end-after-last-step": "the end of a request is reported by the first of two steps in flight",
    "output-is-the-models": "the seed is lost in COMMIT",
    "one-answer": "the end of a request is returned twice",
    "fail-only-after-all-attempts": "an attempt that was lost counts as failed",
    "bounded-overtaking": "a large request starves",
    "bounded-rounds": "the end of an attempt is not reported to the side",
    "no-leak": "D leaks the lease of an aborted attempt",
    "idle-gateway-counts-no-load": "ended attempts stay in the load",
    "no-unexpected-error": "P releases the lease of a hand-off itself",
    "no-starvation": "a large request starves",
    "newest-attempt-only": "a stale attempt is accepted",
    "pulls-what-is-offered": "P sends parts that it does not offer",
    "a-loss-costs-no-attempt": "ASK is not repeated",
    "told-is-a-prefix": "the tokens of another attempt are told again",
    "asked-is-told": "D reports tokens that nobody asked for",
    "stored-is-not-sent": "D grants before storage has answered",
    "moved-goes-on": "the next attempt of a moved request lacks a token",
    "left-before-moved": "two decode nodes run a moved request",
    "part-arrives-whole": "a part that failed counts as arrived",
    "late-writer-keeps-blocks": "D releases a grant before its pulls are fenced",
    "one-pair-is-enough": "two broken pairs take turns for ever",
}
"""Name of the bug, by the name of the rule without its code."""
