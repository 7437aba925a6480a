"""The model of a scheduler over a paged KV cache: which decisions it may make, and what follows.

::

    submit ──► waiting ──► running ──► ended        abort: from every state
                  ▲           │
                  └ preempted ◄

In each step the scheduler decides which requests it preempts, admits and computes, and through
which blocks (`Step`). The model moves its requests accordingly, and each move is guarded by rules.
Everything else the model predicts: the contents of all blocks, the tokens, the ends and the counts.
The guards of a promised policy are in `scheduler_policies`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ..rules import scheduler as rules
from ..rules.rule import Violation, require
from .device import Device
from .ghost import Tag, next_tag

Phase: TypeAlias = Literal["waiting", "running", "preempted", "ended"]
Reason: TypeAlias = Literal["length", "stop", "abort"]


def root_tag(*parts: int) -> Tag:
    """Tag of the empty prefix; the hash of an int, unlike bytes, is the same in each process."""
    return hash((*parts, -1))


def next_token(tag: Tag, alphabet: int) -> int:
    """The deterministic language model: the token that follows a prefix."""
    return (tag >> 11) % alphabet


class Request:
    """A request: its tokens, all that the language model will add to them, and its progress.

    Attributes:
        tokens: prompt and generated tokens; `tags` has the tag of each prefix, also of later ones.
        outputs, reason: the complete output of the language model, and why it ends.
        order: rank in the policy; the lowest comes first.
        computed: leading tokens with KV in the cache.
        target: number of tokens at the last admission, up to which the request prefills.
        hit: cached tokens at the last admission, with those that copies brought once it begins.
        is_loading: whether it was admitted, and waits for copies into its blocks.
        overtaken: number of later requests that were admitted since it began to wait.
    """

    __slots__ = (
        "computed", "has_begun", "hit", "is_loading", "max_kv_tokens", "name", "num_output",
        "num_preemptions", "order", "outputs", "overtaken", "phase", "prompt", "reason",
        "tags", "target", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        prompt: Sequence[int],
        max_new_tokens: int,
        order: tuple[int, ...],
        root: Tag,
        alphabet: int,
        stop: Collection[int] = (),
    ) -> None:
        self.name, self.order = name, order
        self.prompt = tuple(prompt)
        self.tokens = list(prompt)
        self.max_kv_tokens = len(self.tokens) + max_new_tokens - 1
        self.outputs: list[int] = []
        self.reason: Reason = "length"
        self.phase: Phase = "waiting"
        self.is_loading = self.has_begun = False
        self.num_output = self.num_preemptions = self.overtaken = 0
        self.computed = self.target = self.hit = 0
        self.retag(root)
        while len(self.outputs) < max_new_tokens and self.reason == "length":
            token = next_token(self.tags[-1], alphabet)
            self.outputs.append(token)
            self.tags.append(next_tag(self.tags[-1], token))
            if token in stop:
                self.reason = "stop"

    def retag(self, root: Tag) -> None:
        """Compute the tags of all prefixes anew, as if under the weights of another root."""
        self.tags: list[Tag] = []
        tag = root
        for token in (*self.prompt, *self.outputs):
            tag = next_tag(tag, token)
            self.tags.append(tag)

    @property
    def prefilling(self) -> bool:
        """Whether tokens from before the admission are not computed yet."""
        return self.computed < self.target

    @property
    def is_live(self) -> bool:
        """Whether the request has not ended."""
        return self.phase != "ended"

    def shared_blocks(self, block_size: int) -> int:
        """Number of leading blocks that were hit or loaded, or computed and thus published."""
        return max(self.hit, self.computed) // block_size

    def suspend(self) -> None:
        """Take the blocks away; the request computes again what the cache loses."""
        self.phase = "preempted"
        self.num_preemptions += 1
        self.computed = self.target = self.hit = 0
        self.is_loading = False

    def append_next(self) -> bool:
        """Add the token that follows; return whether the request ends with it."""
        self.tokens.append(self.outputs[self.num_output])
        self.num_output += 1
        return self.num_output == len(self.outputs)


@dataclass(frozen=True)
class Limits:
    """Sizes and options of a scheduler; see `Scheduler` for their meaning."""

    num_blocks: int
    block_size: int
    token_budget: int
    max_running: int
    reserve_tokens: int | None
    prefix_cache: bool


@dataclass(slots=True)
class Step:
    """What the scheduler decided in a step.

    Attributes:
        chunks: requests to compute, with start and length.
        running: running requests, in order of admission, and their `tables` of blocks.
        admitted, preempted: requests that changed state.
        hits: cached tokens of each admitted request.
        begun: computed tokens of each request that has all its copies and begins to compute.
        arrived: number of tokens that are there, for a begun request that was loading.
        available: available blocks before the step; `left` after its plan.
        num_copies: copies in flight; `awaited` names the requests that one of them concerns, and
            `loading` those into whose blocks one writes.
        unasked: admitted requests for which storage was not asked, though it might have blocks.
        growth: blocks that running requests may need for the step, and `unbegun` the requests that
            did not begin before it; the model computes both.
    """

    chunks: list[tuple[Request, int, int]]
    running: list[Request]
    tables: dict[str, list[int]]
    admitted: list[Request]
    preempted: list[Request]
    hits: Mapping[str, int]
    begun: Mapping[str, int]
    available: int
    left: int
    arrived: Mapping[str, int] = field(default_factory=dict)
    num_copies: int = 0
    awaited: Collection[str] = ()
    loading: Collection[str] = ()
    unasked: Collection[str] = ()
    growth: int = 0
    unbegun: Sequence[Request] = ()

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all chunks."""
        return sum(length for _, _, length in self.chunks)


class SchedulerModel:
    """The requests of a scheduler, the contents of its blocks, and the moves that are allowed.

    Attributes:
        promised: names of the promises of the scheduler, see `SchedulerPromises`.
        is_decode_node: whether prefill nodes compute the prompts, and hand them over.
        num_host_blocks: size of the host tier; without it, 0, `has_tiers` is False.
        live: requests that have not ended, by name.
        running: requests that hold blocks, in order of admission, and their `tables`; `before` has
            the tables before the last decision.
        receiving: requests that a decode node was handed, and their tables; not all of their KV has
            arrived.
        published: block of each prefix, by the tag of its last token, that the cache holds for
            certain; `prefix_in` is the inverse.
        situations: how often each situation of interest occurred.
    """

    def __init__(
        self,
        limits: Limits,
        promised: Collection[str],
        num_host_blocks: int = 0,
        is_decode_node: bool = False,
    ) -> None:
        self.limits = limits
        self.is_decode_node = is_decode_node
        self.promised = promised
        self.num_host_blocks = num_host_blocks
        self.has_tiers = num_host_blocks > 0
        self.device = Device(limits.block_size)
        self.live: dict[str, Request] = {}
        self.running: list[Request] = []
        self.tables: dict[str, list[int]] = {}
        self.before: dict[str, list[int]] = {}
        self.receiving: dict[str, list[int]] = {}
        self.published: dict[Tag, int] = {}
        self.prefix_in: dict[int, Tag] = {}
        self.situations: Counter[str] = Counter()

    # Derived state

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks for `num_tokens` tokens."""
        return -(-num_tokens // self.limits.block_size)

    def held(self) -> set[int]:
        """The blocks of running requests, and of those that are being received."""
        running = [self.tables[request.name] for request in self.running]
        return {block for table in (*running, *self.receiving.values()) for block in table}

    def waiting(self) -> list[Request]:
        """Requests without blocks in the policy's order; if promised, preempted ones first."""
        queued = [request for request in self.live.values() if request.phase != "running"]
        preempted_first = "resumed_first" in self.promised
        return sorted(
            queued, key=lambda each: (preempted_first and each.phase != "preempted", each.order)
        )

    def growth(self) -> int:
        """Number of blocks that the running requests may need for the next step, at most."""
        budget = self.limits.token_budget
        return sum(
            max(self.blocks_for(min(len(each.tokens), each.computed + budget)) - held, 0)
            for each in self.running
            for held in (len(self.tables[each.name]),)
        )

    def bound(self) -> int:
        """Upper bound of the steps until all live requests end: at worst they run one by one.

        The first in the order is never preempted and progresses in every step; each request that
        ends may have made all others start again.
        """
        work = sum(request.max_kv_tokens + 1 for request in self.live.values())
        return (len(self.live) + 1) * work

    # Requests come, and are given up

    def submit(self, request: Request, accepted: bool) -> None:
        """Queue a request; it is refused if and only if it can never fit."""
        needed, there = self.blocks_for(request.max_kv_tokens), self.limits.num_blocks
        require(
            accepted == (needed <= there),
            rules.Q1, "{} needs {} blocks of {}, and is {}",
            request.name, needed, there, "accepted" if accepted else "refused",
        )  # fmt: skip
        if accepted:
            self.live[request.name] = request
        else:
            request.phase = "ended"
            self.situations["too large"] += 1

    def end(self, request: Request) -> None:
        """End a request in any state."""
        if request.phase == "running":
            self.running = [other for other in self.running if other is not request]
        del self.live[request.name]
        request.phase = "ended"

    def receive(
        self, request: Request, table: Sequence[int], num_cached: int, order: tuple[int, ...]
    ) -> bool:
        """Let a decode node run a request whose KV has arrived; return whether it ends at once.

        Args:
            request: a waiting request; the prefill node has generated its first token.
            table: its blocks.
            num_cached: leading tokens that the decode node had; the others arrive.
            order: its rank in the policy.
        """
        request.phase, request.has_begun, request.order = "running", True, order
        request.hit, request.target = num_cached, len(request.tokens)
        request.computed = len(request.tokens)
        self.running = [*self.running, request]
        self.receiving.pop(request.name, None)
        self.tables[request.name] = list(table)
        self.reuse(table[num_cached // self.limits.block_size :])
        for position in range(num_cached, request.computed):
            self.device.append(table, position, request.tags[position])
        self.read(request, table, request.computed, "when it was received")
        self.publish(request, table)
        if request.append_next():
            self.situations[f"ended by {request.reason}"] += 1
            self.end(request)
        return not request.is_live

    def abort(self, request: Request, step: Step | None, freed: int) -> None:
        """Abort a request, perhaps in a step in flight; `freed` blocks became available."""
        if step is not None and any(chunk[0] is request for chunk in step.chunks):
            self.situations["aborted in flight"] += 1
            require(
                not freed or "keeps_in_flight" not in self.promised,
                rules.Q23, "{} is in flight through {}, and its abort frees {} blocks",
                request.name, self.tables[request.name], freed,
            )  # fmt: skip
        self.end(request)

    # A step: decide, compute, complete

    def decide(self, step: Step) -> None:
        """Move the requests as the scheduler decided."""
        step.growth = self.growth()
        step.unbegun = [request for request in self.live.values() if not request.has_begun]
        for request in step.preempted:
            if request.is_loading and request.name not in step.loading:
                # It was loaded, began and was preempted within the step: its hits are not seen.
                request.has_begun = True
            request.suspend()
        for request in step.admitted:
            request.phase = "running"
            request.hit, request.target = step.hits[request.name], len(request.tokens)
            request.is_loading = request.name not in step.begun
        self.before = {request.name: self.tables[request.name] for request in self.running}
        self.running, self.tables = step.running, step.tables
        for name, computed in step.begun.items():
            request = self.live[name]
            request.hit, request.computed = step.arrived.get(name, request.hit), computed
        self._check(step)
        for name in step.begun:
            self.live[name].is_loading = False
            self.live[name].has_begun = True

    def _check(self, step: Step) -> None:
        """Check the rules of every scheduler for a decision."""
        limits, live = self.limits, self.live
        require(
            bool(step.chunks) <= bool(live) <= bool(step.chunks or step.num_copies),
            rules.Q14, "{} chunks are planned for {} live requests", len(step.chunks), len(live),
        )  # fmt: skip
        require(
            step.num_tokens <= limits.token_budget,
            rules.Q15, "{} tokens are planned, the budget is {}",
            step.num_tokens, limits.token_budget,
        )  # fmt: skip
        bounded = step.running if "bounds_running" in self.promised else step.chunks
        require(
            len(bounded) <= limits.max_running,
            rules.Q16, "{} run, and {} may", len(bounded), limits.max_running,
        )  # fmt: skip
        for name, computed in step.begun.items():
            request, last = live[name], len(live[name].tokens) - 1
            require(
                computed == min(request.hit, last)
                and step.hits.get(name, 0) % limits.block_size == 0,
                rules.Q10, "{} starts at {} of {} tokens after a hit of {}",
                name, computed, last + 1, request.hit,
            )  # fmt: skip
        planned = set()
        for request, start, length in step.chunks:
            name = request.name
            require(name not in planned, rules.Q19, "{} has two chunks in a step", name)
            planned.add(name)
            require(
                request.phase == "running", rules.Q2, "{} is computed while {}", name, request.phase
            )
            ready = start == request.computed and not (
                request.is_loading and name not in step.begun
            )
            require(
                ready and 1 <= length <= len(request.tokens) - start,
                rules.Q19, "{} has {} of {} tokens computed, and its chunk is {} tokens from {}",
                name, request.computed, len(request.tokens), length, start,
            )  # fmt: skip
            table = self.tables[name]
            needed = self.blocks_for(start + length)
            require(
                len(table) >= needed and len(set(table)) == len(table),
                rules.Q20, "{} writes up to token {}, which takes {} blocks, with {}",
                name, start + length, needed, table,
            )  # fmt: skip

    def compute(self, step: Step) -> None:
        """Compute the chunks on the device: each reads the KV before it, and writes its own.

        All chunks read before any writes, if hits name only blocks of earlier steps. Otherwise
        each layer writes the KV of the whole step before it reads.
        """
        if "publish_on_compute" in self.promised:
            for request, start, _ in step.chunks:
                self.read(request, step.tables[request.name], start, "in a step")
        for request, start, length in step.chunks:
            # The last token of a full hit is computed only for its logits; its KV is cached.
            for position in range(max(start, request.hit), start + length):
                self.device.append(step.tables[request.name], position, request.tags[position])
        if "publish_on_compute" not in self.promised:
            for request, start, length in step.chunks:
                self.read(request, step.tables[request.name], start + length, "in a step")

    def read(self, request: Request, table: Sequence[int], end: int, when: str) -> None:
        """Check that a request reads its own prefix, up to token `end`."""
        require(
            len(table) * self.limits.block_size >= end,
            rules.Q20, "{} reads {} tokens through {}, {}", request.name, end, table, when,
        )  # fmt: skip
        try:
            self.device.read(f"{request.name} {when}", table, request.tags[:end])
        except Violation as violation:
            raise Violation(rules.Q22, violation.why) from violation

    def sampled(self, step: Step) -> list[int]:
        """Return the token after each chunk, -1 within a prompt."""
        return [
            request.outputs[request.num_output] if start + length == len(request.tokens) else -1
            for request, start, length in step.chunks
        ]

    def complete(self, step: Step, ended: Sequence[str]) -> None:
        """Append the sampled tokens and publish; `ended` are the requests that end with theirs."""
        expected = []
        for request, start, length in step.chunks:
            if not request.is_live:  # aborted while in flight
                continue
            request.computed = start + length
            self.publish(request, step.tables[request.name])
            if request.computed == len(request.tokens) and request.append_next():
                expected.append(request.name)
                self.situations[f"ended by {request.reason}"] += 1
                self.end(request)
        require(
            sorted(ended) == sorted(expected),
            rules.Q28, "{} ended in this step, and not {}", ended, expected,
        )  # fmt: skip

    def publish(self, request: Request, table: Sequence[int]) -> None:
        """Remember the block of each computed prefix; the first copy of a prefix is kept."""
        size = self.limits.block_size
        for index in range(request.computed // size):
            tag, block = request.tags[(index + 1) * size - 1], table[index]
            if self.prefix_in.get(block, tag) != tag:
                self.reuse([block])
            if self.published.setdefault(tag, block) == block:
                self.prefix_in[block] = tag

    def reuse(self, blocks: Sequence[int]) -> None:
        """Forget the prefixes of blocks that were given to a request anew."""
        for block in blocks:
            if (tag := self.prefix_in.pop(block, None)) is not None:
                del self.published[tag]

    def reset(self, roots: Mapping[str, Tag]) -> None:
        """Forget all KV and preempt all: each live request goes on under the weights of a root."""
        for request in self.running:
            request.suspend()
        self.running = []
        self.published.clear()
        self.prefix_in.clear()
        for name, root in roots.items():
            self.live[name].retag(root)

    # Between two calls

    def settle(
        self,
        running: Sequence[str],
        waiting: Sequence[str],
        tables: Mapping[str, Sequence[int]],
        computed: Mapping[str, int],
        available: int,
        is_busy: bool = False,
    ) -> None:
        """Check the state that the scheduler shows between two calls.

        Args:
            running, waiting: names of the requests with and without blocks, in order.
            tables, computed: blocks and computed tokens of the running ones.
            available: number of blocks that are free or can be evicted.
            is_busy: whether copies are in flight, which may hold blocks too.
        """
        known = [request.name for request in self.running]
        require(running == known, rules.Q2, "{} run, and not {}", running, known)
        queued = [request.name for request in self.waiting()]
        require(
            sorted(waiting) == sorted(queued),
            rules.Q2, "{} wait, and not {}", waiting, sorted(queued),
        )  # fmt: skip
        require(
            list(waiting) == queued or "policy" not in self.promised,
            rules.Q3, "they wait in the order {}, and not {}", waiting, queued,
        )  # fmt: skip
        for request in self.running:
            name = request.name
            require(
                computed[name] == request.computed,
                rules.Q19, "{} says that {} tokens are computed, not {}",
                name, computed[name], request.computed,
            )  # fmt: skip
            self.tables[name] = list(tables[name])
            self.read(request, tables[name], request.computed, "between two steps")
            self.publish(request, tables[name])
        held, num_blocks = len(self.held()), self.limits.num_blocks
        exact = "exact" in self.promised and not is_busy
        require(
            held + available == num_blocks if exact else held + available <= num_blocks,
            rules.Q36, "{} blocks are held and {} can be had, of {}", held, available, num_blocks,
        )  # fmt: skip

    def check_output(self, request: Request, output: Sequence[int], reason: Reason | None) -> None:
        """Check the output of a request, and its reason if it has ended."""
        known = request.outputs[: request.num_output]
        require(
            output == known, rules.Q28, "{} has output {}, and not {}", request.name, output, known
        )
        wanted = request.reason if request.phase == "ended" else None
        require(
            reason == wanted,
            rules.Q28, "{} ended by {!r} and not {!r} with {} of {} tokens",
            request.name, reason, wanted, len(output), len(request.outputs),
        )  # fmt: skip
