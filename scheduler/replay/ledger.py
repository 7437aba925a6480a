"""What became of every request of a simulation, and whether it adds up."""

from __future__ import annotations

from collections.abc import Sequence

from ...kvcache.manager import CacheManager
from ..plan import StepPlan
from ..request import Request
from .checks import Check
from .latency import RequestTimes


class _Entry:
    """One request on its way.

    Attributes:
        hit_tokens: leading prompt tokens not computed at first admission; None before it.
        start, computed: of its latest admission before the first token: the first prompt position
            computed, and how many were.
        cursor: the next position to be computed; None while not admitted.
    """

    __slots__ = ("arrival_s", "computed", "cursor", "first_token_s", "hit_tokens", "start")

    def __init__(self, arrival_s: float) -> None:
        self.arrival_s = arrival_s
        self.first_token_s: float | None = None
        self.hit_tokens: int | None = None
        self.start = 0
        self.computed = 0
        self.cursor: int | None = None


class Ledger:
    """Follows requests from arrival to answer and notes whatever does not add up.

    It reads plans only, and trusts no count of the scheduler's: each prompt must be hit, then
    computed in consecutive chunks up to its end, and each request answered once and in full.

    Attributes:
        times: of each finished request, in the order they finished.
        refused: requests that can never be served.
        prompt_tokens, hit_tokens: of the finished requests, at first admission.
        prefill_tokens: computed in prefill chunks, recomputation included.
        preemptions: of running requests.
    """

    def __init__(self) -> None:
        self.times: list[RequestTimes] = []
        self.refused = 0
        self.prompt_tokens = 0
        self.hit_tokens = 0
        self.prefill_tokens = 0
        self.preemptions = 0
        self._live: dict[str, _Entry] = {}
        self._wrong_accounts: list[str] = []
        self._wrong_answers: list[str] = []

    @property
    def num_answered(self) -> int:
        """Requests that are finished or refused."""
        return len(self.times) + self.refused

    @property
    def recomputed_tokens(self) -> int:
        """Tokens whose KV was computed, lost to preemption, and computed again."""
        return self.prefill_tokens - (self.prompt_tokens - self.hit_tokens)

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
            self._live[request.request_id].cursor = None
            self.preemptions += 1
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
            self.prefill_tokens += chunk.length
            if entry.first_token_s is None:
                entry.computed += chunk.length
                if end == request.num_tokens:
                    entry.first_token_s = end_s

    def _begin_prefill(self, entry: _Entry, request: Request, start: int) -> None:
        entry.cursor = start
        if entry.first_token_s is None:
            entry.start, entry.computed = start, 0
        if entry.hit_tokens is None:
            entry.hit_tokens = start
            # A prompt that hits in full has its last token computed again, for its logits.
            if start != min(request.num_hit_tokens, len(request.prompt) - 1):
                self._wrong_accounts.append(
                    f"request {request.request_id}: {request.num_hit_tokens} tokens hit, "
                    f"computed from {start}"
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
        self.hit_tokens += entry.hit_tokens
        self.times.append(RequestTimes(entry.arrival_s, entry.first_token_s, now_s, num_outputs))

    def checks(self, num_requests: int) -> tuple[Check, Check]:
        """Whether all of it added up, at the end."""
        wrong_answers = list(self._wrong_answers)
        if self._live or self.num_answered != num_requests:
            wrong_answers.append(
                f"{self.num_answered:,} answers to {num_requests:,} requests, "
                f"{len(self._live):,} pending"
            )
        computed = self.prompt_tokens - self.hit_tokens
        return (
            _check(
                "every request is answered once, in full",
                wrong_answers,
                f"{len(self.times):,} finished, {self.refused:,} refused",
            ),
            _check(
                "prompt = hit + computed tokens, each request",
                self._wrong_accounts,
                f"{self.prompt_tokens:,} = {self.hit_tokens:,} + {computed:,}",
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
