"""The plan of a step, and the counts of a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .request import Request


class Chunk(NamedTuple):
    """Tokens ``start .. start + length - 1`` of a request, computed in one step."""

    request: Request
    start: int
    length: int


@dataclass(slots=True)
class StepPlan:
    """The chunks that one step computes.

    Attributes:
        chunks: decode rows first (one token each), then prefill chunks. If there is none, all
            requests wait; do not pass the plan to `MixedScheduler.update`.
        num_decode: number of chunks that are decode rows.
        num_tokens: number of tokens in all chunks; at most the budget.
        admitted: requests that got their blocks; they may have to wait for copies into them.
        preempted: requests that lost their blocks.
    """

    chunks: list[Chunk] = field(default_factory=list)
    num_decode: int = 0
    num_tokens: int = 0
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    def add_decode(self, requests: Sequence[Request]) -> None:
        """Append a token of each of some requests that decode, and count it as scheduled."""
        for request in requests:
            self.chunks.append(Chunk(request, request.num_scheduled, 1))
            request.num_steps += 1
            request.num_scheduled += 1
            request.num_unread += 1
        self.num_decode += len(requests)
        self.num_tokens += len(requests)

    def add(self, chunk: Chunk) -> None:
        """Append a chunk, and count its tokens as scheduled."""
        self.chunks.append(chunk)
        self.num_tokens += chunk.length
        request = chunk.request
        request.num_steps += 1
        request.num_scheduled += chunk.length
        request.num_unread += request.num_scheduled == request.num_tokens + request.num_unread


@dataclass
class SchedulerStats:
    """Counts of events since the scheduler was made.

    If all requests have finished and none was preempted, the sum of `hit_tokens`,
    `host_hit_tokens`, `storage_hit_tokens` and `prefill_tokens` is the length of all prompts.

    Attributes:
        steps: non-empty plans.
        admitted: requests that began to compute, each counted once. On a prefill node: attempts
            that were granted.
        resumed: admissions after a preemption.
        preemptions: times that a request lost its blocks.
        parked: preemptions that parked the KV; resumed_parked: admissions with parked KV.
        hit_tokens: prompt tokens found on the device, counted when a request first computes; on a
            prefill node, therefore, not for an attempt that its decode node refuses.
        host_hit_tokens: prompt tokens copied from the host, without `storage_hit_tokens`.
        storage_hit_tokens: prompt tokens that the request's own prefetch brought from storage.
        resumed_hit_tokens: tokens that a resumed request did not have to recompute.
        prefill_tokens: tokens computed in prefill chunks.
        recomputed_tokens: prefill tokens that had been computed before a preemption.
        decode_tokens: tokens computed in decode rows.
        waits_for_leader: times that a request waited for another to compute a block it needs.
        waits_for_blocks: times that a decoding request waited for copies to free a block.
        prefetches_put_off: times that a prefetch was put off because the host had no room.
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
