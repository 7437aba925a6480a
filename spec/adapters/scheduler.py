"""Protocol of a scheduler under test: its methods and its promises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol, TypeAlias

from ..model.scheduler import Reason
from .tiers import Copy


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
        first_token: token that a prefill node has generated, for a decode node.
        sample_of: name of the first sample of the same prompt, or "".
    """

    name: str
    prompt: Sequence[int]
    max_new_tokens: int
    priority: int
    stop: Sequence[int]
    namespace: bytes
    first_token: int = -1
    sample_of: str = ""


class Received(NamedTuple):
    """A request whose KV a decode node has received, and that it runs.

    Attributes:
        rank: number of requests to which it granted blocks before.
        num_cached: leading tokens that it had itself.
        num_on_device: how many of them were on the device when it granted.
        table: its blocks, which it may have lost since: the first token may end it.
    """

    name: str
    rank: int
    num_cached: int
    num_on_device: int
    table: Sequence[int]


Chunk: TypeAlias = tuple[str, int, int]
"""Request name, position of the first token to compute, number of tokens."""


class Scheduler(Protocol):
    """A scheduler and its cache. Methods are called only with names of requests that were added.

    A scheduler that plans further steps before it has the results of a step has an attribute
    ``depth``: the most steps in flight. `update` is then called for them in order.
    """

    def add(self, request: Submission) -> bool:
        """Queue a request; False if it is too large for the pool."""

    def schedule(self) -> Sequence[Chunk]:
        """Plan the next step; nothing while it waits for copies, or for the steps in flight."""

    def update(self, tokens: Sequence[int]) -> Sequence[str]:
        """Take the token after each chunk (-1 within a prompt) of the first step in flight.

        Returns:
            The requests that ended in it.
        """

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


class TieredScheduler(Scheduler, Protocol):
    """A scheduler over a cache with a host tier, and perhaps storage.

    A request that was admitted may have to wait for copies into its blocks. The copies that the
    cache asks for are taken after ``schedule``, and begin before the step computes.
    """

    def take(self) -> Sequence[Copy]:
        """Return the copies requested since the last call."""

    def take_cancelled(self) -> Sequence[int]:
        """Return the ids of taken copies that were cancelled."""

    def complete(self, copy: int, ok: Sequence[bool | None], fenced: bool) -> bool:
        """Report the result of a copy for each block; False if it has one already."""

    def fence(self, copy: int) -> bool:
        """Report that a copy can no longer touch its blocks; False if that is known."""

    def is_loading(self, name: str) -> bool:
        """Whether a running request waits for copies into its blocks."""

    def keys(self, tokens: Sequence[int], namespace: bytes) -> Sequence[bytes]:
        """Return the storage keys of the whole blocks of ``tokens``; none without storage."""

    def num_cached(self, name: str) -> int:
        """Return the number of leading blocks of a waiting request on the device or the host."""

    def num_copies(self) -> int:
        """Return the number of copies, taken or not, that are not fenced."""

    def num_parked(self) -> int:
        """Return the number of preempted requests whose KV is kept for them."""

    def num_pinned(self) -> int:
        """Return the number of host blocks that are in use and cannot be dropped."""

    def reset(self, keep: Sequence[bytes], weights: str) -> None:
        """Drop all KV but that of the namespaces ``keep``; ``weights`` names new ones, or is ""."""


class TieredDecodeScheduler(TieredScheduler, Protocol):
    """A decode node over a cache with tiers, and the prefill nodes that hand requests over to it.

    A request that was added waits until the node grants blocks. It holds them while the node loads
    what it has on the host; what it lacks arrives at once.
    """

    def ask(self) -> bool:
        """Ask for the waiting requests in order, until one is granted; whether one is."""

    def receive(self) -> Received:
        """Let the KV of the request that was granted first arrive; it runs now."""


@dataclass(frozen=True)
class SchedulerPromises:
    """Guarantees of a scheduler beyond safety: its design. By default it makes none.

    A rule about a promise applies only if it is made. Leave out what your design does otherwise;
    all other rules, and the check that nothing leaks when all requests have ended, apply to every
    scheduler.

    Attributes:
        bounds_running: Q16; ``max_running`` bounds the requests that hold blocks, not only those of
            a step.
        running_first: Q17, Q18; each running request is in each step, unless it waits for copies.
        policy: Q3, Q26; admission and preemption follow the order of the configuration.
        resumed_first: Q4 and Q27.
        whole: Q21; a request gets the blocks of all its tokens at once, not chunk by chunk.
        leaders: Q5; a request that needs a block that another computes waits for it.
        reserves: Q8, Q9, Q7; growth is reserved as configured.
        never_preempts: Q25; no request is preempted if the configuration reserves all growth.
        preempts_when_short: Q24; a request is preempted only if the blocks that running requests
            need for the step, at most, are not available.
        keeps_in_flight: Q23; an abort frees no block of a step in flight. Without it, blocks are
            freed at once, which is safe if the device runs steps in order.
        publish_on_compute: Q22 more strictly: a hit names only blocks that earlier steps have
            computed. Without it, a request may hit what an earlier request computes in the same
            step, which is safe if each layer writes the KV of all chunks before it reads.
        hits: Q11; what was computed can be hit, as long as its blocks are not handed out again. A
            hit may leave one token to compute.
        hits_last: Q11; a hit may include the block of the last token.
        copies: Q39; a sample copies the last block of its prompt. The adapter has ``copies``.
        exact: Q36; ``available`` counts every block that no running request holds, after each call.
        max_overtaken: Q6; most later requests that are admitted while a request waits, or None.
    """

    bounds_running: bool = False
    running_first: bool = False
    policy: bool = False
    resumed_first: bool = False
    whole: bool = False
    leaders: bool = False
    reserves: bool = False
    never_preempts: bool = False
    preempts_when_short: bool = False
    keeps_in_flight: bool = False
    publish_on_compute: bool = False
    hits: bool = False
    hits_last: bool = False
    copies: bool = False
    exact: bool = False
    max_overtaken: int | None = None

    @classmethod
    def all(cls) -> SchedulerPromises:
        """Make all promises but `max_overtaken`, which needs a number."""
        return cls(**{promise.name: True for promise in fields(cls) if promise.type == "bool"})

    def names(self) -> frozenset[str]:
        """Return the names of the promises that are made."""
        return frozenset(name for name, made in vars(self).items() if made is True)


SchedulerFactory: TypeAlias = Callable[[dict[str, Any]], Any]
"""Makes an adapter from a configuration: the sizes and options that ``draw_config`` of the
scheduler's world draws.

The adapter has the methods of `Scheduler`, and those of `TieredScheduler` if the configuration has
``"host_blocks"``. If ``"decode"`` is 1, it may have those of `TieredDecodeScheduler` too. It may
also have ``promises``, ``counts() -> dict`` (counters with the names of the fields of ``Books``),
``misuse(kind, name) -> bool`` (make a wrong call, perhaps with a wrong name; return whether it was
refused), ``check()`` for its own invariants, and, if it shares the blocks of several samples of a
prompt, ``copies()``: the blocks (name, owner, source, destination) that the last planned step
copies from request ``owner`` to request ``name`` before it computes.
"""
