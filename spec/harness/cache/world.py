"""The world of a cache: it draws and applies operations on a `CacheState` and checks every rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ...adapters.cache import Factory, sizes_of
from ...adapters.cache_target import Depth
from ..engine import Below, Config, Operation, Trace
from .checks import check_all
from .operations import CACHE_TABLE, weights_of
from .picture import picture
from .requests import draw_config
from .state import CacheState

QUIET: Final = ("submit", "launch")
"""Operations that ask for a block table at most: nothing has changed."""


class CacheWorld(CacheState):
    """A cache manager under test with its requests and model, as an engine runs it."""

    def __init__(self, config: Config, factory: Factory, depth: Depth) -> None:
        super().__init__(config, factory, depth)
        self.table = CACHE_TABLE.for_adapter(self.target.can)
        self.weights = weights_of(CACHE_TABLE, config.get("rare", 0), config.get("often", 0))

    def draw(self, below: Below) -> Operation:
        """Draw an operation that applies now."""
        return self.table.draw(self, self.weights, below)

    def apply(self, operation: Operation) -> bool:
        """Do one operation and check every rule; False if it does not apply."""
        if not CACHE_TABLE.apply(self, operation):
            return False
        self.num_steps += 1
        if operation[0] not in QUIET:
            check_all(self)
            self.check_events()
        return True

    def picture(self) -> str:
        """Draw the blocks, the cache and the requests as text."""
        return picture(self)


class CacheSubject:
    """A cache manager to test, in worlds of all sizes.

    Args:
        factory: makes an adapter from ``(num_blocks, block_size)``.
        depth: which optional methods of the adapter are used.
        block_sizes: sizes to choose from; by default those that the factory names, or 1 to 4.
        pool_sizes: numbers of blocks, likewise; by default 4 to 14.

    Attributes:
        sizes: the possible sizes of a world by name, where the manager has not all of them.
        only_drawn: parts of a configuration that a replay does not read.
        case_lengths: many are short, because each case has other sizes and weights.
    """

    table = CACHE_TABLE
    case_lengths = (25, 25, 50, 100)
    only_drawn = ("max_running", "alphabet", "rare", "often", "serial", "overlap")

    def __init__(
        self,
        factory: Factory,
        depth: Depth = "api",
        block_sizes: Sequence[int] = (),
        pool_sizes: Sequence[int] = (),
    ) -> None:
        self.factory = factory
        self.depth = depth
        sizes = {
            "block_size": block_sizes or sizes_of(factory, "block_sizes"),
            "num_blocks": pool_sizes or sizes_of(factory, "pool_sizes"),
        }
        self.sizes = {name: sorted(some) for name, some in sizes.items() if some}

    def configure(self, below: Below) -> Config:
        """Draw the sizes of a world."""
        is_serial = below(16) == 0  # requests run one after another
        return {**draw_config(below, self.sizes), "serial": int(is_serial)}

    def simpler(self, trace: Trace) -> Iterator[Trace]:
        """Yield traces where a launched step runs at once, or appended tokens join the prompt."""
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
