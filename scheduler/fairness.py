"""Admission fairness: a starvation guard for large requests on a decode node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAX_OVERTAKEN: Final = 256
"""Default number of admissions after which a refused request is not overtaken any more.

While D waits for room for it, D empties. A limit of 16 delayed a tenth of the first tokens of
Mooncake's synthetic trace by 134 s or more instead of 10 s (simulated: 2 prefill nodes and a decode
node of 15,000 blocks).
"""

MAX_REMEMBERED: Final = 1024
"""Most refused requests that D remembers."""


@dataclass(slots=True)
class _Refused:
    """A refused request.

    Attributes:
        num_blocks: blocks that it holds at most.
        asked_at: time of its last ASK.
        patience_s: how long after an ASK D waits for the next one.
        num_overtaken: admissions of requests that were refused later, less `_num_new` at its own
            first refusal.
    """

    num_blocks: int
    asked_at: float
    patience_s: float
    num_overtaken: int


class AdmissionFairness:
    """Sets room aside for requests that were refused for lack of room and overtaken too often.

    A small request fits where a large one does not, so a stream of small ones could starve it.
    After `max_overtaken` admissions, a later request is admitted only if it leaves room for the
    large one. The room is a number and not blocks that are held: requests that run go on, and when
    enough of them have ended, later requests may use what is left beside it.

    A refused request comes back through the gateway and the queue of a prefill node, after a time
    that D does not know. D waits for it twice as long as the longest time between two of its ASKs,
    so that a request which comes back in a bounded time is admitted in a bounded time, and one
    whose prefill node has died keeps its room for a bounded time.
    """

    def __init__(self, patience_s: float, max_overtaken: int = MAX_OVERTAKEN) -> None:
        self._patience_s = patience_s  # at least
        self._max_overtaken = max_overtaken
        self._refused: dict[str, _Refused] = {}  # by request id, in order of the first refusal
        self._num_new = 0  # admissions of requests that were not refused: they overtake all others

    def set_aside(self, request_id: str, now: float) -> list[int]:
        """Return the numbers of blocks to leave for starved requests that come before this one."""
        room = []
        for each, refused in self._refused.items():
            # What overtakes a request overtakes all that were refused before it, too.
            is_starved = refused.num_overtaken + self._num_new >= self._max_overtaken
            if each == request_id or not is_starved:
                break
            if now - refused.asked_at < refused.patience_s:
                room.append(refused.num_blocks)
        return room

    def refused(self, request_id: str, num_blocks: int, now: float) -> None:
        """Record that a request was refused."""
        new = _Refused(num_blocks, now, self._patience_s, -self._num_new)
        known = self._refused.setdefault(request_id, new)
        known.patience_s = max(known.patience_s, 2 * (now - known.asked_at))
        known.asked_at = now
        if len(self._refused) > MAX_REMEMBERED:
            del self._refused[min(self._refused, key=lambda each: self._refused[each].asked_at)]

    def admitted(self, request_id: str) -> None:
        """Record that a request was admitted: it overtakes all that were refused before it."""
        if request_id not in self._refused:
            self._num_new += 1
            return
        for each, refused in self._refused.items():
            if each == request_id:
                break
            refused.num_overtaken += 1
        del self._refused[request_id]
