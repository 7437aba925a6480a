"""Calls the adapter of a scheduler, and checks its methods and return values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, get_args, get_origin, get_type_hints

from ..model.scheduler import BlockCopy, Reason
from ..rules.cache import C3
from ..rules.rule import require
from ..rules.scheduler import Q35
from .cache import AdapterError, call
from .scheduler import Chunk, Received, SchedulerFactory, SchedulerPromises, Submission
from .tiers import Copy

REQUIRED: Final = {
    "add": "add(request: Submission) -> True, or False if it is too large",
    "schedule": "schedule() -> the chunks (name, start, length) of the next step",
    "update": "update(tokens) -> the names of the requests that ended",
    "abort": "abort(name) -> whether it was live",
    "running": "running() -> the names that hold blocks, in order of admission",
    "waiting": "waiting() -> the names that do not, in the order in which they are tried",
    "num_computed": "num_computed(name) -> leading tokens with KV in the cache",
    "num_hit": "num_hit(name) -> tokens found in the cache at its last admission",
    "block_table": "block_table(name) -> the ids of its blocks",
    "output": "output(name) -> the tokens generated so far",
    "reason": "reason(name) -> 'length', 'stop', 'abort', or None while it lives",
    "available": "available() -> how many blocks are free or could be evicted",
}

REQUIRED_OF_TIERS: Final = {
    "take": "take() -> the copies (Copy) requested since the last call",
    "take_cancelled": "take_cancelled() -> the ids of taken copies that were cancelled",
    "complete": "complete(copy, ok, fenced) -> whether the result was new",
    "fence": "fence(copy) -> whether the fence was new",
    "is_loading": "is_loading(name) -> whether it waits for copies into its blocks",
    "keys": "keys(tokens, namespace) -> the storage keys of the whole blocks",
    "num_cached": "num_cached(name) -> leading blocks on the device or the host",
    "num_copies": "num_copies() -> how many copies are not fenced",
    "num_parked": "num_parked() -> how many preempted requests have their KV kept",
    "num_pinned": "num_pinned() -> how many host blocks cannot be dropped",
    "reset": "reset(keep, weights) -> None; drops all KV but that of some namespaces",
}

REQUIRED_OF_DECODE: Final = {
    "ask": "ask() -> whether blocks are granted to a waiting request",
    "receive": "receive() -> the request (Received) whose KV arrives in granted blocks",
}


class SchedulerTarget:
    """Calls the adapter; its exceptions break a rule.

    The attributes that are annotated here are methods of `Scheduler`, `TieredScheduler` and
    `TieredDecodeScheduler`: a result must have the type of the annotation, or become a list.

    Attributes:
        promises: the promises of the scheduler.
        can: names of the optional methods that the adapter has.
        has_tiers: whether the configuration has tiers below the device.
        depth: most steps in flight.
        is_decode_node: whether it has, and prefill nodes compute the prompts.
    """

    add: Callable[[Submission], bool]
    ask: Callable[[], bool]
    abort: Callable[[str], bool]
    running: Callable[[], list[str]]
    waiting: Callable[[], list[str]]
    num_computed: Callable[[str], int]
    num_hit: Callable[[str], int]
    block_table: Callable[[str], list[int]]
    output: Callable[[str], list[int]]
    reason: Callable[[str], Reason | None]
    available: Callable[[], int]
    take: Callable[[], list[Copy]]
    take_cancelled: Callable[[], list[int]]
    complete: Callable[[int, Sequence[bool | None], bool], bool]
    fence: Callable[[int], bool]
    keys: Callable[[Sequence[int], bytes], list[bytes]]
    num_cached: Callable[[str], int]
    num_parked: Callable[[], int]
    num_pinned: Callable[[], int]
    reset: Callable[[Sequence[bytes], str], None]
    counts: Callable[[], Mapping[str, int]]
    misuse: Callable[[int, str], bool]
    check: Callable[[], None]

    def __init__(self, factory: SchedulerFactory, config: dict[str, Any]) -> None:
        self._adapter = factory(config)
        self.has_tiers = "host_blocks" in config
        more = REQUIRED_OF_TIERS if self.has_tiers else {}
        self.is_decode_node = self.has_tiers and hasattr(self._adapter, "ask")
        if self.is_decode_node:
            more = {**more, **REQUIRED_OF_DECODE}
        for method, wanted in {**REQUIRED, **more}.items():
            if not callable(getattr(self._adapter, method, None)):
                kind = type(self._adapter).__name__
                raise AdapterError(f"{kind} has no method {method}; it needs {wanted}")
        self.depth: int = min(config.get("depth", 1), getattr(self._adapter, "depth", 1))
        self.promises = getattr(self._adapter, "promises", SchedulerPromises())
        if not isinstance(self.promises, SchedulerPromises):
            wanted = "radixkv.spec.adapters.scheduler.SchedulerPromises"
            raise AdapterError(f"promises must be {wanted}, got {self.promises!r}")
        optional = ("counts", "misuse", "check", "copies", *more)
        self.can = {name for name in optional if callable(getattr(self._adapter, name, None))}
        for method, kind in _KINDS.items():
            setattr(self, method, partial(self._ask, kind, method))

    def _call(self, method: str, *arguments: Any) -> Any:
        return call(self._adapter, method, arguments, Q35)

    def _ask(self, kind: Any, method: str, *arguments: Any) -> Any:
        result = self._call(method, *arguments)
        is_list = isinstance(result, Iterable) and not isinstance(result, str)
        if not (is_list if kind is list else type(result) is kind or kind not in (bool, int)):
            raise _wrong(method, result)
        return list(result) if kind is list else result

    def receive(self) -> Received:
        """See `TieredDecodeScheduler.receive`."""
        return Received(*self._call("receive"))

    def schedule(self) -> list[Chunk]:
        """See `Scheduler.schedule`."""
        chunks = self._call("schedule")
        try:
            return [(str(name), int(start), int(length)) for name, start, length in chunks]
        except (TypeError, ValueError):
            raise AdapterError(
                f"schedule must return chunks (name, start, length), got {chunks!r}"
            ) from None

    def copies(self) -> dict[str, BlockCopy]:
        """Return the copies of the last planned step by name; none if the adapter has none."""
        copies = [BlockCopy(*each) for each in self._call("copies")] if "copies" in self.can else []
        return {copy.name: copy for copy in copies}

    def update(self, tokens: Sequence[int]) -> list[str]:
        """See `Scheduler.update`."""
        given = list(tokens)
        ended: list[str] = self._ask(list, "update", given)
        require(
            given == list(tokens), C3, "update was given {}, and changed it to {}", tokens, given
        )
        return ended

    def is_loading(self, name: str) -> bool:
        """See `TieredScheduler.is_loading`; False without tiers."""
        return self.has_tiers and bool(self._ask(bool, "is_loading", name))

    def num_copies(self) -> int:
        """See `TieredScheduler.num_copies`; 0 without tiers."""
        return int(self._ask(int, "num_copies")) if self.has_tiers else 0


_KINDS: Final[dict[str, Any]] = {
    method: get_origin(get_args(hint)[1]) or get_args(hint)[1]
    for method, hint in get_type_hints(SchedulerTarget).items()
}
"""The types of the results of the methods that are passed on."""


def _wrong(method: str, result: Any) -> AdapterError:
    optional = {"misuse": "misuse(kind, name) -> whether refused"}
    wanted = {**REQUIRED, **REQUIRED_OF_TIERS, **REQUIRED_OF_DECODE, **optional}
    return AdapterError(f"{method} returned {result!r}; it needs {wanted[method]}")
