"""The rules of plans that are broadcast: what processes that share a model must do.

*Process 0* plans. A *call* is what it dispatches to its devices, and each other process must
dispatch the same, because the devices compute one program together. Messages may be lost, doubled,
damaged or out of order, and a process may execute something else.
"""

from __future__ import annotations

from typing import Final

from .rule import Rule, rule

# A process executes calls

G1: Final = rule(
    "G1 calls-in-order",
    "A process executes each call of process 0 at most once, and after all calls before it.",
)
G2: Final = rule(
    "G2 damaged-is-not-executed", "A call that was damaged on its way is not executed."
)
# Process 0 uses results

G3: Final = rule(
    "G3 results-after-reports",
    "Process 0 uses results only after every process has executed the same calls as it has.",
)
G4: Final = rule(
    "G4 no-error-without-a-fault",
    "Processes that execute the same calls, and whose messages arrive, go on without an error.",
)
G5: Final = rule(
    "G5 same-weights",
    "Every process executes a call with the weights that process 0 has when it sends the call.",
)

GROUP_RULES: Final = tuple(value for value in list(globals().values()) if isinstance(value, Rule))
"""Every rule above, in order."""
