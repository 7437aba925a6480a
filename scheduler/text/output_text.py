"""The text of an output: decoded as tokens come, and cut before the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from .detokenizer import Detokenizer
from .stop_strings import StopStrings


class OutputText:
    """The text of tokens that come one after another, up to a stop string.

    Attributes:
        text: text so far; it ends before what may be the begin of a stop string.
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str], min_tokens: int = 0) -> None:
        """Begin without tokens; no stop string is one that ends in the first `min_tokens`."""
        self.text = ""
        self._num_early = min_tokens
        self._is_early = True
        self._detokenizer = detokenizer
        self._stop = StopStrings(stop)

    def push(self, tokens: Sequence[int], *, is_end: bool) -> int | None:
        """Append tokens; the result does not depend on how many come at a time.

        Args:
            tokens: the next tokens.
            is_end: whether no other tokens follow.

        Returns:
            Number of these tokens with which the output ends, if there is a stop string.
        """
        detokenizer = self._detokenizer
        if not self._stop:
            detokenizer.push(tokens)
        for number, token in enumerate(tokens if self._stop else (), start=1):
            detokenizer.push([token])
            self._is_early = self._num_early > 0
            if self._is_early:
                self._num_early -= 1
                self._stop.skip(detokenizer.text, detokenizer.pending)
            elif self._is_cut():
                return number
        if is_end:
            detokenizer.finish()
            if not self._is_early and self._is_cut():
                return len(tokens)
        text = detokenizer.text
        self.text = text if is_end else text[: len(text) - self._stop.count_held(text)]
        return None

    def _is_cut(self) -> bool:
        """Search for a stop string, and cut the text before it."""
        text, pending = self._detokenizer.text, self._detokenizer.pending
        found = self._stop.find(text, pending)
        if found is not None:
            self.text = (text + pending)[:found]
        return found is not None
