"""What the specification asks of a scheduler: a dozen methods, and what it promises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol, TypeAlias

Reason: TypeAlias = Literal["length", "stop", "abort"]


@dataclass(frozen=True)
class Submission:
    """A request, as its caller makes it.

    Attributes:
        name: unique.
        prompt: at least one token.
        max_new_tokens: the last of them needs no KV.
        priority: a lower number goes first, where that is the policy.
        stop: tokens that end the request.
        namespace: requests share blocks only inside one.
    """

    name: str
    prompt: Sequence[int]
    max_new_tokens: int
    priority: int
    stop: Sequence[int]
    namespace: bytes


Chunk: TypeAlias = tuple[str, int, int]
"""A request, the place of the first token to compute, and how many."""


class Scheduler(Protocol):
    """A scheduler and the cache below it. Requests are named; only live or past names are asked."""

    def add(self, request: Submission) -> bool:
        """Queue a request; False if it is too large for the pool."""

    def schedule(self) -> Sequence[Chunk]:
        """Plan the next step."""

    def update(self, tokens: Sequence[int]) -> Sequence[str]:
        """Take in the token after each chunk (-1 after half a prompt); return who ended."""

    def abort(self, name: str) -> bool:
        """End a request; False if it is not live."""

    def running(self) -> Sequence[str]:
        """Return who holds blocks, in order of admission."""

    def waiting(self) -> Sequence[str]:
        """Return who does not, in the order in which they are tried."""

    def num_computed(self, name: str) -> int:
        """Return how many leading tokens have their KV in the cache; of one that runs."""

    def num_hit(self, name: str) -> int:
        """Return how many tokens were found in the cache when it was last admitted."""

    def block_table(self, name: str) -> Sequence[int]:
        """Return the ids of its blocks, in the order of its tokens; none if it has none."""

    def output(self, name: str) -> Sequence[int]:
        """Return the tokens generated so far."""

    def reason(self, name: str) -> Reason | None:
        """Return why it ended, or None while it lives."""

    def available(self) -> int:
        """Return how many blocks are free or could be evicted now."""


@dataclass(frozen=True)
class SchedulerPromises:
    """What a scheduler claims beyond safety. A rule about a claim binds only those who make it.

    Attributes:
        running_first: Q5; each who runs is in each step.
        policy: Q6, Q9; the order of the configuration, for admission and preemption.
        resumed_first: Q7 and Q8.
        whole: Q21; all of a request's tokens get their blocks at once.
        leaders: Q17; who needs a block that another computes waits for it.
        reserves: Q26, Q27, Q28; growth is reserved as the configuration says.
        never_preempts: Q18; nobody is preempted if the configuration reserves all.
        exact: Q22, Q23, Q25; `available` counts every block that nobody who runs holds.
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
        """Claim everything."""
        return cls(**{promise.name: True for promise in fields(cls)})


SchedulerFactory: TypeAlias = Callable[[dict[str, Any]], Any]
"""Makes an adapter from a configuration: the sizes and options of `scheduler_draw.draw_config`.

It has the methods of `Scheduler`, and may have more: `promises`, ``counts() -> dict`` (counters by
the names of `scheduler_requests.Books`), ``misuse(kind, name) -> bool`` (make a wrong call, with
names that may be wrong too; return whether it was refused) and ``check()``, its own invariants.
"""
