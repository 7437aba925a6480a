"""The rules of a scheduler over a paged KV cache: chapter Q of the specification.

A request *waits*, *runs* (it holds blocks) or has ended; one that lost its blocks is *preempted*,
and waits to be *resumed*. In a step the scheduler names chunks of requests, the device computes
them, and the scheduler hears of the results. The rules say what it may name, and what must come.
"""

from __future__ import annotations

from typing import Final

from .rule import Rule, rule

# Every scheduler: requests

Q1: Final = rule(
    "Q1 one-state",
    "A request waits, runs or has ended, never two of these; it holds blocks only while it runs.",
)
Q10: Final = rule(
    "Q10 same-tokens",
    "A request's output is what the model alone makes of it: preemption loses and repeats nothing.",
)
Q13: Final = rule("Q13 abort-ends-at-once", "An abort ends a request, whatever its state.")
Q19: Final = rule(
    "Q19 too-large-refused",
    "A request is refused if, and only if, the whole pool could not hold it to its limit.",
)

# Every scheduler: steps

Q2: Final = rule(
    "Q2 within-budget", "A step keeps to its budget of tokens, and to the number that may run."
)
Q3: Final = rule(
    "Q3 chunk-starts-where-computed",
    "A chunk starts at the first token that is not computed, and ends with the last known one.",
)
Q4: Final = rule(
    "Q4 work-has-blocks", "A request in a step holds a block for every token it reads or writes."
)
Q11: Final = rule(
    "Q11 leave-one-to-compute",
    "An admitted request starts after its hit, but computes its last token, for its logits.",
)
Q12: Final = rule(
    "Q12 reads-own-prefix", "What a step reads is the KV of the request's own prefix."
)
Q23: Final = rule("Q23 step-keeps-its-blocks", "The blocks of a step in flight are not given up.")
Q24: Final = rule("Q24 work-goes-on", "A step computes something if, and only if, there is work.")

# Every scheduler: ends

Q14: Final = rule(
    "Q14 bounded-steps",
    "With no more to come, all requests end within steps that their work bounds.",
)
Q15: Final = rule(
    "Q15 no-starvation", "However many come after them, requests end within bounded steps."
)
Q20: Final = rule("Q20 drained-is-empty", "When all requests have ended, all blocks can be had.")
Q22: Final = rule(
    "Q22 no-leak", "After a step, a block is held by a request that runs, or it can be had."
)
Q30: Final = rule(
    "Q30 misuse-is-refused", "A call out of turn or twice is refused, and changes nothing."
)
Q31: Final = rule("Q31 no-surprise", "A call with right arguments raises nothing.")
Q32: Final = rule(
    "Q32 same-whatever-the-options", "Cache, chunks and batches change when, not what is computed."
)

# Policies: who promises them

Q5: Final = rule(
    "Q5 running-first",
    "Who runs gets further in every step, decoding ones first; only the budget cuts a chunk.",
)
Q6: Final = rule(
    "Q6 policy-order",
    "Requests wait and are admitted in the policy's order, but for those that wait for a leader.",
)
Q7: Final = rule("Q7 resumed-before-new", "No new request starts while a preempted one waits.")
Q8: Final = rule("Q8 never-admit-and-preempt-together", "A step that preempts admits nobody.")
Q9: Final = rule("Q9 victim-is-last", "Who is preempted comes after all who go on, in the order.")
Q16: Final = rule(
    "Q16 count-hits-once", "Hits are counted at the first admission, and apart when resumed."
)
Q17: Final = rule(
    "Q17 shared-prefix-computed-once",
    "Nobody is admitted to compute a block that another is about to compute: it waits.",
)
Q18: Final = rule(
    "Q18 no-preemption-when-whole-is-reserved",
    "If requests reserve all they may come to need, nobody is preempted.",
)
Q21: Final = rule(
    "Q21 whole-or-nothing", "A request that runs holds blocks for all its tokens, and no more."
)
Q25: Final = rule("Q25 preempt-only-when-short", "Nobody is preempted while there are blocks.")
Q26: Final = rule(
    "Q26 reserve-growth",
    "After an admission, the blocks left cover what all who run grow by within the horizon.",
)
Q27: Final = rule(
    "Q27 one-can-finish",
    "After an admission, each who runs could get to its end if all others were preempted.",
)
Q28: Final = rule(
    "Q28 admit-what-fits", "The first who waits is admitted if slots, budget and blocks allow it."
)
Q29: Final = rule("Q29 counts-are-true", "The counts of steps, tokens and requests are true.")

SCHEDULER_RULES: Final = tuple(
    value for value in list(globals().values()) if isinstance(value, Rule)
)
"""Every rule above, in order."""
