"""The callback through which long-running functions report their progress; they never print."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Callback for the current stage and how much of it is done."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Take note of progress.

        Args:
            stage: A few words such as "simulation"; they change when the next stage begins.
            done: Completed units of the stage; the last call of a stage has ``done == total``.
            total: Units of the stage.
        """


def no_progress(stage: str, done: int, total: int) -> None:
    """Ignore all progress."""
