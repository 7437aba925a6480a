"""A cache manager with requests around it, a ghost device, and the model beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import ClassVar, Final

from ...adapters.cache import AdapterError, Factory
from ...adapters.cache_target import Depth, Target
from ...model.cache import CacheModel
from ...model.device import Device, Job
from ...model.ghost import (
    Tag,
    first_tag,
    next_tag,
)
from ..engine import (
    Below,
    Config,
    Operation,
    Trace,
)
from .admit import (
    admit,
    match,
    submit,
)
from .checks import check_all
from .compute import (
    again,
    append,
    append_batch,
    done,
    fail,
    forward,
    launch,
)
from .draw import draw, weights_of
from .end import (
    check,
    drain,
    evict,
    finish,
    misuse,
    preempt,
    reset,
)
from .picture import picture
from .requests import Request, draw_config

OPERATIONS: Final[dict[str, Callable[..., bool]]] = {
    operation.__name__: operation
    for operation in (
        submit, match, admit, forward, launch, done, fail, again, append, append_batch,
        finish, preempt, evict, reset, misuse, check, drain,
    )
}  # fmt: skip
"""By its word. Each returns False, and has done nothing, if what it names is not there."""


class CacheWorld:
    """One manager under test, and all that is around it.

    Attributes:
        requests: those that wait or run, by name; `past` has all there ever were.
        jobs: the steps in flight, by name.
        model: what the manager may do; None at depth ``api``, where nothing is reported.
        demand: blocks asked for so far: up to the pool's, nothing can have been evicted.
    """

    target_type: ClassVar[type[Target]] = Target
    model_type: ClassVar[type[CacheModel]] = CacheModel

    def __init__(self, config: Config, factory: Factory, depth: Depth) -> None:
        self.config = config
        self.depth = depth
        self.block_size: int = config["block_size"]
        self.target = self.target_type(factory, config["num_blocks"], self.block_size, depth)
        self.promises = self.target.promises
        self._require_new()
        self.weights = weights_of(config.get("rare", 0), config.get("often", 0))
        self.device = Device(self.block_size)
        self.requests: dict[str, Request] = {}
        self.past: list[Request] = []
        self.jobs: dict[str, Job] = {}
        self.written: set[Tag] = set()
        self.demand = self.num_steps = 0
        self.num_admitted = self.num_hit_blocks = 0
        self.situations: Counter[str] = Counter()
        self._tags: dict[tuple[bytes, tuple[int, ...]], Tag] = {}
        self.model: CacheModel | None = None
        if depth != "api":
            promises = self.promises
            self.model = self.model_type(
                config["num_blocks"], self.block_size, promises.lru, promises.evicts_exactly
            )
            self.model.situations = self.situations
            self.target.report_to(self.model)

    def _require_new(self) -> None:
        num_blocks, found = self.config["num_blocks"], self.target.available()
        if found != num_blocks:
            raise AdapterError(
                f"a new manager must have all of its {num_blocks} blocks available, this one has "
                f"{found}: the factory must make a new one for each world, that shares nothing"
            )

    # What an engine calls

    def draw(self, below: Below) -> Operation:
        """Draw an operation that applies now."""
        return draw(self, below)

    def apply(self, operation: Operation) -> bool:
        """Do one operation and check every rule; False if it does not apply."""
        word, *arguments = operation
        if not OPERATIONS[word](self, *arguments):
            return False
        self.num_steps += 1
        if word != "submit":  # which calls nothing: all is as the last check left it
            check_all(self)
        return True

    def picture(self) -> str:
        """Draw the blocks, the cache and the requests as text."""
        return picture(self)

    # What the checks ask

    def running(self) -> list[Request]:
        """The requests that hold blocks."""
        return [request for request in self.requests.values() if request.state == "running"]

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks tokens need."""
        return -(-num_tokens // self.block_size)

    def tag_of(self, namespace: bytes, tokens: tuple[int, ...]) -> Tag:
        """The tag of a prefix."""
        if (namespace, tokens) not in self._tags:
            tag = first_tag(namespace)
            for token in tokens:
                tag = next_tag(tag, token)
            self._tags[namespace, tokens] = tag
        return self._tags[namespace, tokens]

    def counts(self) -> dict[str, int]:
        """What counters should say, besides those of the model's events."""
        assert self.model is not None, "counts are checked where events are reported"
        model = self.model
        private = sum(len(holding.private) for holding in model.holdings.values())
        return {
            "num_blocks": self.config["num_blocks"],
            "free_blocks": model.num_free,
            "cached_blocks": len(model.published_at),
            "idle_blocks": model.num_unused(),
            "private_blocks": private,
            "live_leases": len(model.holdings),
            "admitted": self.num_admitted,
            "hit_blocks": self.num_hit_blocks,
        }

    def get(self, name: str, state: str) -> Request | None:
        """The request of a name, if it is in a state."""
        request = self.requests.get(name)
        return request if request is not None and request.state == state else None


class CacheSubject:
    """A manager to test, in worlds of all sizes.

    Args:
        factory: makes an adapter from ``(num_blocks, block_size)``.
        depth: what is asked of the adapter.
    """

    def __init__(self, factory: Factory, depth: Depth = "api") -> None:
        self.factory = factory
        self.depth = depth

    def configure(self, below: Below) -> Config:
        """Draw the sizes of a world."""
        return draw_config(below)

    def simpler(self, trace: Trace) -> Iterator[Trace]:
        """Yield traces with a step that runs at once, or with tokens that come with the prompt.

        A step that is launched is done later; tokens that are appended come later.
        """
        for index, (word, *arguments) in enumerate(trace):
            if word == "launch":
                name, num_tokens, job = arguments
                at_once = [*trace[:index], ["forward", name, num_tokens], *trace[index + 1 :]]
                yield [operation for operation in at_once if operation != ["done", job]]
            elif word == "append":
                submit, tokens = ["submit", arguments[0]], arguments[1]
                yield [
                    [*submit, each[2] + tokens, *each[3:]] if each[:2] == submit else each
                    for each in [*trace[:index], *trace[index + 1 :]]
                ]

    def world(self, config: Config) -> CacheWorld:
        """Make a world with an empty cache."""
        return CacheWorld(config, self.factory, self.depth)
