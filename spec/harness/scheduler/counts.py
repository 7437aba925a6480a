"""The counters that a scheduler should report, and how often each situation occurred."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ...model.scheduler import Request, Step
from ...rules.rule import require
from ...rules.scheduler import Q13, Q37


@dataclass
class Books:
    """Expected counters, to compare with those that the scheduler reports."""

    steps: int = 0
    admitted: int = 0
    resumed: int = 0
    preemptions: int = 0
    hit_tokens: int = 0
    lower_hit_tokens: int = 0
    resumed_hit_tokens: int = 0
    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    decode_tokens: int = 0


class Counts:
    """Counts what the scheduler decides.

    Attributes:
        books: expected counters.
        are_known: False after a request was loaded, began and was preempted within one step,
            because its hits are not seen from outside.
        reached: most tokens ever computed, by request.
    """

    def __init__(self, situations: Counter[str]) -> None:
        self.situations = situations
        self.books = Books()
        self.are_known = True
        self.reached: Counter[Request] = Counter()

    def before(self, step: Step, live: Mapping[str, Request], max_running: int) -> None:
        """Count a decision that the model has not made yet: who is preempted, admitted, begins."""
        books, seen = self.books, self.situations
        books.steps += bool(step.chunks)
        books.preemptions += len(step.preempted)
        for request in step.preempted:
            seen[f"preempted in {'prefill' if request.prefilling else 'decode'}"] += 1
            seen["preempted twice"] += request.num_preemptions == 1
            self.are_known &= not request.is_loading or request.name in step.loading
        seen["preempted two at once"] += len(step.preempted) > 1
        for request in step.admitted:
            books.resumed += request.num_preemptions > 0 or request in step.preempted
            seen["whole hit"] += step.hits[request.name] == len(request.tokens)
        for name, computed in step.begun.items():
            request = live[name]
            hit = step.hits.get(name, request.hit)
            if request.has_begun:
                books.resumed_hit_tokens += computed
                seen["resumed with a hit" if hit else "resumed without a hit"] += 1
            else:
                books.admitted += 1
                books.hit_tokens += min(hit, computed)
                books.lower_hit_tokens += max(computed - hit, 0)
                seen["hit"] += hit > 0
        seen["all slots taken"] += len(step.running) == max_running > 1

    def received(
        self, request: Request, num_on_device: int, num_below: int, is_loaded: bool
    ) -> None:
        """Count a request that a decode node receives, and its hits on the device and below."""
        self.books.admitted += 1
        self.books.hit_tokens += num_on_device
        self.books.lower_hit_tokens += num_below
        self.situations["received after a load" if is_loaded else "received"] += 1
        self.reached[request] = len(request.tokens)

    def after(self, step: Step) -> None:
        """Count the chunks of a decision that the model has made."""
        books, seen, num_decode = self.books, self.situations, 0
        for request, start, length in step.chunks:
            end = start + length
            if start < request.target:
                books.prefill_tokens += length
                books.recomputed_tokens += max(min(end, self.reached[request]) - start, 0)
                seen["chunk cut by the budget"] += end < len(request.tokens)
            else:
                books.decode_tokens += length
                num_decode += 1
            self.reached[request] = max(self.reached[request], end)
        seen["prefill beside decode"] += 0 < num_decode < len(step.chunks)

    def ended(self, request: Request, event: str) -> None:
        """Count the end of a request in its state."""
        phase: str = request.phase
        if phase == "running":
            phase = "in prefill" if request.prefilling else "in decode"
        self.situations[f"{event} {phase}"] += 1

    def compare(self, reported: Mapping[str, int]) -> None:
        """Check the counters that the scheduler reports."""
        for name, count in asdict(self.books).items() if self.are_known else ():
            found = reported.get(name, count)
            which = Q13 if "hit" in name else Q37
            require(found == count, which, "{} is {}, and not {}", name, found, count)
