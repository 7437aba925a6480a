"""The world of a block pool: valid and invalid calls, compared with a set of the free ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias

from ..adapters.cache import describe_error
from ..rules.cache import C3, F3, F4, F5, S4, W1, W6
from ..rules.rule import Rule, Violation, require
from . import engine
from .engine import Below, Config
from .operations import ALWAYS, Operation, Table


class Pool(Protocol):
    """Protocol of a pool of block ids, 1 to ``num_blocks``."""

    def allocate(self, num_blocks: int) -> Sequence[int] | None:
        """Allocate ``num_blocks`` free ids; None, without any change, if there are fewer."""

    def recycle(self, ids: Sequence[int]) -> Sequence[int]:
        """Free ids; return those that are refused, the others are free again."""

    def free_ids(self) -> Sequence[int]:
        """Return the free ids."""

    def reset(self) -> None:
        """Make every id free."""


PoolFactory: TypeAlias = Callable[[int], Any]
"""Makes a `Pool` from a number of blocks; its method ``check``, if any, is called too."""


class PoolWorld:
    """A pool, a second pool that does every call id by id, and the set of free ids."""

    def __init__(self, config: Config, factory: PoolFactory) -> None:
        self.config = config
        self.num_blocks: int = config["num_blocks"]
        self.pool: Pool = factory(self.num_blocks)
        self.twin: Pool = factory(self.num_blocks)
        self.free = set(range(1, self.num_blocks + 1))
        self.situations: Counter[str] = Counter()
        self.table = POOL_TABLE

    def draw(self, below: Below) -> engine.Operation:
        """Draw an operation."""
        return POOL_TABLE.draw(self, POOL_TABLE.weights(), below)

    def apply(self, operation: engine.Operation) -> bool:
        """Do one operation on both pools and compare them."""
        self._guarded(S4, lambda: POOL_TABLE.apply(self, operation))
        for pool in (self.pool, self.twin):
            if check := getattr(pool, "check", None):
                self._guarded(W6, check)
        found = sorted(self.pool.free_ids())
        require(found == sorted(self.free), W1, "free are {}, should be {}", found, self.free)
        alone = sorted(self.twin.free_ids())
        require(found == alone, F4, "free are {}, one by one {}", found, alone)
        return True

    def _guarded(self, rule: Rule, call: Callable[[], object]) -> None:
        try:
            call()
        except Violation:
            raise
        except (Exception, SystemExit) as error:
            raise Violation(rule, describe_error("the pool", error)) from error

    def allocate(self, num_blocks: int) -> bool:
        """Allocate from both pools, and make the second one take the same ids."""
        ids = self.pool.allocate(num_blocks)
        if ids is None:
            require(num_blocks > len(self.free), F5, "{} of {} refused", num_blocks, len(self.free))
            self.situations["allocation refused"] += 1
            return True
        given = set(ids)
        require(
            len(given) == len(ids) == num_blocks and given <= self.free,
            F5,
            "asked for {}, given {}",
            num_blocks,
            list(ids),
        )
        self.free -= given
        # The second pool may choose other ids; it frees the ids that the first did not take.
        everything = self.twin.allocate(len(self.free) + num_blocks)
        require(everything is not None, F5, "all free blocks refused")
        for block in everything or ():
            if block not in given:
                self.twin.recycle([block])
        return True

    def recycle(self, ids: list[int]) -> bool:
        """Free ids: in one call, and id by id."""
        refused = []
        for block in ids:
            if 1 <= block <= self.num_blocks and block not in self.free:
                self.free.add(block)
            else:
                refused.append(block)
        given = ids.copy()
        found = list(self.pool.recycle(given))
        require(given == ids, C3, "recycle was given {}, and changed it to {}", ids, given)
        require(found == refused, F3, "of {} refused are {}, not {}", ids, found, refused)
        alone = [block for block in ids if self.twin.recycle([block])]
        require(alone == refused, F4, "of {} refused one by one are {}", ids, alone)
        self.situations["wrong ids"] += bool(refused)
        self.situations["recycled many"] += len(ids) > MANY
        return True

    def reset(self) -> bool:
        """Make every id free."""
        self.pool.reset()
        self.twin.reset()
        self.free = set(range(1, self.num_blocks + 1))
        return True

    def drain(self) -> bool:
        """Free everything; then all ids can be allocated."""
        self.recycle(sorted(set(range(1, self.num_blocks + 1)) - self.free))
        self.allocate(self.num_blocks)
        return self.reset()

    def picture(self) -> str:
        """Draw the free ids as text."""
        signs = ("." if block in self.free else "x" for block in range(1, self.num_blocks + 1))
        return f"blocks |{''.join(signs)}|  . free  x allocated"


MANY: Final = 8


def some_ids(world: PoolWorld, name: str, below: Below) -> list[int]:
    """Ids that are taken, one time in four with some that are not."""
    taken = sorted(set(range(1, world.num_blocks + 1)) - world.free)
    number = below(len(taken) + 1)
    ids = [taken.pop(below(len(taken))) for _ in range(number)]
    if below(4) == 0:
        for _ in range(1 + below(2)):
            ids.insert(below(len(ids) + 1), below(world.num_blocks + 3) - 1)
    return ids


POOL_TABLE: Final[Table[PoolWorld]] = Table(lambda world: {ALWAYS: [""]}, [
    Operation("allocate", PoolWorld.allocate, 8, arguments={
        "num_blocks": lambda world, name, below: below(world.num_blocks + 2)}),
    Operation("recycle", PoolWorld.recycle, 11, arguments={"ids": some_ids}),
    Operation("reset", PoolWorld.reset, 1),
    Operation("drain", PoolWorld.drain, 0),
])  # fmt: skip


class PoolSubject:
    """A block pool to test, in all sizes."""

    table = POOL_TABLE

    def __init__(self, factory: PoolFactory) -> None:
        self.factory = factory

    def configure(self, below: Below) -> Config:
        """Draw the size of a pool; some allow long batches."""
        return {"num_blocks": 1 + below(24)}

    def world(self, config: Config) -> PoolWorld:
        """Make a world with all ids free."""
        return PoolWorld(config, self.factory)
