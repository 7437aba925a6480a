"""What the cost model says of one planned step."""

from __future__ import annotations

from ...step_plan import StepPlan
from .cost_model import CostModel, attention_pairs


def plan_s(costs: CostModel, plan: StepPlan) -> float:
    """Seconds that a step takes."""
    decode, prefill = plan.chunks[: plan.num_decode], plan.chunks[plan.num_decode :]
    # Chunks of one token at position s: n = s + 1, and (n^2 - s^2) / 2 = s + 1/2.
    starts = sum([chunk.start for chunk in decode])
    context = starts + len(decode)
    pairs = starts + 0.5 * len(decode)
    for chunk in prefill:
        end = chunk.start + chunk.length
        context += end
        pairs += attention_pairs(chunk.start, end)
    return costs.step_s(plan.num_tokens, context, pairs)
