"""Starts node processes again that have ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Final, Protocol

CHECK_S: Final = 0.25
FIRST_PAUSE_S: Final = 1.0
MAX_PAUSE_S: Final = 60.0


class Processes(Protocol):
    """What the supervisor uses of `NodeProcesses`."""

    def ended(self) -> dict[str, str]:
        """Return how nodes have ended, by name."""

    def restart(self, name: str) -> None:
        """Start a node again that has ended."""


@dataclass(slots=True)
class _Restart:
    """The last restart of a node.

    Attributes:
        at: when it is or was started again.
        pause_s: how long before that it had ended.
        is_due: whether it has yet to be started.
    """

    at: float = -inf
    pause_s: float = 0.0
    is_due: bool = False


class NodeSupervisor:
    """Starts nodes again after a pause, which doubles while a node does not stay.

    For use by one thread, which calls `tick`.
    """

    def __init__(
        self,
        processes: Processes,
        say: Callable[[str], object],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Supervise processes that have been started.

        Args:
            processes: the nodes.
            say: takes a line for the log at each end and each restart.
            clock: a monotonic clock, in seconds.
        """
        self._processes = processes
        self._say = say
        self._clock = clock
        self._next_check_at = -inf
        self._restarts: dict[str, _Restart] = {}

    def tick(self) -> None:
        """Look after the nodes, a few times a second at most."""
        now = self._clock()
        if now < self._next_check_at:
            return
        self._next_check_at = now + CHECK_S
        for name, reason in self._processes.ended().items():
            restart = self._restarts.setdefault(name, _Restart())
            if not restart.is_due:
                has_stayed = now - restart.at >= MAX_PAUSE_S
                longer_s = min(2 * restart.pause_s, MAX_PAUSE_S)
                restart.pause_s = FIRST_PAUSE_S if has_stayed else longer_s
                restart.at, restart.is_due = now + restart.pause_s, True
                self._say(f"{reason}; it is started again in {restart.pause_s:g} s")
            elif now >= restart.at:
                restart.at, restart.is_due = now, False
                try:
                    self._processes.restart(name)
                except OSError as error:  # such as too many processes: later, perhaps
                    self._say(f"{name} cannot be started: {error}")
                else:
                    self._say(f"{name} is started again")
