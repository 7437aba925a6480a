"""For each rule of the hand-off, a planted bug that breaks it."""

from __future__ import annotations

from typing import Final

BITES: Final = {
    "begun-once": "P begins an attempt at each copy of RunPrefill",
    "not-sent-again": "an acknowledged message is resent",
    "old-epochs": "messages of any epoch are accepted",
    "hit-is-due": "P publishes nothing that it computed",
    "hits-and-computed": "P forgets host hits",
    "hits-counted-once": "P counts the hits of refused attempts",
    "own-content": "D publishes at the grant",
    "sent-once": "a block is granted for two prompts at once",
    "offers-stay": "P releases offered blocks before the fence",
    "one-start": "a start is reported twice",
    "not-preempted": "nothing is reserved for requests being received",
    "same-tokens": "the seed is lost in COMMIT",
    "one-answer": "the end of a request is returned twice",
    "all-attempts": "a failure that is reported twice counts twice",
    "bounded-overtaking": "a large request starves",
    "bounded-rounds": "the end of an attempt is not reported to the side",
    "no-leak": "D leaks the lease of an aborted attempt",
    "idle-nodes": "ended attempts stay in the load",
    "no-surprise": "P releases the lease of a hand-off itself",
}
"""Name of the bug, by the name of the rule without its code."""
