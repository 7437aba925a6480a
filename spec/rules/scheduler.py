"""The rules of a scheduler over a paged KV cache: chapter Q of the specification.

A request *waits*, *runs* (it holds blocks) or has ended; one that lost its blocks is *preempted*,
and waits to be *resumed*. In a step the scheduler names chunks of requests, the device computes
them, and the scheduler receives the results. Between the two the step is *in flight*; a scheduler
that runs ahead has several in flight. The rules stand in the order of a request's life.
Those about a policy apply only to a scheduler that promises it (`SchedulerPromises`).
"""

from __future__ import annotations

from typing import Final

from .rule import Rule, rule

# Submission

Q1: Final = rule(
    "Q1 refuse-only-too-large",
    "A request is refused if, and only if, the whole pool could not hold it at its limit.",
)
Q2: Final = rule(
    "Q2 request-has-one-state",
    "A request waits, runs or has ended, never two of these; it holds blocks only while it runs.",
)

# Waiting

Q3: Final = rule(
    "Q3 admit-in-policy-order",
    "Requests wait and are admitted in the policy's order, except those that wait for a block "
    "of another request.",
)
Q4: Final = rule("Q4 resumed-before-new", "No new request starts while a preempted one waits.")
Q5: Final = rule(
    "Q5 shared-prefix-computed-once",
    "No request is admitted to compute a block that another is about to compute: it waits.",
)

Q6: Final = rule(
    "Q6 bounded-overtaking",
    "A waiting request is overtaken by a bounded number of later requests.",
)

# Admission

Q7: Final = rule(
    "Q7 admit-what-fits",
    "The first waiting request is admitted if slots, budget and blocks allow it.",
)
Q8: Final = rule(
    "Q8 admission-reserves-growth",
    "The blocks that remain after an admission cover the growth of all running requests within "
    "the horizon.",
)
Q9: Final = rule(
    "Q9 one-request-can-finish",
    "Each running request could finish after an admission if all others were preempted.",
)
Q10: Final = rule(
    "Q10 admission-leaves-last-token",
    "An admitted request starts after its hit, but computes its last token, for the logits.",
)
Q11: Final = rule(
    "Q11 hit-is-due",
    "An admitted request hits every published block of its prefix that was not handed out again.",
)
Q39: Final = rule(
    "Q39 sample-copies-last-block",
    "A sample of a prompt that another running one has computed, and hit, copies the block that is "
    "not whole, and computes the last token alone.",
)
Q12: Final = rule(
    "Q12 ask-storage-first",
    "Storage is asked for the blocks of a request before its admission, unless the requests that "
    "wait want more blocks than the host has.",
)
Q13: Final = rule(
    "Q13 hits-are-counted-once",
    "Hits are counted at the first admission; those of resumed requests are counted separately.",
)

# A step

Q14: Final = rule("Q14 no-idle-step", "A step computes something if, and only if, there is work.")
Q15: Final = rule(
    "Q15 step-keeps-token-budget", "The chunks of a step keep within its token budget."
)
Q16: Final = rule(
    "Q16 step-keeps-slot-limit",
    "A step computes at most `max_running` requests; if promised, no more than these run.",
)
Q17: Final = rule(
    "Q17 running-first",
    "Running requests progress in every step, decoding ones first; only the budget cuts a chunk. "
    "They wait for steps in flight only while blocks are short.",
)
Q18: Final = rule(
    "Q18 wait-only-for-needed-copies",
    "A running request waits for a copy only if the copy fills its blocks or frees some that it "
    "needs.",
)
Q19: Final = rule(
    "Q19 chunk-starts-after-computed",
    "A chunk starts after the tokens that are computed or in flight, and ends at the latest at the "
    "last token that is known, or that a step in flight samples.",
)
Q20: Final = rule(
    "Q20 scheduled-tokens-have-blocks",
    "A request in a step holds a block for every token that it reads or writes.",
)
Q21: Final = rule(
    "Q21 running-request-holds-all-blocks",
    "A running request holds blocks for all of its tokens, and no more.",
)
Q22: Final = rule(
    "Q22 step-reads-own-prefix", "Every read of a step finds the KV of the request's own prefix."
)
Q23: Final = rule(
    "Q23 step-in-flight-keeps-blocks",
    "No block that a step in flight reads, writes or copies is given up, by an end, a preemption "
    "or a duplicate.",
)

# Preemption

Q24: Final = rule(
    "Q24 preempt-only-when-short", "No request is preempted while blocks are available."
)
Q25: Final = rule(
    "Q25 full-reservation-never-preempts",
    "No request is preempted if all requests reserve blocks up to their limits.",
)
Q26: Final = rule(
    "Q26 victim-is-last",
    "A preempted request comes after all that keep running, in the policy's order.",
)
Q27: Final = rule("Q27 no-admission-with-preemption", "A step that preempts a request admits none.")

# Ends: output, progress, aborts

Q28: Final = rule(
    "Q28 output-is-the-models",
    "The output of a request is that of the model alone: preemption loses and repeats nothing, and "
    "a token that is sampled after the end is discarded.",
)
Q29: Final = rule(
    "Q29 options-keep-output",
    "Cache, chunks and batches change when tokens are computed, not which.",
)
Q30: Final = rule(
    "Q30 bounded-steps",
    "All requests end within a number of steps that their work bounds, when no new ones arrive.",
)
Q31: Final = rule(
    "Q31 no-starvation",
    "Every request ends within a bounded number of steps, however many arrive after it.",
)
Q32: Final = rule("Q32 abort-ends-at-once", "An abort ends a request at once, in any state.")

Q33: Final = rule(
    "Q33 reset-drops-parked",
    "A reset for new weights drops the KV that is kept for preempted requests, too.",
)

# Misuse, after each step, and after everything has ended

Q34: Final = rule(
    "Q34 misuse-is-refused",
    "A call that is repeated or out of order is refused, and changes nothing.",
)
Q35: Final = rule("Q35 no-unexpected-error", "A valid call raises nothing.")
Q36: Final = rule(
    "Q36 no-leak", "Every block is available or held by a running request after a step."
)
Q37: Final = rule("Q37 counts-are-correct", "The counts of steps, tokens and requests are correct.")
Q38: Final = rule(
    "Q38 drained-scheduler-holds-nothing", "When all requests have ended, all blocks are available."
)

SCHEDULER_RULES: Final = tuple(
    value for value in list(globals().values()) if isinstance(value, Rule)
)
"""Every rule above, in order."""
