"""What became of every request of a simulated cluster, and whether it adds up."""

from __future__ import annotations

from collections.abc import Iterable

from ....kvcache.manager import CacheManager
from ...request import Request
from ..checks import Check
from ..simulation.latency import RequestTimes
from ..simulation.ledger import check_all_blocks_returned


class ClusterLedger:
    """Follows requests from arrival to answer and notes whatever does not add up.

    Attributes:
        times: of each finished request, in the order they finished.
        refused: requests that can never be served.
        prompt_tokens, hit_tokens, own_tokens, sent_blocks: see `ClusterResult`.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.times: list[RequestTimes] = []
        self.refused = 0
        self.prompt_tokens = 0
        self.hit_tokens = 0
        self.own_tokens = 0
        self.sent_blocks = 0
        self._lacked_blocks = 0
        self._arrived_s: dict[str, float] = {}
        self._started_s: dict[str, float] = {}
        self._wrong_answers: list[str] = []

    @property
    def num_answered(self) -> int:
        """Requests that are finished or refused."""
        return len(self.times) + self.refused

    def arrive(self, request: Request, now_s: float) -> None:
        """Note a request that the front desk has taken."""
        self._arrived_s[request.request_id] = now_s

    def start(self, request: Request, num_own_tokens: int, now_s: float) -> None:
        """Note that a decode node has all of a prompt, and its first token."""
        if self._started_s.setdefault(request.request_id, now_s) != now_s:
            self._wrong_answers.append(f"request {request.request_id}: starts twice")
        size = self._block_size
        self.own_tokens += num_own_tokens
        self._lacked_blocks += -(-request.num_prompt_tokens // size) - num_own_tokens // size

    def finish(self, request: Request, now_s: float) -> None:
        """Note a request that has all of its tokens."""
        name = request.request_id
        arrived_s, started_s = self._arrived_s.pop(name, None), self._started_s.get(name)
        if arrived_s is None or started_s is None:
            self._wrong_answers.append(f"request {name}: answered twice, or before it started")
            return
        num_outputs = len(request.output_tokens)
        if num_outputs != request.max_new_tokens or request.finish_reason != "length":
            self._wrong_answers.append(
                f"request {name}: {num_outputs} tokens of {request.max_new_tokens}, "
                f"finish_reason {request.finish_reason}"
            )
        self.prompt_tokens += request.num_prompt_tokens
        self.hit_tokens += request.num_hit_tokens
        self.times.append(RequestTimes(arrived_s, started_s, now_s, num_outputs))

    def refuse(self, request_id: str) -> None:
        """Note a request that can never be served."""
        self.refused += 1
        del self._arrived_s[request_id]

    def checks(
        self, num_requests: int, managers: Iterable[CacheManager], preemptions: int | None
    ) -> list[Check]:
        """Whether all of it added up, at the end.

        Args:
            num_requests: of the trace.
            managers: of all nodes.
            preemptions: how many there were where there must be none; None where there may be.
        """
        wrong = list(self._wrong_answers)
        if self._arrived_s or self.num_answered != num_requests:
            wrong.append(
                f"{self.num_answered:,} answers to {num_requests:,} requests, "
                f"{len(self._arrived_s):,} pending"
            )
        detail = f"{len(self.times):,} finished, {self.refused:,} refused"
        if wrong:
            detail = f"{len(wrong):,} violations, the first: {wrong[0]}"
        name = "every request is answered once, in full"
        checks = [Check(name, not wrong, detail)]
        checks.append(
            Check(
                "D is sent what it lacks, nothing else",
                self.sent_blocks == self._lacked_blocks,
                f"{self.sent_blocks:,} blocks sent, {self._lacked_blocks:,} lacked",
            )
        )
        returned = [check_all_blocks_returned(manager) for manager in managers]
        first = next((each for each in returned if not each.ok), returned[-1])
        detail = f"on each of {len(returned)} nodes" if first.ok else first.detail
        checks.append(Check(first.name, first.ok, detail))
        if preemptions is not None:
            name = "nothing is preempted: all ends are reserved"
            checks.append(Check(name, preemptions == 0, f"{preemptions:,} preemptions"))
        return checks
