"""Who was refused, and how often others went before: so that nobody is passed over for ever."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAX_OVERTAKEN: Final = 256
"""A request that was refused lets so many others pass.

While one stops the rest, D fills up with nobody. With 16 instead, a tenth of the requests of
Mooncake's synthetic trace had their first token after 134 s or more, not 10 (2 prefill nodes, and a
decode node of 15,000 blocks, simulated).
"""


@dataclass(slots=True)
class _Place:
    heard_at: float
    num_overtaken: int = 0


class AdmissionFairness:
    """The requests that a decode node has refused for want of room, in the order they came.

    A small request fits where a large one does not, and small ones come for ever. So, when enough
    have passed, nobody does before the one they passed, as long as it goes on asking.
    """

    def __init__(self, patience_s: float) -> None:
        """Make a line; who has not asked for patience_s has gone."""
        self._patience_s = patience_s
        self._places: dict[str, _Place] = {}

    def num_before(self, request_id: str, now: float) -> int:
        """Count those who go before a request, as too many have passed them."""
        gone = [
            each for each, place in self._places.items() if now - place.heard_at >= self._patience_s
        ]
        for each in gone:
            del self._places[each]
        count = 0
        for each, place in self._places.items():
            if each == request_id:
                return count
            count += place.num_overtaken >= MAX_OVERTAKEN
        return count

    def refused(self, request_id: str, now: float) -> None:
        """Give a request a place, or keep it in its own."""
        self._places.setdefault(request_id, _Place(now)).heard_at = now

    def admitted(self, request_id: str) -> None:
        """Take a request out; it has passed those that came before it."""
        for each, place in self._places.items():
            if each == request_id:
                break
            place.num_overtaken += 1
        self._places.pop(request_id, None)
