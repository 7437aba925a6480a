"""Accounts of every simulated request, and the checks that they add up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ....kvcache.manager import CacheManager
from ...request import Request
from ...step_plan import StepPlan
from ..checks import Check, check_all_blocks_returned, check_violations
from .latency import RequestTimes


class AnswerLog:
    """Arrival and answer of every request: each must be answered once, in full.

    Attributes:
        times: Times of each finished request, in the order they finished.
        refused: Number of requests that can never be served.
        prompt_tokens: Prompt tokens of the finished requests.
        violations: Descriptions of wrong answers.
    """

    def __init__(self) -> None:
        self.times: list[RequestTimes] = []
        self.refused = 0
        self.prompt_tokens = 0
        self.violations: list[str] = []
        self._arrived_s: dict[str, float] = {}

    @property
    def num_answered(self) -> int:
        """Number of finished and refused requests."""
        return len(self.times) + self.refused

    def arrive(self, request: Request, now_s: float) -> None:
        """Record a request that the scheduler or the gateway accepted."""
        self._arrived_s[request.request_id] = now_s

    def refuse(self, request_id: str) -> None:
        """Record a request that can never be served."""
        self._arrived_s.pop(request_id, None)
        self.refused += 1

    def finish(self, request: Request, first_token_s: float | None, now_s: float) -> bool:
        """Record a finished request; return False if it is unknown or has no first token."""
        arrived_s = self._arrived_s.pop(request.request_id, None)
        if arrived_s is None or first_token_s is None:
            self.violations.append(
                f"request {request.request_id}: finished twice, or before its first token"
            )
            return False
        num_outputs = len(request.output_tokens)
        if num_outputs != request.max_new_tokens or request.finish_reason != "length":
            self.violations.append(
                f"request {request.request_id}: {num_outputs} tokens of {request.max_new_tokens}, "
                f"finish_reason {request.finish_reason}"
            )
        self.prompt_tokens += request.num_prompt_tokens
        self.times.append(RequestTimes(arrived_s, first_token_s, now_s, num_outputs))
        return True

    def check(self, num_requests: int) -> Check:
        """Check at the end of a run that all num_requests requests were answered."""
        violations = list(self.violations)
        if self._arrived_s or self.num_answered != num_requests:
            violations.append(
                f"{self.num_answered:,} answers to {num_requests:,} requests, "
                f"{len(self._arrived_s):,} pending"
            )
        detail = f"{len(self.times):,} finished, {self.refused:,} refused"
        return check_violations("every request is answered once, in full", violations, detail)


@dataclass(slots=True, eq=False)
class _Entry:
    """Progress of one request.

    Attributes:
        first_token_s: Time of the first token; None before it.
        hit_tokens: Leading prompt tokens not computed at first admission; None before it.
        host_hit_tokens, storage_hit_tokens: The part of these that came from the host, and from
            storage.
        start, computed: At the latest admission before the first token: the first prompt position
            computed, and the number of positions computed.
        cursor: Next position of the prefill; None while the request holds no blocks.
        end: End of the prefill chunks, where decoding begins.
        lost: End of the positions that were computed before a preemption.
    """

    first_token_s: float | None = None
    hit_tokens: int | None = None
    host_hit_tokens: int = 0
    storage_hit_tokens: int = 0
    start: int = 0
    computed: int = 0
    cursor: int | None = None
    end: int = 0
    lost: int = 0


class NodeAccounts:
    """Accounts of a single node: every prompt is hit up to a point and computed from there.

    They are derived from the step plans, not from the scheduler's counters, so that each checks the
    other.

    Attributes:
        answers: Arrivals and answers.
        hit_tokens, host_hit_tokens, storage_hit_tokens: Prompt tokens of the finished requests that
            hit on the device, on the host and in storage, counted at first admission.
        recomputed_tokens: Tokens whose KV was lost to a preemption and computed again.
        preemptions: Number of preemptions of admitted requests.
    """

    def __init__(self) -> None:
        self.answers = AnswerLog()
        self.hit_tokens = 0
        self.host_hit_tokens = 0
        self.storage_hit_tokens = 0
        self.recomputed_tokens = 0
        self.preemptions = 0
        self._entries: dict[str, _Entry] = {}
        self._violations: list[str] = []

    def arrive(self, request: Request, now_s: float) -> None:
        """Record a request that the scheduler accepted."""
        self.answers.arrive(request, now_s)
        self._entries[request.request_id] = _Entry()

    def record_step(self, plan: StepPlan, end_s: float) -> None:
        """Record what a step computes. Call it before the scheduler's update.

        Args:
            plan: The step.
            end_s: Time at which its tokens are available.
        """
        for request in plan.preempted:
            self._preempt(self._entries[request.request_id], request)
        for chunk in plan.prefill:
            request, end = chunk.request, chunk.start + chunk.length
            entry = self._entries[request.request_id]
            if entry.cursor is None:
                self._begin_prefill(entry, request, chunk.start)
            elif chunk.start != entry.cursor:
                self._violations.append(
                    f"request {request.request_id}: computed up to {entry.cursor}, "
                    f"next chunk from {chunk.start}"
                )
            entry.cursor = end
            self.recomputed_tokens += max(min(end, entry.lost) - chunk.start, 0)
            if entry.first_token_s is None:
                entry.computed += chunk.length
                if end == request.num_tokens:
                    entry.first_token_s = end_s

    def _preempt(self, entry: _Entry, request: Request) -> None:
        if entry.cursor is not None:
            # A decoding request has no KV yet for the token that it would decode next.
            decodes = entry.cursor == entry.end
            entry.lost = max(entry.lost, request.num_tokens - 1 if decodes else entry.cursor)
        entry.cursor = None
        self.preemptions += 1

    def _begin_prefill(self, entry: _Entry, request: Request, start: int) -> None:
        entry.cursor, entry.end = start, request.num_tokens
        if entry.first_token_s is None:
            entry.start, entry.computed = start, 0
        if entry.hit_tokens is None:
            below_device = max(start - request.num_hit_tokens, 0)
            entry.hit_tokens = start
            entry.host_hit_tokens = min(below_device, request.num_host_hit_tokens)
            entry.storage_hit_tokens = below_device - entry.host_hit_tokens
            hit = request.num_hit_tokens + request.num_host_hit_tokens
            hit += request.num_storage_hit_tokens
            if start != hit:
                self._violations.append(
                    f"request {request.request_id}: {hit} tokens hit, computed from {start}"
                )

    def finish(self, request: Request, now_s: float) -> None:
        """Record a request that the scheduler reports as finished."""
        entry = self._entries.pop(request.request_id, None) or _Entry()
        if not self.answers.finish(request, entry.first_token_s, now_s):
            return
        num_prompt = len(request.prompt)
        if entry.start + entry.computed != num_prompt:
            self._violations.append(
                f"request {request.request_id}: {entry.start} hit + {entry.computed} computed "
                f"of {num_prompt} prompt tokens"
            )
        below_device = entry.host_hit_tokens + entry.storage_hit_tokens
        self.hit_tokens += (entry.hit_tokens or 0) - below_device
        self.host_hit_tokens += entry.host_hit_tokens
        self.storage_hit_tokens += entry.storage_hit_tokens

    def checks(self, num_requests: int) -> list[Check]:
        """Check at the end of a run that answers and token counts add up."""
        prompt_tokens = self.answers.prompt_tokens
        below_device = self.host_hit_tokens + self.storage_hit_tokens
        computed = prompt_tokens - self.hit_tokens - below_device
        hits = f"{self.hit_tokens:,}"
        if below_device:
            hits += f" + {self.host_hit_tokens:,}"
        if self.storage_hit_tokens:
            hits += f" + {self.storage_hit_tokens:,}"
        return [
            self.answers.check(num_requests),
            check_violations(
                "prompt = hit + computed tokens, each request",
                self._violations,
                f"{prompt_tokens:,} = {hits} + {computed:,}",
            ),
        ]


class ClusterAccounts:
    """Accounts of a cluster: decode nodes receive exactly the blocks that they lack.

    Attributes:
        answers: Arrivals and answers.
        hit_tokens: Prompt tokens found on the prefill nodes.
        own_tokens: Prompt tokens found on the decode nodes, and not sent.
        sent_blocks: Blocks sent from prefill to decode nodes.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.answers = AnswerLog()
        self.hit_tokens = 0
        self.own_tokens = 0
        self.sent_blocks = 0
        self._lacked_blocks = 0
        self._started_s: dict[str, float] = {}

    def start(self, request: Request, num_cached_tokens: int, now_s: float) -> None:
        """Record that a decode node has the whole prompt and its first token."""
        if self._started_s.setdefault(request.request_id, now_s) != now_s:
            self.answers.violations.append(f"request {request.request_id}: starts twice")
        size = self._block_size
        self.own_tokens += num_cached_tokens
        self._lacked_blocks += -(-request.num_prompt_tokens // size) - num_cached_tokens // size

    def finish(self, request: Request, now_s: float) -> None:
        """Record a request that has all its tokens."""
        if self.answers.finish(request, self._started_s.get(request.request_id), now_s):
            self.hit_tokens += request.num_hit_tokens

    def checks(
        self, num_requests: int, managers: Iterable[CacheManager], preemptions: int | None
    ) -> list[Check]:
        """Check at the end of a run that answers, transfers and blocks add up.

        Args:
            num_requests: Number of requests in the trace.
            managers: Managers of all nodes.
            preemptions: Preemptions of a run that must have none; None where they are allowed.
        """
        returned = [check_all_blocks_returned(manager) for manager in managers]
        first = next((each for each in returned if not each.ok), returned[-1])
        detail = f"on each of {len(returned)} nodes" if first.ok else first.detail
        checks = [
            self.answers.check(num_requests),
            Check(
                "D receives exactly the blocks it lacks",
                self.sent_blocks == self._lacked_blocks,
                f"{self.sent_blocks:,} blocks sent, {self._lacked_blocks:,} lacked",
            ),
            Check(first.name, first.ok, detail),
        ]
        if preemptions is not None:
            name = "nothing is preempted: all growth is reserved"
            checks.append(Check(name, preemptions == 0, f"{preemptions:,} preemptions"))
        return checks
