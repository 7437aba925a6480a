"""The world of costs: a small and a large cache get the same calls, and must do the same work.

Both have the same free blocks. The large one has ten times as many idle blocks, on the device and
on the host, which no call touches but to evict the coldest. Both have a long path, the trunk; that
of the large one had a branch after each block, and all of them are evicted. Work is counted in
lines of Python that a call executes, so it is the same in every run, on every machine. Loops inside
of one call of a C function are not seen.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any, Final, TypeAlias

from ..adapters.tier_target import TierTarget
from ..rules.cache import S5, S6
from ..rules.rule import require
from . import engine
from .engine import Below, Config
from .operations import ALWAYS, Groups, Operation, Table, name_drawn, number

CostFactory: TypeAlias = Callable[[Config], Any]
"""Makes an adapter from a configuration as `TierFactory` gets it. The methods of `Manager` are
enough: without ``take`` it has no tiers, whatever ``host_blocks`` is. With tiers it also has
``evict``."""

FEW: Final = 150
MANY: Final = 1_500
NUM_FREE: Final = 24
"""Idle blocks of the small and of the large cache, and free blocks of both."""

SPARE: Final = 80
"""Lines by which work may differ: less than a line for each node that only the large cache has."""

NUM_TRUNK: Final = 40
"""Blocks of the trunk."""

NUM_TOKENS: Final = 3
"""Different tokens of a prompt; the trunk has others, so that a prompt hits it only on purpose."""

MAX_RUNNING: Final = 4
WRITES: Final = ("exclusive", "back", "through")


def work_of(call: Callable[[], Any]) -> tuple[Any, int]:
    """Return the result of a call, and how many lines and calls of Python it executes."""
    num_lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal num_lines
        num_lines += 1
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()  # it runs finalizers of others, whose lines would count
    sys.settrace(trace)
    try:
        result = call()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return result, num_lines


class CostWorld:
    """Two caches that differ in their idle blocks only, with the same requests.

    Attributes:
        requests: tokens of each running request; `parked` of each parked one.
        on_trunk: names of requests that hit the trunk.
        has_diverged: whether the caches answered differently, as when the small one had no idle
            block left. Then their work cannot be compared any more.
        can: names of the optional methods that they have; has_host: whether they have tiers.
    """

    def __init__(self, config: Config, factory: CostFactory) -> None:
        self.config = config
        self.block_size: int = config["block_size"]
        self.situations: Counter[str] = Counter()
        self.requests: dict[str, list[int]] = {}
        self.parked: dict[str, list[int]] = {}
        self.past: list[list[int]] = []
        self.trunk = [NUM_TOKENS + token for token in range(NUM_TRUNK * self.block_size)]
        self.on_trunk: set[str] = set()
        self.num_requests = 0
        self.has_diverged = False
        self.caches = [self._filled(factory, number) for number in (FEW, MANY)]
        self.table = COST_TABLE.for_adapter(self.can)

    def _filled(self, factory: CostFactory, num_idle: int) -> TierTarget:
        """Make a cache with idle blocks on the device, and as many on the host if there is one.

        The idle blocks drop the branches of the trunk from the host, and the trunk is hit last.
        """
        config, path_blocks = self.config, self.config["path_blocks"]
        sizes = {
            "num_blocks": num_idle + NUM_FREE + NUM_TRUNK,
            "host_blocks": num_idle if config["host_blocks"] else 0,
        }
        cache = TierTarget(
            lambda num_blocks, block_size: factory({**config, **sizes}),
            sizes["num_blocks"], self.block_size, "api",
        )  # fmt: skip
        self.can = cache.can
        self.has_host = has_host = bool(config["host_blocks"]) and "take" in cache.can

        def serve(*tokens: int) -> None:
            cache.admit("filler", tokens, b"")
            cache.publish("filler", [*tokens])
            cache.release("filler")

        def settle() -> None:
            while has_host and (operations := cache.ask("take")):
                for each in operations:
                    cache.ask("complete", each.id, [True] * each.num_blocks, True)
            if has_host:
                cache.ask("used")

        serve(*self.trunk)
        evicts = "evict" in cache.can
        if num_idle == MANY and evicts:
            for place in range(1, NUM_TRUNK):
                branch = [-place] * self.block_size
                serve(*self.trunk[: place * self.block_size], *branch)
            serve(*self.trunk)  # it is warmer than its branches now
            cache.evict(NUM_TRUNK - 1)
            settle()
        for tier in range(1 + has_host):
            for first in range(num_idle // path_blocks):
                serve(*[1_000_000 * (tier + 1) + first] * path_blocks * self.block_size)
            if evicts:
                serve(*self.trunk)
            if has_host:
                if not tier:
                    cache.evict(num_idle)
                settle()
        return cache

    def draw(self, below: Below) -> engine.Operation:
        """Draw an operation that applies now."""
        return self.table.draw(self, self.table.weights(), below)

    # Operations

    def apply(self, operation: engine.Operation) -> bool:
        """Do one operation on both caches, and compare their work."""
        if self.has_diverged or not COST_TABLE.apply(self, operation):
            return False
        self._both("available")
        return True

    def _both(self, method: str, *arguments: Any) -> Any:
        """Call a method of both caches; return the result of the small one."""
        return self._each(method, [arguments, arguments])[0]

    def _each(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Call a method of each cache, with arguments of its own; return both results."""
        results, work = [], []
        for cache, own in zip(self.caches, arguments, strict=True):
            result, num_lines = work_of(partial(cache.ask, method, *own))
            results.append(result)
            work.append(num_lines)
        small, large = results
        if method == "take":  # with other ids
            small, large = ([(each.kind, each.num_blocks) for each in taken] for taken in results)
        self.has_diverged |= small != large and method != "available"
        if not self.has_diverged:
            self.situations[method] += 1
            few, many = work
            is_bounded = many <= few + few // 4 + SPARE
            require(is_bounded or not self._is_on_trunk(*arguments[0]), S6, "{} takes {} lines on a"
                    " path without branches, and {} on one whose branches were evicted", method,
                    few, many)  # fmt: skip
            require(is_bounded, S5, "{} takes {} lines with {} idle blocks, and {} with {}", method,
                    few, FEW, many, MANY)  # fmt: skip
        return results

    def _is_on_trunk(self, name: object = None, *_: object) -> bool:
        return isinstance(name, str) and name in self.on_trunk

    def _settle(self) -> None:
        """End all operations of the tiers."""
        if not self.has_host:
            return
        nothing: list[Any] = [(), ()]
        while all(taken := self._each("take", nothing)):
            for pair in zip(*taken, strict=False):
                self._each("complete", [(each.id, [True] * each.num_blocks, True) for each in pair])
        self._both("take_cancelled")
        self._both("used")

    def admit(self, name: str, tokens: list[int]) -> bool:
        """Admit a request, compute all of it and publish it."""
        if name in self.requests or not tokens:
            return False
        self.num_requests += 1
        if "match" in self.can:
            self._both("match", name, tokens, b"")
        if self._both("admit", name, tokens, b"") is not None:
            self._settle()
            self.requests[name] = tokens
            self.past = [*self.past[-1:], tokens]  # others may be evicted from the small cache
            self._publish(name)
        return True

    def hit(self, name: str, num_tokens: int, tokens: list[int]) -> bool:
        """Admit a request that begins like the trunk."""
        if name in self.requests:
            return False
        self.on_trunk.add(name)
        return self.admit(name, [*self.trunk[:num_tokens], *tokens])

    def _publish(self, name: str) -> None:
        self._both("publish", name, self.requests[name])
        self._settle()

    def append(self, name: str, tokens: list[int]) -> bool:
        """Append tokens to a request and compute them."""
        if name not in self.requests:
            return False
        if self._both("append", name, tokens):
            self.requests[name] = self.requests[name] + tokens
            self._publish(name)
        return True

    def append_batch(self, names: list[str]) -> bool:
        """Append a token to each of some requests."""
        if "append_batch" not in self.can:
            return False
        names = [name for name in names if name in self.requests]
        if self._both("append_batch", names):
            for name in names:
                self.requests[name] = [*self.requests[name], 0]
                self._publish(name)
        return True

    def release(self, name: str) -> bool:
        """End a request."""
        if self.requests.pop(name, None) is None:
            return False
        self._both("release", name)
        self._settle()
        return True

    def evict(self, num_blocks: int) -> bool:
        """Evict some blocks."""
        if "evict" not in self.can:
            return False
        self._both("evict", num_blocks)
        self._settle()
        return True

    def park(self, name: str) -> bool:
        """Park a request on the host."""
        if name not in self.requests or self.parked:
            return False
        if self._both("park", name, self.requests[name], "host"):
            self._settle()
            self.parked[name] = self.requests.pop(name)
        return True

    def unpark(self, name: str) -> bool:
        """Drop a parked request."""
        if self.parked.pop(name, None) is None:
            return False
        self._both("unpark", name)
        self._settle()
        return True

    def resume(self, name: str) -> bool:
        """Resume a parked request."""
        return name in self.parked and self.admit(name, self.parked.pop(name))

    def prefetch(self, tokens: list[int]) -> bool:
        """Look a request up in storage, which has all."""
        self._both("prefetch", "prefetch", tokens, b"")
        self._settle()
        return True

    def drain(self) -> bool:
        """End all requests."""
        for name in list(self.parked):
            self.unpark(name)
        for name in list(self.requests):
            self.release(name)
        return True

    def picture(self) -> str:
        """Draw the requests as text."""
        running = [f"{name}: {len(tokens)} tokens" for name, tokens in self.requests.items()]
        return "\n".join([*running, f"{FEW} or {MANY} blocks are idle"])


def _prompt(world: CostWorld, name: str, below: Below) -> list[int]:
    start = world.past[below(len(world.past))] if world.past and below(2) else []
    length = 1 + below(4 * world.block_size)
    return [*start[:length], *(below(NUM_TOKENS) for _ in range(length - len(start)))]


def _trunk_tokens(world: CostWorld, name: str, below: Below) -> int:
    return len(world.trunk) if below(4) else 1 + below(len(world.trunk))


def _tokens(world: CostWorld, name: str, below: Below) -> list[int]:
    return [below(NUM_TOKENS) for _ in range(1 + below(world.block_size + 1))]


def _groups(world: CostWorld) -> Groups:
    names = list(world.requests)
    new = [f"r{world.num_requests + 1}"] if len(names) < MAX_RUNNING else []
    return {
        "new": new,
        # Only branches made storage keys of the trunk, which are reported at certain times.
        "on trunk": [] if world.has_host and world.config["storage"] else new,
        "running": names,
        "parkable": names if world.has_host and not world.parked else [],
        "parked": list(world.parked),
        "host": [""] if world.has_host else [],
        ALWAYS: [""],
    }


_NAME: Final = {"name": name_drawn}

COST_TABLE: Final[Table[CostWorld]] = Table(_groups, [
    Operation("admit", CostWorld.admit, 6, "new", {**_NAME, "tokens": _prompt}),
    Operation("hit", CostWorld.hit, 3, "on trunk", {
        **_NAME, "num_tokens": _trunk_tokens, "tokens": _tokens}),
    Operation("append", CostWorld.append, 6, "running", {**_NAME, "tokens": _tokens}),
    Operation("append_batch", CostWorld.append_batch, 2, arguments={
        "names": lambda world, name, below: list(world.requests)}, needs="append_batch"),
    Operation("release", CostWorld.release, 3, "running", _NAME),
    Operation("evict", CostWorld.evict, 2, arguments={"num_blocks": number(4)}, needs="evict"),
    Operation("park", CostWorld.park, 2, "parkable", _NAME),
    Operation("resume", CostWorld.resume, 2, "parked", _NAME),
    Operation("unpark", CostWorld.unpark, 1, "parked", _NAME),
    Operation("prefetch", CostWorld.prefetch, 1, "host", {"tokens": _prompt}),
    Operation("drain", CostWorld.drain, 0),
])  # fmt: skip


class CostSubject:
    """A cache, with or without tiers, whose calls must not cost more if it is larger."""

    table = COST_TABLE

    def __init__(self, factory: CostFactory) -> None:
        self.factory = factory

    def configure(self, below: Below) -> Config:
        """Draw the sizes and policies of two caches."""
        return {
            "block_size": 1 + below(3),
            "path_blocks": 1 + below(2),
            "host_blocks": below(2),
            "write": WRITES[below(len(WRITES))],
            "hits": 0,
            "storage": below(2),
            "at_once": 0,
            "law": 0,
        }

    def world(self, config: Config) -> CostWorld:
        """Make two caches with idle blocks."""
        return CostWorld(config, self.factory)
