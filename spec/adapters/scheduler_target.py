"""Calls the adapter of a scheduler, and checks its methods and return values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from ..model.scheduler import Reason
from ..rules.cache import C3
from ..rules.rule import Violation, require
from ..rules.scheduler import Q35
from .cache import AdapterError, describe_error
from .scheduler import Chunk, Received, SchedulerFactory, SchedulerPromises, Submission
from .tiers import Copy

Plain = TypeVar("Plain", bool, int)

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

    Attributes:
        promises: the promises of the scheduler.
        can: names of the optional methods that the adapter has.
        has_tiers: whether the configuration has tiers below the device.
        is_decode_node: whether it has, and prefill nodes compute the prompts.
    """

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
        self.promises = getattr(self._adapter, "promises", SchedulerPromises())
        if not isinstance(self.promises, SchedulerPromises):
            raise AdapterError(
                f"promises must be radixkv.spec.SchedulerPromises, got {self.promises!r}"
            )
        optional = ("counts", "misuse", "check", *more)
        self.can = {name for name in optional if callable(getattr(self._adapter, name, None))}

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._adapter, method)(*arguments)
        except (Violation, AdapterError):
            raise
        except (Exception, SystemExit) as error:
            shown = ", ".join(map(repr, arguments))
            raise Violation(Q35, describe_error(f"{method}({shown})", error)) from error

    def _ask(self, kind: type[Plain], method: str, *arguments: Any) -> Plain:
        result = self._call(method, *arguments)
        if type(result) is not kind:
            raise _wrong(method, result)
        return result

    def _list(self, method: str, *arguments: Any) -> list[Any]:
        result = self._call(method, *arguments)
        if isinstance(result, str) or not isinstance(result, Iterable):
            raise _wrong(method, result)
        return list(result)

    def add(self, request: Submission) -> bool:
        """See `Scheduler.add`."""
        return self._ask(bool, "add", request)

    def ask(self) -> bool:
        """See `TieredDecodeScheduler.ask`."""
        return self._ask(bool, "ask")

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

    def update(self, tokens: Sequence[int]) -> list[str]:
        """See `Scheduler.update`."""
        given = list(tokens)
        ended = self._list("update", given)
        require(
            given == list(tokens), C3, "update was given {}, and changed it to {}", tokens, given
        )
        return ended

    def abort(self, name: str) -> bool:
        """See `Scheduler.abort`."""
        return self._ask(bool, "abort", name)

    def running(self) -> list[str]:
        """See `Scheduler.running`."""
        return self._list("running")

    def waiting(self) -> list[str]:
        """See `Scheduler.waiting`."""
        return self._list("waiting")

    def num_computed(self, name: str) -> int:
        """See `Scheduler.num_computed`."""
        return self._ask(int, "num_computed", name)

    def num_hit(self, name: str) -> int:
        """See `Scheduler.num_hit`."""
        return self._ask(int, "num_hit", name)

    def block_table(self, name: str) -> list[int]:
        """See `Scheduler.block_table`."""
        return self._list("block_table", name)

    def output(self, name: str) -> list[int]:
        """See `Scheduler.output`."""
        return self._list("output", name)

    def reason(self, name: str) -> Reason | None:
        """See `Scheduler.reason`."""
        reason: Reason | None = self._call("reason", name)
        return reason

    def available(self) -> int:
        """See `Scheduler.available`."""
        return self._ask(int, "available")

    def take(self) -> list[Copy]:
        """See `TieredScheduler.take`."""
        return self._list("take")

    def take_cancelled(self) -> list[int]:
        """See `TieredScheduler.take_cancelled`."""
        return self._list("take_cancelled")

    def complete(self, copy: int, ok: Sequence[bool], fenced: bool) -> bool:
        """See `TieredScheduler.complete`."""
        return self._ask(bool, "complete", copy, ok, fenced)

    def fence(self, copy: int) -> bool:
        """See `TieredScheduler.fence`."""
        return self._ask(bool, "fence", copy)

    def is_loading(self, name: str) -> bool:
        """See `TieredScheduler.is_loading`; False without tiers."""
        return self.has_tiers and self._ask(bool, "is_loading", name)

    def keys(self, tokens: Sequence[int], namespace: bytes) -> list[bytes]:
        """See `TieredScheduler.keys`."""
        return self._list("keys", tokens, namespace)

    def num_cached(self, name: str) -> int:
        """See `TieredScheduler.num_cached`."""
        return self._ask(int, "num_cached", name)

    def num_copies(self) -> int:
        """See `TieredScheduler.num_copies`; 0 without tiers."""
        return self._ask(int, "num_copies") if self.has_tiers else 0

    def num_parked(self) -> int:
        """See `TieredScheduler.num_parked`."""
        return self._ask(int, "num_parked")

    def num_pinned(self) -> int:
        """See `TieredScheduler.num_pinned`."""
        return self._ask(int, "num_pinned")

    def reset(self, keep: Sequence[bytes], weights: str) -> None:
        """See `TieredScheduler.reset`."""
        self._call("reset", keep, weights)

    def counts(self) -> Mapping[str, int]:
        """Return the counters of the scheduler."""
        counts: Mapping[str, int] = self._call("counts")
        return counts

    def misuse(self, kind: int, name: str) -> bool:
        """Make a wrong call; return whether it was refused."""
        return self._ask(bool, "misuse", kind, name)

    def check(self) -> None:
        """Let the scheduler check its own invariants."""
        self._call("check")


def _wrong(method: str, result: Any) -> AdapterError:
    optional = {"misuse": "misuse(kind, name) -> whether refused"}
    wanted = {**REQUIRED, **REQUIRED_OF_TIERS, **REQUIRED_OF_DECODE, **optional}
    return AdapterError(f"{method} returned {result!r}; it needs {wanted[method]}")
