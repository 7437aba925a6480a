"""What an observer of an `AsyncEngine` is told, such as one that measures times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

from ..engine import Engine
from ..request import FinishReason, Request

EndReason: TypeAlias = FinishReason | Literal["refused", "error"]
"""Why a request has ended; "refused" by the engine, or "error" if the engine has failed.

A stop string is a "stop", though the engine only sees an abort.
"""


class EngineObserver(Protocol):
    """Is told when requests begin and end, and of every step.

    The methods are called on the engine's thread, except for `request_submitted`. They must be
    quick, and must not raise: an error fails the engine.
    """

    def request_submitted(self, request: Request) -> None:
        """A request was submitted; called on the thread that submits it, before all others."""

    def step_begins(self) -> None:
        """The engine is about to plan a step."""

    def step_ended(self, engine: Engine, running: Sequence[Request]) -> None:
        """A step has ended, and the requests that ended in it were reported.

        Args:
            engine: the engine, between two steps.
            running: requests that hold blocks, with their tokens so far.
        """

    def request_ended(self, request: Request, reason: EndReason) -> None:
        """A request has ended, with all its tokens."""

    def engine_ended(self, engine: Engine) -> None:
        """The engine is closed or has failed: nothing follows."""
