"""A progress line on stderr, for people only."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType

_REDRAW_PERIOD_S = 0.1
_ERASE_LINE = "\r\x1b[K"


class ProgressLine:
    """A `radixkv.scheduler.replay.progress.Progress` that redraws one line, erased at the end.

    It writes nothing if told to be quiet, where stderr is not a terminal, and in CI (the
    environment variable `CI` is set).

    Example:
        with ProgressLine(quiet=False) as progress:
            run_replay(..., progress=progress)
    """

    def __init__(self, quiet: bool) -> None:
        self._visible = not quiet and not os.environ.get("CI") and sys.stderr.isatty()
        self._stage = ""
        self._next_redraw_s = 0.0

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._draw(_ERASE_LINE)

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show how far a stage is, at most ten times a second, and at once for a new stage."""
        now_s = time.monotonic()
        if stage == self._stage and now_s < self._next_redraw_s:
            return
        self._stage = stage
        self._next_redraw_s = now_s + _REDRAW_PERIOD_S
        self._draw(f"{_ERASE_LINE}{stage}: {done / max(total, 1):.0%} ({done:,} of {total:,})")

    def _draw(self, text: str) -> None:
        if self._visible:
            print(text, end="", file=sys.stderr, flush=True)
