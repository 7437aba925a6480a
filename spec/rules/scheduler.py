"""The rules of a scheduler over a paged KV cache: chapter Q of the specification.

A request *waits*, *runs* (it holds blocks) or has ended; one that lost its blocks is *preempted*,
and waits to be *resumed*. In a step the scheduler names chunks of requests, the device computes
them, and the scheduler receives the results. The rules stand in the order of a request's life.
Those about a policy apply only to a scheduler that promises it (`SchedulerPromises`).
"""

from __future__ import annotations

from typing import Final

from .rule import Rule, rule

# Submission

Q19: Final = rule(
    "Q19 too-large-refused",
    "A request is refused if, and only if, the whole pool could not hold it at its limit.",
)
Q1: Final = rule(
    "Q1 one-state",
    "A request waits, runs or has ended, never two of these; it holds blocks only while it runs.",
)

# Waiting

Q6: Final = rule(
    "Q6 policy-order",
    "Requests wait and are admitted in the policy's order, except those that wait for a block "
    "of another request.",
)
Q7: Final = rule("Q7 resumed-before-new", "No new request starts while a preempted one waits.")
Q17: Final = rule(
    "Q17 shared-prefix-computed-once",
    "No request is admitted to compute a block that another is about to compute: it waits.",
)

Q35: Final = rule(
    "Q35 bounded-overtaking",
    "A waiting request is overtaken by a bounded number of later requests.",
)

# Admission

Q28: Final = rule(
    "Q28 admit-what-fits",
    "The first waiting request is admitted if slots, budget and blocks allow it.",
)
Q26: Final = rule(
    "Q26 reserve-growth",
    "The blocks that remain after an admission cover the growth of all running requests within "
    "the horizon.",
)
Q27: Final = rule(
    "Q27 one-can-finish",
    "Each running request could finish after an admission if all others were preempted.",
)
Q11: Final = rule(
    "Q11 leave-one-to-compute",
    "An admitted request starts after its hit, but computes its last token, for the logits.",
)
Q34: Final = rule(
    "Q34 hit-is-due",
    "An admitted request hits every published block of its prefix that was not handed out again.",
)
Q37: Final = rule(
    "Q37 ask-storage-first",
    "Storage is asked for the blocks of a request before its admission, unless the requests that "
    "wait want more blocks than the host has.",
)
Q16: Final = rule(
    "Q16 count-hits-once",
    "Hits are counted at the first admission; those of resumed requests are counted separately.",
)

# A step

Q24: Final = rule("Q24 work-goes-on", "A step computes something if, and only if, there is work.")
Q2: Final = rule("Q2 within-budget", "The chunks of a step keep within its token budget.")
Q33: Final = rule(
    "Q33 within-slots",
    "A step computes at most `max_running` requests; if promised, no more than these run.",
)
Q5: Final = rule(
    "Q5 running-first",
    "Running requests progress in every step, decoding ones first; only the budget cuts a chunk.",
)
Q36: Final = rule(
    "Q36 wait-only-for-needed-copies",
    "A running request waits for a copy only if the copy fills its blocks or frees some that it "
    "needs.",
)
Q3: Final = rule(
    "Q3 chunk-starts-where-computed",
    "A chunk starts at the first token that is not computed, and ends at the last known one at "
    "the latest.",
)
Q4: Final = rule(
    "Q4 work-has-blocks",
    "A request in a step holds a block for every token that it reads or writes.",
)
Q21: Final = rule(
    "Q21 whole-or-nothing", "A running request holds blocks for all of its tokens, and no more."
)
Q12: Final = rule(
    "Q12 reads-own-prefix", "Every read of a step finds the KV of the request's own prefix."
)
Q23: Final = rule("Q23 step-keeps-its-blocks", "The blocks of a step in flight are not given up.")

# Preemption

Q25: Final = rule(
    "Q25 preempt-only-when-short", "No request is preempted while blocks are available."
)
Q18: Final = rule(
    "Q18 no-preemption-when-whole-is-reserved",
    "No request is preempted if all requests reserve blocks up to their limits.",
)
Q9: Final = rule(
    "Q9 victim-is-last",
    "A preempted request comes after all that keep running, in the policy's order.",
)
Q8: Final = rule(
    "Q8 never-admit-and-preempt-together", "A step that preempts a request admits none."
)

# Ends: output, progress, aborts

Q10: Final = rule(
    "Q10 same-tokens",
    "The output of a request is that of the model alone: preemption loses and repeats nothing.",
)
Q32: Final = rule(
    "Q32 same-whatever-the-options",
    "Cache, chunks and batches change when tokens are computed, not which.",
)
Q14: Final = rule(
    "Q14 bounded-steps",
    "All requests end within a number of steps that their work bounds, when no new ones arrive.",
)
Q15: Final = rule(
    "Q15 no-starvation",
    "Every request ends within a bounded number of steps, however many arrive after it.",
)
Q13: Final = rule("Q13 abort-ends-at-once", "An abort ends a request at once, in any state.")

Q38: Final = rule(
    "Q38 reset-drops-parked",
    "A reset for new weights drops the KV that is kept for preempted requests, too.",
)

# Misuse, after each step, and after everything has ended

Q30: Final = rule(
    "Q30 misuse-is-refused",
    "A call that is repeated or out of order is refused, and changes nothing.",
)
Q31: Final = rule("Q31 no-surprise", "A valid call raises nothing.")
Q22: Final = rule(
    "Q22 no-leak", "Every block is available or held by a running request after a step."
)
Q29: Final = rule("Q29 counts-are-true", "The counts of steps, tokens and requests are correct.")
Q20: Final = rule("Q20 drained-is-empty", "When all requests have ended, all blocks are available.")

SCHEDULER_RULES: Final = tuple(
    value for value in list(globals().values()) if isinstance(value, Rule)
)
"""Every rule above, in order."""
