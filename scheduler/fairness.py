"""Admission fairness: a starvation guard for large requests on a decode node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAX_OVERTAKEN: Final = 256
"""Default number of admissions after which a refused request is not overtaken any more.

While it blocks the others, D empties. A limit of 16 delayed a tenth of the first tokens of
Mooncake's synthetic trace by 134 s or more instead of 10 s (simulated: 2 prefill nodes and a decode
node of 15,000 blocks).
"""


@dataclass(slots=True)
class _Refused:
    asked_at: float
    num_overtaken: int = 0


class AdmissionFairness:
    """Limits how often a request that was refused for lack of room is overtaken by others.

    A small request fits where a large one does not, so a stream of small ones could starve it.
    After `max_overtaken` admissions no later request is admitted before the large one, as long as
    that keeps asking.
    """

    def __init__(self, patience_s: float, max_overtaken: int = MAX_OVERTAKEN) -> None:
        self._patience_s = patience_s  # a request that has not asked for so long is forgotten
        self._max_overtaken = max_overtaken
        self._refused: dict[str, _Refused] = {}  # by request id, in order of the first refusal

    def num_before(self, request_id: str, now: float) -> int:
        """Return how many starved requests must be admitted before this one."""
        gone = [
            each
            for each, refused in self._refused.items()
            if now - refused.asked_at >= self._patience_s
        ]
        for each in gone:
            del self._refused[each]
        count = 0
        for each, refused in self._refused.items():
            if each == request_id:
                break
            count += refused.num_overtaken >= self._max_overtaken
        return count

    def refused(self, request_id: str, now: float) -> None:
        """Record that a request was refused."""
        self._refused.setdefault(request_id, _Refused(now)).asked_at = now

    def admitted(self, request_id: str) -> None:
        """Record that a request was admitted: it overtakes all that were refused before it."""
        for each, refused in self._refused.items():
            if each == request_id:
                break
            refused.num_overtaken += 1
        self._refused.pop(request_id, None)
