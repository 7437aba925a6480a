"""Protocol of a scheduler under test: its methods and its promises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol, TypeAlias

Reason: TypeAlias = Literal["length", "stop", "abort"]


@dataclass(frozen=True)
class Submission:
    """A request, as its caller submits it.

    Attributes:
        name: unique name.
        prompt: at least one token.
        max_new_tokens: maximum number of generated tokens; the last one needs no KV.
        priority: a lower number goes first, under the priority policy.
        stop: tokens that end the request.
        namespace: requests share blocks only within a namespace.
    """

    name: str
    prompt: Sequence[int]
    max_new_tokens: int
    priority: int
    stop: Sequence[int]
    namespace: bytes


Chunk: TypeAlias = tuple[str, int, int]
"""Request name, position of the first token to compute, number of tokens."""


class Scheduler(Protocol):
    """A scheduler and its cache. Methods are called only with names of requests that were added."""

    def add(self, request: Submission) -> bool:
        """Queue a request; False if it is too large for the pool."""

    def schedule(self) -> Sequence[Chunk]:
        """Plan the next step."""

    def update(self, tokens: Sequence[int]) -> Sequence[str]:
        """Take the token after each chunk (-1 within a prompt); return the requests that ended."""

    def abort(self, name: str) -> bool:
        """End a request; False if it has ended already."""

    def running(self) -> Sequence[str]:
        """Return the requests that hold blocks, in order of admission."""

    def waiting(self) -> Sequence[str]:
        """Return the requests without blocks, in the order in which they are tried."""

    def num_computed(self, name: str) -> int:
        """Return the number of leading tokens of a running request with KV in the cache."""

    def num_hit(self, name: str) -> int:
        """Return the number of cached tokens at the last admission of the request."""

    def block_table(self, name: str) -> Sequence[int]:
        """Return the block ids of the request, in token order."""

    def output(self, name: str) -> Sequence[int]:
        """Return the tokens generated so far."""

    def reason(self, name: str) -> Reason | None:
        """Return why the request ended, or None if it has not."""

    def available(self) -> int:
        """Return the number of blocks that are free or can be evicted now."""


@dataclass(frozen=True)
class SchedulerPromises:
    """Guarantees of a scheduler beyond safety. A rule about a promise applies only if it is made.

    Attributes:
        running_first: Q5; each running request is in each step.
        policy: Q6, Q9; admission and preemption follow the order of the configuration.
        resumed_first: Q7 and Q8.
        whole: Q21; a request gets the blocks of all its tokens at once.
        leaders: Q17; a request that needs a block that another computes waits for it.
        reserves: Q26, Q27, Q28; growth is reserved as configured.
        never_preempts: Q18; no request is preempted if the configuration reserves all growth.
        exact: Q22, Q23, Q25; `available` counts every block that no running request holds.
    """

    running_first: bool = False
    policy: bool = False
    resumed_first: bool = False
    whole: bool = False
    leaders: bool = False
    reserves: bool = False
    never_preempts: bool = False
    exact: bool = False

    @classmethod
    def all(cls) -> SchedulerPromises:
        """Make all promises."""
        return cls(**{promise.name: True for promise in fields(cls)})


SchedulerFactory: TypeAlias = Callable[[dict[str, Any]], Any]
"""Makes an adapter from a configuration: the sizes and options that `draw_config` of the
scheduler's world draws.

The adapter has the methods of `Scheduler`. It may also have `promises`, ``counts() -> dict``
(counters with the names of the fields of `Books`), ``misuse(kind, name) -> bool`` (make a wrong
call, perhaps with a wrong name; return whether it was refused) and ``check()`` for its own
invariants.
"""
