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
from typing import Literal, NamedTuple, TypeAlias

from ..rules import scheduler as rules
from ..rules.rule import require
from .ghost import GhostMemory, Tag, next_tag, tags_after

Phase: TypeAlias = Literal["waiting", "running", "preempted", "ended"]
Reason: TypeAlias = Literal["length", "stop", "abort"]


def root_tag(*parts: int) -> Tag:
    """Tag of the empty prefix; the hash of an int, unlike bytes, is the same in each process."""
    return hash((*parts, -1))


def next_token(tag: Tag, alphabet: int, seed: int = 0) -> int:
    """The deterministic language model: the token that follows a prefix."""
    return ((tag >> 11) + seed) % alphabet


class Request:
    """A request: its tokens, all that the language model will add to them, and its progress.

    Attributes:
        tokens: prompt and generated tokens; `tags` has the tag of each prefix, also of later ones.
        outputs, reason: the complete output of the language model, and why it ends; `sampled` is
            the same without regard to stop tokens.
        order: rank in the policy; the lowest comes first.
        computed: leading tokens with KV in the cache.
        target: number of tokens at the last admission, up to which the request prefills.
        scheduled: leading tokens that are computed, or that steps in flight compute.
        hit: cached tokens at the last admission, with those that copies brought once it begins.
        is_loading: whether it was admitted, and waits for copies into its blocks.
        overtaken: number of later requests that were admitted since it began to wait.
        first: the first sample of the same prompt, or None.
    """

    def __init__(
        self,
        name: str,
        prompt: Sequence[int],
        max_new_tokens: int,
        order: tuple[int, ...],
        root: Tag,
        alphabet: int,
        stop: Collection[int] = (),
        first: Request | None = None,
        seed: int = 0,
    ) -> None:
        self.name, self.order, self.first = name, order, first
        self.tokens = list(prompt)
        self.max_kv_tokens = len(self.tokens) + max_new_tokens - 1
        self.sampled: list[int] = []
        self.phase: Phase = "waiting"
        self.is_loading = self.has_begun = False
        self.num_output = self.num_preemptions = self.overtaken = 0
        self.computed = self.scheduled = self.target = self.hit = 0
        self.retag(root)
        while len(self.sampled) < max_new_tokens:
            self.sampled.append(next_token(self.tags[-1], alphabet, seed))
            self.tags.append(next_tag(self.tags[-1], self.sampled[-1]))
        stops = [end for end, token in enumerate(self.sampled, 1) if token in stop]
        self.outputs = self.sampled[: min(stops, default=max_new_tokens)]
        self.reason: Reason = "stop" if stops else "length"

    def retag(self, root: Tag) -> None:
        """Compute the tags of all prefixes anew, as if under the weights of another root."""
        self.tags = tags_after(root, (*self.tokens, *self.sampled[self.num_output :]))

    def __repr__(self) -> str:
        return self.name

    @property
    def prefilling(self) -> bool:
        """Whether tokens from before the admission are not computed yet."""
        return self.computed < self.target

    @property
    def num_known(self) -> int:
        """Number of tokens, with those that steps in flight sample: one after each scheduled."""
        return max(len(self.tokens), self.scheduled + 1)

    @property
    def can_go_on(self) -> bool:
        """Whether the next step can compute a token, even if its last one is not read yet."""
        return self.scheduled < self.max_kv_tokens

    def next_sampled(self, end: int) -> int:
        """Token that the language model adds after `end` tokens, even after a stop."""
        return self.sampled[end - (len(self.tokens) - self.num_output)]

    @property
    def is_live(self) -> bool:
        """Whether the request has not ended."""
        return self.phase != "ended"

    @property
    def is_resumed(self) -> bool:
        """Whether the request was preempted before."""
        return self.num_preemptions > 0

    def shared_blocks(self, block_size: int) -> int:
        """Number of leading blocks that were hit or loaded, or computed and thus published."""
        return max(self.hit, self.computed) // block_size

    def suspend(self) -> None:
        """Take the blocks away; the request computes again what the cache loses."""
        self.phase = "preempted"
        self.num_preemptions += 1
        self.computed = self.scheduled = self.target = self.hit = 0
        self.is_loading = False


class BlockCopy(NamedTuple):
    """A block that a step copies before it computes: of request `owner`, for request `name`."""

    name: str
    owner: str
    source: int
    destination: int


@dataclass(frozen=True)
class Limits:
    """Sizes and options of a scheduler.

    Attributes:
        promised: names of its promises, see `SchedulerPromises`.
        is_decode_node: whether prefill nodes compute the prompts, and hand them over.
        host_blocks: size of the host tier; without tiers, 0.
        max_overtaken: bound of Q6, or None.
    """

    num_blocks: int
    block_size: int
    token_budget: int
    max_running: int
    reserve_tokens: int | None
    prefix_cache: bool
    promised: Collection[str]
    is_decode_node: bool = False
    host_blocks: int = 0
    max_overtaken: int | None = None


@dataclass(slots=True)
class Step:
    """What the scheduler decided in a step.

    Attributes:
        chunks: requests to compute, with start and length.
        running: running requests, in order of admission, and their `tables` of blocks.
        admitted, preempted: requests that changed state.
        hits: cached tokens of each admitted request, with those that `copies` bring.
        copies: blocks that are copied when the step begins on the device, by the request that gets
            the copy.
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
    copies: Mapping[str, BlockCopy] = field(default_factory=dict)
    num_copies: int = 0
    awaited: Collection[str] = ()
    loading: Collection[str] = ()
    unasked: Collection[str] = ()
    growth: int = 0
    unbegun: Sequence[Request] = ()

    @property
    def planned(self) -> list[Request]:
        """The requests of the chunks."""
        return [request for request, _, _ in self.chunks]

    @property
    def readers(self) -> set[str]:
        """Names of the requests whose blocks it reads, writes or copies."""
        owners = {copy.owner for copy in self.copies.values()}
        return owners.union(request.name for request in self.planned)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all chunks."""
        return sum(length for _, _, length in self.chunks)


class SchedulerModel:
    """The requests of a scheduler, the contents of its blocks, and the moves that are allowed.

    Attributes:
        live: requests that have not ended, by name.
        running: requests that hold blocks, in order of admission, and their `tables`; `before` has
            the tables before the last decision.
        receiving: requests that a decode node was handed, and their tables; not all of their KV has
            arrived.
        published: block of each prefix, by the tag of its last token, that the cache holds for
            certain.
        flights: steps in flight, in order: they are decided, and not completed.
        situations: how often each situation of interest occurred.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits, self.promised = limits, limits.promised
        self.device = GhostMemory(limits.block_size)
        self.live: dict[str, Request] = {}
        self.running: list[Request] = []
        self.tables: dict[str, list[int]] = {}
        self.before: dict[str, list[int]] = {}
        self.receiving: dict[str, list[int]] = {}
        self.published: dict[Tag, int] = {}
        self.flights: list[Step] = []
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
        resumed_first = "resumed_first" in self.promised
        return sorted(queued, key=lambda each: (resumed_first and not each.is_resumed, each.order))

    def lack(self, request: Request, num_tokens: int) -> int:
        """Number of blocks that a running request lacks for its first `num_tokens` tokens."""
        return max(self.blocks_for(num_tokens) - len(self.tables[request.name]), 0)

    def growth(self) -> int:
        """Number of blocks that the running requests may need for the next step, at most."""
        ends = [(each, each.computed + self.limits.token_budget) for each in self.running]
        return sum(self.lack(each, min(end, len(each.tokens))) for each, end in ends)

    # Requests come, and are given up

    def submit(self, request: Request, accepted: bool) -> None:
        """Queue a request; it is refused if and only if it can never fit."""
        needed, there = self.blocks_for(request.max_kv_tokens), self.limits.num_blocks
        why = "{} needs {} blocks of {}, accepted: {}"
        require(accepted == (needed <= there), rules.Q1, why, request, needed, there, accepted)
        if accepted:
            self.live[request.name] = request
        else:
            request.phase = "ended"
            self.situations["too large"] += 1

    def end(self, request: Request) -> None:
        """End a request in any state."""
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
        request.computed = request.scheduled = len(request.tokens)
        self.running = [*self.running, request]
        self.receiving.pop(request.name, None)
        self.tables[request.name] = list(table)
        self.reuse(table[num_cached // self.limits.block_size :])
        for position in range(num_cached, request.computed):
            self.device.append(table, position, request.tags[position])
        self.read(request, table, request.computed, "when it was received")
        self.publish(request, table)
        return self._extend(request)

    def _extend(self, request: Request) -> bool:
        """Append the token that follows; return whether the request ends with it."""
        request.tokens.append(request.outputs[request.num_output])
        request.num_output += 1
        if request.num_output == len(request.outputs):
            self.situations[f"ended by {request.reason}"] += 1
            self.end(request)
        return not request.is_live

    def abort(self, request: Request, freed: int) -> None:
        """Abort a request, perhaps in a step in flight; `freed` blocks became available."""
        if any(request.name in step.readers for step in self.flights):
            self.situations["aborted in flight"] += 1
            can_free = not freed or "keeps_in_flight" not in self.promised
            require(can_free, rules.Q23, "{} is in flight, and frees {} blocks", request, freed)
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
            kept = not self.flights or "keeps_in_flight" not in self.promised
            require(kept, rules.Q23, "{} is preempted while steps are in flight", request)
            request.suspend()
        for request in step.admitted:
            request.phase = "running"
            request.hit, request.target = step.hits[request.name], len(request.tokens)
            request.is_loading = True
        self.before = {request.name: self.tables[request.name] for request in self.running}
        self.running, self.tables = step.running, dict(step.tables)
        for name, computed in step.begun.items():
            request = self.live[name]
            request.hit, request.computed = step.arrived.get(name, request.hit), computed
            request.scheduled = computed
            request.is_loading, request.has_begun = False, True
        self._check(step)
        for request in step.admitted if "publish_on_compute" in self.promised else ():
            is_copied = request.name in step.copies  # in part, and not yet
            end = request.hit - request.hit % self.limits.block_size * is_copied
            self.read(request, step.tables[request.name], end, "at its admission")

    def _check(self, step: Step) -> None:
        """Check the rules of every scheduler for a decision."""
        limits, live, num_chunks = self.limits, self.live, len(step.chunks)
        may_wait = bool(num_chunks or step.num_copies or self.flights)
        is_due = bool(num_chunks) <= bool(live) <= may_wait
        require(is_due, rules.Q14, "{} chunks for {} live requests", num_chunks, len(live))
        most, num_tokens = limits.token_budget, step.num_tokens
        require(num_tokens <= most, rules.Q15, "{} tokens are planned, of {}", num_tokens, most)
        bounded = step.running if "bounds_running" in self.promised else step.chunks
        may_run = len(bounded) <= limits.max_running
        require(may_run, rules.Q16, "{} run, and {} may", len(bounded), limits.max_running)
        for name, computed in step.begun.items():
            request, last = live[name], len(live[name].tokens) - 1
            is_right = computed == min(request.hit, last)
            is_whole = step.hits.get(name, 0) % limits.block_size == 0
            is_right = is_right and (is_whole or name in step.copies)
            why = "{} starts at {} of {} tokens after a hit of {}"
            require(is_right, rules.Q10, why, name, computed, last + 1, request.hit)
        planned = step.planned
        require(len(set(planned)) == num_chunks, rules.Q19, "one of {} has two chunks", planned)
        for request, start, length in step.chunks:
            known, end = request.num_known, start + length
            is_running = request.phase == "running"
            require(is_running, rules.Q2, "{} is computed while {}", request, request.phase)
            is_ready = start == request.scheduled and not request.is_loading
            is_ready = is_ready and start < end <= min(known, request.max_kv_tokens)
            why = "{} has {} of {} tokens scheduled, and a chunk from {} to {}"
            require(is_ready, rules.Q19, why, request, request.scheduled, known, start, end)
            table = self.tables[request.name]
            is_held = len(table) >= self.blocks_for(end) and len(set(table)) == len(table)
            require(is_held, rules.Q20, "{} writes up to token {} with {}", request, end, table)

    def launch(self, step: Step) -> None:
        """Put a step in flight: the device computes it later, after those before it."""
        self.flights.append(step)
        for request, start, length in step.chunks:
            request.scheduled = start + length

    def compute(self, step: Step) -> None:
        """Compute the chunks on the device: each reads the KV before it, and writes its own.

        All chunks read before any writes, if hits name only blocks of earlier steps. Otherwise
        each layer writes the KV of the whole step before it reads. Copies come first of all.
        """
        for copy in step.copies.values():
            self.device.blocks[copy.destination] = list(self.device.content(copy.source))
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
        is_held = len(table) * self.limits.block_size >= end
        require(is_held, rules.Q20, "{} reads {} tokens through {}, {}", request, end, table, when)
        self.device.read_sequence(table, request.tags[:end], f"{request} {when}", rules.Q22)

    def complete(self, step: Step, ended: Sequence[str]) -> None:
        """Append the sampled tokens and publish; `ended` are the requests that end with theirs."""
        expected = []
        self.flights.remove(step)
        for request, start, length in step.chunks:
            if not request.is_live:  # its token is discarded: it ended while the step was in flight
                self.situations["token discarded"] += request.reason == "stop"
                continue
            request.computed = start + length
            self.publish(request, step.tables[request.name])
            if request.computed == len(request.tokens) and self._extend(request):
                expected.append(request.name)
        is_right = sorted(ended) == sorted(expected)
        require(is_right, rules.Q28, "{} ended in this step, and not {}", ended, expected)

    def publish(self, request: Request, table: Sequence[int]) -> None:
        """Remember the block of each computed prefix; the first copy of a prefix is kept."""
        size = self.limits.block_size
        for index in range(request.computed // size):
            tag, block = request.tags[(index + 1) * size - 1], table[index]
            if self.published.get(tag) != block:
                self.reuse([block])
                self.published.setdefault(tag, block)

    def reuse(self, blocks: Sequence[int]) -> None:
        """Forget the prefixes of blocks that were given to a request anew."""
        for tag in [tag for tag, block in self.published.items() if block in blocks]:
            del self.published[tag]

    def reset(self, roots: Mapping[str, Tag]) -> None:
        """Forget all KV and preempt all: each live request goes on under the weights of a root."""
        for request in self.running:
            request.suspend()
        self.running = []
        self.published.clear()
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
        kept: Mapping[str, Sequence[int]],
        is_busy: bool = False,
    ) -> None:
        """Check the state that the scheduler shows between two calls.

        Args:
            running, waiting: names of the requests with and without blocks, in order.
            tables, computed: blocks and computed tokens of the running ones.
            available: number of blocks that are free or can be evicted.
            kept: blocks of requests that ended while steps in flight compute them.
            is_busy: whether copies are in flight, which may hold blocks too.
        """
        known = [request.name for request in self.running]
        require(running == known, rules.Q2, "{} run, and not {}", running, known)
        queued = [request.name for request in self.waiting()]
        require(sorted(waiting) == sorted(queued), rules.Q2, "{} wait, not {}", waiting, queued)
        in_order = list(waiting) == queued or "policy" not in self.promised
        require(in_order, rules.Q3, "they wait in the order {}, and not {}", waiting, queued)
        for request in self.running:
            found, table = computed[request.name], tables[request.name]
            why = "{} says that {} tokens are computed, not {}"
            require(found == request.computed, rules.Q19, why, request, found, request.computed)
            self.tables[request.name] = list(table)
            is_copied = any(request.name in step.copies for step in self.flights)  # not yet
            end = found - found % self.limits.block_size * is_copied
            self.read(request, table, end, "between two steps")
            self.publish(request, table)
        held = self.held().union(*kept.values())
        if "keeps_in_flight" in self.promised:
            read = (step.tables[each.name] for step in self.flights for each in step.planned)
            copies = (copy for step in self.flights for copy in step.copies.values())
            named = held.union(*read, (copy.source for copy in copies))
            num_kept = self.limits.num_blocks - available
            why = "{} blocks are held or read by steps in flight, and {} are not available"
            require(len(named) <= num_kept, rules.Q23, why, len(named), num_kept)
        lost = self.limits.num_blocks - len(held) - available
        is_exact = "exact" in self.promised and not is_busy and not self.flights
        is_right = lost == 0 if is_exact else lost >= 0
        require(is_right, rules.Q36, "{} blocks are neither held nor can be had", lost)

    def check_output(self, request: Request, output: Sequence[int], reason: Reason | None) -> None:
        """Check the output of a request, and its reason if it has ended."""
        known = request.outputs[: request.num_output]
        require(output == known, rules.Q28, "{} has output {}, and not {}", request, output, known)
        wanted = None if request.is_live else request.reason
        require(reason == wanted, rules.Q28, "{} ended by {}, not {}", request, reason, wanted)
