"""Whether several threads pay, learned from how long blocks take."""

from __future__ import annotations

from typing import Final

WAKING_S: Final = 0.0001
"""What it may take to wake a thread, or to get Python's lock back from one that runs."""


class Sharing:
    """One thread does all, until it has waited for the backend twice in a row.

    A block of 256 KiB that is in memory takes 20 us, in which a thread lets go of Python's lock
    four times; where several do that, most of their time goes into getting it back. Where blocks
    come from a disk or a server, several threads wait for several at once.

    For several threads without a lock: what one overwrites of another's is learned again.
    """

    def __init__(self) -> None:
        """Begin with one thread."""
        self.several = False
        self._was_slow = False

    def learn(self, took_s: float, *, alone: bool) -> bool:
        """Take in how long a block took, and say whether to wake other threads now.

        Args:
            took_s: of the call of the backend.
            alone: whether no other thread was at work. If one was, it takes more to believe that
                the wait was for the backend.
        """
        slow = took_s > (WAKING_S if alone else 10 * WAKING_S)
        several = slow and (self.several or self._was_slow)
        wake = several and not self.several
        self.several, self._was_slow = several, slow
        return wake
