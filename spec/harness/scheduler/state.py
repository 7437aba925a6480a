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
    """A scheduler under test, with its requests and ghost memory.

    Attributes:
        live: requests that have not ended, by name; `past` has all requests ever.
        running: requests that hold blocks, in order of admission.
        tables: block table of each running request after the last call.
        just_ended: requests that ended in this operation and must hold nothing.
        books: expected counters.
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
        """Upper bound of the steps until all live requests end: at worst they run one by one.

        The first in the order is never preempted and progresses in every step; each request that
        ends may have made all others start again.
        """
        work = sum(
            len(r.submission.prompt) + r.submission.max_new_tokens for r in self.live.values()
        )
        return (len(self.live) + 1) * work

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks for `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def end(self, request: Tracked) -> None:
        """End a request; after this operation it must hold nothing."""
        assert self.live.pop(request.name) is request, f"{request.name} ends twice"
        request.phase = "ended"
        self.just_ended.append(request.name)

    def names(self, requests: Sequence[Tracked]) -> str:
        """Names of the requests that have not ended."""
        return ", ".join(request.name for request in requests if request.is_live)
