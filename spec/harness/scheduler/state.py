"""The state of a scheduler's world: the scheduler under test, its requests, a ghost memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ...adapters.scheduler import SchedulerFactory
from ...adapters.scheduler_target import SchedulerTarget
from ...model.ghost import GhostMemory
from ..engine import Config
from .requests import Books, Tracked


class SchedulerState:
    """One scheduler under test, and all that is around it.

    Attributes:
        live: requests that have yet to end, by name; `past` has all there ever were.
        running: those that hold blocks, in order of admission.
        tables: the block table of each who runs, after the last call.
        just_ended: who ended in this operation: it must hold nothing.
        books: what should be counted.
    """

    def __init__(self, config: Config, factory: SchedulerFactory) -> None:
        self.config = config
        self.block_size: int = config["block_size"]
        self.target = SchedulerTarget(factory, config)
        self.ghost = GhostMemory(self.block_size)
        self.live: dict[str, Tracked] = {}
        self.past: list[Tracked] = []
        self.running: list[Tracked] = []
        self.tables: dict[str, list[int]] = {}
        self.just_ended: list[str] = []
        self.books = Books()
        self.situations: Counter[str] = Counter()

    def bound(self) -> int:
        """How many steps all who live may take: at worst they go one by one.

        The first in the order is never preempted for another, and gets further in every step; each
        that ends may have made all others start again.
        """
        work = sum(
            len(r.submission.prompt) + r.submission.max_new_tokens for r in self.live.values()
        )
        return (len(self.live) + 1) * work

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks tokens need."""
        return -(-num_tokens // self.block_size)

    def end(self, request: Tracked) -> None:
        """A request has ended: from the end of this operation on it holds nothing."""
        assert self.live.pop(request.name) is request, f"{request.name} ends twice"
        request.phase = "ended"
        self.just_ended.append(request.name)

    def names(self, requests: Sequence[Tracked]) -> str:
        """The names of those that live."""
        return ", ".join(request.name for request in requests if request.is_live)
