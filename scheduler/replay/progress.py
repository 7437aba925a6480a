"""How long-running functions say how far they are. They never print: they call a `Progress`."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called now and then with what is being done and how far it is."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Take note.

        Args:
            stage: a few words, such as "simulation"; it changes when the next part begins.
            done: units of this stage that are done; the last call of a stage has ``done == total``.
            total: units of this stage.
        """


def no_progress(stage: str, done: int, total: int) -> None:
    """A `Progress` that nobody watches."""
