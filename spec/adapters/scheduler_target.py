"""Calls the adapter of a scheduler, and checks its methods and return values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..model.scheduler import Reason
from ..rules.rule import Violation
from ..rules.scheduler import Q31
from .cache import AdapterError
from .scheduler import Chunk, SchedulerFactory, SchedulerPromises, Submission

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


class SchedulerTarget:
    """Calls the adapter; its exceptions break a rule.

    Attributes:
        promises: the promises of the scheduler.
        can: names of the optional methods that the adapter has.
    """

    def __init__(self, factory: SchedulerFactory, config: dict[str, Any]) -> None:
        self._adapter = factory(config)
        for method, wanted in REQUIRED.items():
            if not callable(getattr(self._adapter, method, None)):
                kind = type(self._adapter).__name__
                raise AdapterError(f"{kind} has no method {method}; it needs {wanted}")
        self.promises = getattr(self._adapter, "promises", SchedulerPromises())
        if not isinstance(self.promises, SchedulerPromises):
            raise AdapterError(
                f"promises must be radixkv.spec.SchedulerPromises, got {self.promises!r}"
            )
        optional = ("counts", "misuse", "check")
        self.can = {name for name in optional if callable(getattr(self._adapter, name, None))}

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._adapter, method)(*arguments)
        except (Violation, AdapterError):
            raise
        except (Exception, SystemExit) as error:
            shown = ", ".join(map(repr, arguments))
            raise Violation(Q31, f"{method}({shown}) raised {error!r}") from error

    def add(self, request: Submission) -> bool:
        """See `Scheduler.add`."""
        return bool(self._call("add", request))

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
        return list(self._call("update", tokens))

    def abort(self, name: str) -> bool:
        """See `Scheduler.abort`."""
        return bool(self._call("abort", name))

    def running(self) -> list[str]:
        """See `Scheduler.running`."""
        return list(self._call("running"))

    def waiting(self) -> list[str]:
        """See `Scheduler.waiting`."""
        return list(self._call("waiting"))

    def num_computed(self, name: str) -> int:
        """See `Scheduler.num_computed`."""
        return int(self._call("num_computed", name))

    def num_hit(self, name: str) -> int:
        """See `Scheduler.num_hit`."""
        return int(self._call("num_hit", name))

    def block_table(self, name: str) -> list[int]:
        """See `Scheduler.block_table`."""
        return list(self._call("block_table", name))

    def output(self, name: str) -> list[int]:
        """See `Scheduler.output`."""
        return list(self._call("output", name))

    def reason(self, name: str) -> Reason | None:
        """See `Scheduler.reason`."""
        reason: Reason | None = self._call("reason", name)
        return reason

    def available(self) -> int:
        """See `Scheduler.available`."""
        return int(self._call("available"))

    def counts(self) -> Mapping[str, int]:
        """Return the counters of the scheduler."""
        counts: Mapping[str, int] = self._call("counts")
        return counts

    def misuse(self, kind: int, name: str) -> bool:
        """Make a wrong call; return whether it was refused."""
        return bool(self._call("misuse", kind, name))

    def check(self) -> None:
        """Let the scheduler check its own invariants."""
        self._call("check")
