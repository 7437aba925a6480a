"""What a scheduler decides for one step, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from .request import Request


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``start .. start + length - 1`` of a request, to be computed in one step."""

    request: Request
    start: int
    length: int


@dataclass(slots=True)
class StepPlan:
    """What one step computes.

    Attributes:
        chunks: decode rows first (one token each), then prefill chunks. There may be none: then
            everybody waits for copies, and the plan is not to be updated.
        num_decode: how many of the chunks are decode rows.
        num_tokens: the tokens of all chunks; at most the budget.
        admitted: requests that got their blocks; they may have to wait for copies into them.
        preempted: requests that lost theirs.
    """

    chunks: list[Chunk] = field(default_factory=list)
    num_decode: int = 0
    num_tokens: int = 0
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    def add(self, chunk: Chunk) -> None:
        """Append a chunk and count its tokens."""
        self.chunks.append(chunk)
        self.num_tokens += chunk.length


@dataclass
class SchedulerStats:
    """Counts of events.

    When all requests ran to their ends and none was preempted, their prompts are `hit_tokens` +
    `host_hit_tokens` + `storage_hit_tokens` + `prefill_tokens`.

    Attributes:
        steps: plans made that were not empty.
        admitted: requests that have begun to compute, each counted once. On a prefill node:
            attempts, without those that no decode node has granted.
        resumed: admissions after a preemption.
        preemptions: requests that lost their blocks.
        parked: those of them whose KV was to be kept; resumed_parked: admitted again with it.
        hit_tokens: prompt tokens found on the device, counted once, as a request first computes.
        host_hit_tokens: those that the host had besides, and that arrived from there.
        storage_hit_tokens: those of them that the request's own prefetch had brought to the host.
        resumed_hit_tokens: tokens that a resumed request had not to compute again.
        prefill_tokens: tokens computed in prefill chunks.
        recomputed_tokens: those of them that had been computed before a preemption.
        decode_tokens: tokens computed in decode rows.
        waits_for_leader: times a request waited for another to compute the block it needs.
        waits_for_blocks: times a request that decodes waited for blocks that are being copied.
        prefetches_put_off: times a request did not ask storage, as the host had no room for more.
    """

    steps: int = 0
    admitted: int = 0
    resumed: int = 0
    preemptions: int = 0
    parked: int = 0
    resumed_parked: int = 0
    hit_tokens: int = 0
    host_hit_tokens: int = 0
    storage_hit_tokens: int = 0
    resumed_hit_tokens: int = 0
    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    decode_tokens: int = 0
    waits_for_leader: int = 0
    waits_for_blocks: int = 0
    prefetches_put_off: int = 0
