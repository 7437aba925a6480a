"""Calls the adapter of a cache manager, and checks its methods and return values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias, TypeVar

from ..model.events import Batch
from ..rules.cache import C3, D3, S4, W6
from ..rules.rule import Violation, require
from .cache import AdapterError, Events, Factory, Promises, Snapshot, call

Depth: TypeAlias = Literal["api", "events", "full"]

Result = TypeVar("Result")

DEPTHS: Final[tuple[Depth, ...]] = ("api", "events", "full")

REQUIRED: Final = {
    "admit": "admit(name, tokens, namespace) -> hit tokens, or None if there are too few blocks",
    "append": "append(name, tokens) -> True, or False if there are too few blocks",
    "publish": "publish(name, tokens) -> None",
    "release": "release(name) -> None",
    "block_table": "block_table(name) -> the ids of its blocks",
    "available": "available() -> how many blocks are free or could be evicted",
}
BY_DEPTH: Final = {
    "events": {"report_to": "report_to(events) -> None: report to it what it does from now on"},
    "full": {
        "report_to": "report_to(events) -> None: report to it what it does from now on",
        "snapshot": "snapshot() -> radixkv.spec.Snapshot",
    },
}


class Target:
    """Calls the adapter, and checks what comes back.

    Attributes:
        promises: the promises of the manager.
        can: names of the optional methods that the adapter has.
    """

    def __init__(self, factory: Factory, num_blocks: int, block_size: int, depth: Depth) -> None:
        self._adapter = factory(num_blocks, block_size)
        needed = {**REQUIRED, **BY_DEPTH.get(depth, {})}
        for method, wanted in needed.items():
            if not callable(getattr(self._adapter, method, None)):
                kind = type(self._adapter).__name__
                raise AdapterError(f"{kind} has no method {method}; it needs {wanted}")
        self.promises = getattr(self._adapter, "promises", Promises())
        if not isinstance(self.promises, Promises):
            raise AdapterError(f"promises must be radixkv.spec.Promises, got {self.promises!r}")
        optional = ("match", "append_batch", "evict", "reset", "misuse", "check", "refusal",
                    "size", "begin_step", "end_step", "kv_events", "replay",
                    "most_told", "take")  # fmt: skip
        self.can = {name for name in optional if callable(getattr(self._adapter, name, None))}
        self._new_size = self._size() if depth == "api" else 0

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method with copies of the lists among its arguments, which it must not change."""
        given = [each.copy() if type(each) is list else each for each in arguments]
        result = call(self._adapter, method, given, W6 if method == "check" else S4)
        if given != list(arguments):
            changed = [pair for pair in zip(arguments, given, strict=True) if pair[0] != pair[1]]
            before, after = changed[0]
            raise Violation(C3, f"{method} was given {before}, and changed it to {after}")
        return result

    def _ask(self, kind: type[Result], wanted: str, method: str, *arguments: Any) -> Result:
        return _checked(kind, wanted, method, self._call(method, *arguments))

    def report_to(self, events: Events) -> None:
        """Let the manager report its events."""
        self._call("report_to", events)
        self._new_size = self._size()

    def _size(self) -> int:
        return self._ask(int, "an int", "size") if "size" in self.can else 0

    def check_empty(self) -> None:
        """Check the size of the manager, which has nothing cached and no request or operation."""
        size = self._size()
        require(size <= self._new_size, D3, "an empty cache holds {} references, a new one {}",
                size, self._new_size)  # fmt: skip

    def admit(self, name: str, tokens: Sequence[int], namespace: bytes) -> int | None:
        """See `Manager.admit`."""
        hit = self._call("admit", name, list(tokens), namespace)
        return (
            hit if hit is None else _checked(int, "the hit tokens as an int, or None", "admit", hit)
        )

    def match(self, name: str, tokens: Sequence[int], namespace: bytes) -> int:
        """Match now, for a later admission; return the hit tokens."""
        return self._ask(int, "an int", "match", name, list(tokens), namespace)

    def append(self, name: str, tokens: Sequence[int]) -> bool:
        """See `Manager.append`."""
        return self._ask(bool, "True or False", "append", name, list(tokens))

    def append_batch(self, names: Sequence[str]) -> bool:
        """Allocate room for one more token of each request."""
        return self._ask(bool, "True or False", "append_batch", list(names))

    def publish(self, name: str, tokens: Sequence[int]) -> None:
        """See `Manager.publish`."""
        self._call("publish", name, list(tokens))

    def release(self, name: str) -> None:
        """See `Manager.release`."""
        self._call("release", name)

    def block_table(self, name: str) -> list[int]:
        """See `Manager.block_table`."""
        table = self._call("block_table", name)
        try:
            ids = list(table)
        except TypeError:
            ids = [None]
        for block in ids:
            if not isinstance(block, int):
                raise AdapterError(f"block_table must return a sequence of int, got {table!r}")
        return ids

    def available(self) -> int:
        """See `Manager.available`."""
        return self._ask(int, "an int", "available")

    def evict(self, num_blocks: int) -> int:
        """Evict `num_blocks` blocks; return how many were evicted."""
        return self._ask(int, "an int", "evict", num_blocks)

    def refusal(self) -> tuple[int, int]:
        """Return the numbers of the last refusal: blocks needed and blocks available."""
        needed, there = self._call("refusal")
        return needed, there

    def snapshot(self) -> Snapshot:
        """Return the complete state of the manager."""
        return self._ask(Snapshot, "a radixkv.spec.Snapshot", "snapshot")

    def kv_events(self) -> list[Batch]:
        """Return the batches of KV events since the last call."""
        return self._ask(list, "a list of batches", "kv_events")

    def replay(self, seq: int) -> list[Batch]:
        """Return the batches of KV events from number seq on again."""
        return self._ask(list, "a list of batches", "replay", seq)

    def run(self, method: Literal["reset", "check", "begin_step", "end_step"]) -> None:
        """Call a method without arguments or result."""
        self._call(method)

    def misuse(self, kind: int, name: str) -> None:
        """Let the adapter make a wrong call and check that it is refused."""
        self._call("misuse", kind, name)


def _checked(kind: type[Result], wanted: str, method: str, result: Any) -> Result:
    if not isinstance(result, kind) or (kind is int and isinstance(result, bool)):
        raise AdapterError(f"{method} must return {wanted}, got {result!r}")
    return result
