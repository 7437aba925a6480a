"""What became of every request of a simulation, and whether it adds up."""

from __future__ import annotations

from collections.abc import Sequence

from ....kvcache.manager import CacheManager
from ....kvcache.prefix.lease import TierStats
from ...request import Request
from ...step_plan import StepPlan
from ..checks import Check
from .latency import RequestTimes


class _Entry:
    """One request on its way.

    Attributes:
        hit_tokens: leading prompt tokens not computed at first admission; None before it.
        host_hit_tokens, storage_hit_tokens: the last of them, which came from the host, and the
            last of all, which came from storage.
        start, computed: of its latest admission before the first token: the first prompt position
            computed, and how many were.
        cursor: the next position to be computed in a prefill chunk; None while it holds no blocks.
        end: where its prefill chunks end; from there on it decodes.
        lost: it was computed up to here before a preemption.
    """

    __slots__ = (
        "arrival_s",
        "computed",
        "cursor",
        "end",
        "first_token_s",
        "hit_tokens",
        "host_hit_tokens",
        "lost",
        "start",
        "storage_hit_tokens",
    )

    def __init__(self, arrival_s: float) -> None:
        self.arrival_s = arrival_s
        self.first_token_s: float | None = None
        self.hit_tokens: int | None = None
        self.host_hit_tokens = 0
        self.storage_hit_tokens = 0
        self.start = 0
        self.computed = 0
        self.cursor: int | None = None
        self.end = 0
        self.lost = 0


class Ledger:
    """Follows requests from arrival to answer and notes whatever does not add up.

    It reads plans only, and trusts no count of the scheduler's: each prompt must be hit, then
    computed in consecutive chunks up to its end, and each request answered once and in full.

    Attributes:
        times: of each finished request, in the order they finished.
        refused: requests that can never be served.
        prompt_tokens, hit_tokens, host_hit_tokens, storage_hit_tokens: of the finished requests, at
            first admission; hits on the device, on the host, and in storage.
        recomputed_tokens: whose KV was computed, lost to a preemption, and computed again.
        preemptions: of admitted requests.
    """

    def __init__(self) -> None:
        self.times: list[RequestTimes] = []
        self.refused = 0
        self.prompt_tokens = 0
        self.hit_tokens = 0
        self.host_hit_tokens = 0
        self.storage_hit_tokens = 0
        self.recomputed_tokens = 0
        self.preemptions = 0
        self._live: dict[str, _Entry] = {}
        self._wrong_accounts: list[str] = []
        self._wrong_answers: list[str] = []

    @property
    def num_answered(self) -> int:
        """Requests that are finished or refused."""
        return len(self.times) + self.refused

    def arrive(self, request: Request, arrival_s: float) -> None:
        """Note a request that the scheduler has taken."""
        self._live[request.request_id] = _Entry(arrival_s)

    def follow(self, plan: StepPlan, end_s: float) -> None:
        """Note what a step computes; before the scheduler's update.

        Args:
            plan: the step.
            end_s: when its tokens are there.
        """
        for request in plan.preempted:
            self._preempt(self._live[request.request_id], request)
        for chunk in plan.chunks[plan.num_decode :]:
            request, end = chunk.request, chunk.start + chunk.length
            entry = self._live[request.request_id]
            if entry.cursor is None:
                self._begin_prefill(entry, request, chunk.start)
            elif chunk.start != entry.cursor:
                self._wrong_accounts.append(
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
            # The token that it was to decode next has no KV yet.
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
            # A prompt that hits in full has its last token computed again, for its logits.
            if start != min(hit, len(request.prompt) - 1):
                self._wrong_accounts.append(
                    f"request {request.request_id}: {hit} tokens hit, computed from {start}"
                )

    def finish(self, request: Request, now_s: float) -> None:
        """Note a request that the scheduler reports as finished."""
        entry = self._live.pop(request.request_id, None)
        if entry is None or entry.first_token_s is None or entry.hit_tokens is None:
            self._wrong_answers.append(f"request {request.request_id}: twice, or before a token")
            return
        num_prompt, num_outputs = len(request.prompt), len(request.output_tokens)
        if num_outputs != request.max_new_tokens or request.finish_reason != "length":
            self._wrong_answers.append(
                f"request {request.request_id}: {num_outputs} tokens of {request.max_new_tokens}, "
                f"finish_reason {request.finish_reason}"
            )
        if entry.start + entry.computed != num_prompt:
            self._wrong_accounts.append(
                f"request {request.request_id}: {entry.start} hit + {entry.computed} computed "
                f"of {num_prompt} prompt tokens"
            )
        self.prompt_tokens += num_prompt
        self.hit_tokens += entry.hit_tokens - entry.host_hit_tokens - entry.storage_hit_tokens
        self.host_hit_tokens += entry.host_hit_tokens
        self.storage_hit_tokens += entry.storage_hit_tokens
        self.times.append(RequestTimes(entry.arrival_s, entry.first_token_s, now_s, num_outputs))

    def checks(self, num_requests: int) -> tuple[Check, Check]:
        """Whether all of it added up, at the end."""
        wrong_answers = list(self._wrong_answers)
        if self._live or self.num_answered != num_requests:
            wrong_answers.append(
                f"{self.num_answered:,} answers to {num_requests:,} requests, "
                f"{len(self._live):,} pending"
            )
        below_device = self.host_hit_tokens + self.storage_hit_tokens
        computed = self.prompt_tokens - self.hit_tokens - below_device
        hits = f"{self.hit_tokens:,}"
        if below_device:
            hits += f" + {self.host_hit_tokens:,}"
        if self.storage_hit_tokens:
            hits += f" + {self.storage_hit_tokens:,}"
        return (
            _check(
                "every request is answered once, in full",
                wrong_answers,
                f"{len(self.times):,} finished, {self.refused:,} refused",
            ),
            _check(
                "prompt = hit + computed tokens, each request",
                self._wrong_accounts,
                f"{self.prompt_tokens:,} = {hits} + {computed:,}",
            ),
        )


def _check(name: str, violations: Sequence[str], detail: str) -> Check:
    if not violations:
        return Check(name, True, detail)
    return Check(name, False, f"{len(violations):,} violations, the first: {violations[0]}")


def check_all_blocks_returned(manager: CacheManager) -> Check:
    """Check a manager that is not in use any more: its invariants hold, no block is lost."""
    name = "no block is leaked"
    try:
        manager.check()
    except AssertionError as broken:
        return Check(name, False, f"broken invariant: {broken}")
    stats = manager.stats()
    ok = stats.free_blocks + stats.idle_blocks == stats.num_blocks and stats.live_leases == 0
    detail = (
        f"{stats.free_blocks:,} free + {stats.idle_blocks:,} idle of {stats.num_blocks:,} blocks, "
        f"{stats.live_leases} leases"
    )
    return Check(name, ok, detail)


def check_all_host_blocks_returned(tiers: TierStats) -> Check:
    """Check the counts of a host tier that is not in use any more: nothing is held there."""
    unused = tiers.host_free_blocks + tiers.host_cached_blocks
    copies = tiers.open_operations + tiers.quarantined_operations
    ok = unused == tiers.host_blocks and tiers.parked == copies == 0
    detail = (
        f"{unused:,} of {tiers.host_blocks:,} free or cached, {tiers.parked} parked, "
        f"{copies} copies"
    )
    return Check("no host block is leaked", ok, detail)
