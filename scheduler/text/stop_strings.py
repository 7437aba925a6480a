"""Stop strings in a text that grows."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Searches a growing text for the first of several strings."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._longest = max(map(len, self._strings), default=0)
        self._searched = 0  # characters that were searched, and will not change
        self._skipped = 0  # characters in which no string may end

    def __bool__(self) -> bool:
        return bool(self._strings)

    def find(self, text: str, pending: str = "") -> int | None:
        """Return where the first stop string begins, or None.

        Args:
            text: the text so far; in the next call, it begins with this one.
            pending: what follows for now, and may be another text in the next call.
        """
        # A string may have begun in what was searched before.
        start = max(0, self._searched - self._longest + 1)
        tail = text[start:] + pending
        self._searched = len(text)
        places = [
            place
            for string in self._strings
            if (place := tail.find(string, max(0, self._skipped - len(string) + 1 - start))) >= 0
        ]
        return start + min(places) if places else None

    def skip(self, text: str, pending: str = "") -> None:
        """Find no string that ends in the text so far, nor in what follows it for now."""
        self._searched = len(text)
        self._skipped = len(text) + len(pending)

    def count_held(self, text: str) -> int:
        """Return the length of the longest end of a text that may be the begin of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(string.startswith(end) for string in self._strings):
                return length
        return 0
