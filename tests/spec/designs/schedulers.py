"""Small schedulers written after the designs of released ones, each with its own promises.

`ChunkWise` is written after vLLM: it allocates chunk by chunk, publishes blocks when it schedules
them, so that a second request of a step hits what the first one writes, and frees at once. It
bounds the chunks of a long prompt, so that a more important request can come later in the step and
preempt the first: then what that one published in the step is withdrawn.
`PrefillFirst` is written after nano-vllm: a step prefills or decodes, its size bounds a step and
not the requests that run, and of the copies of a block it finds the latest. It takes turns, because
without that a stream of prompts starves the requests that decode. `LateFrees` frees the blocks of a
step in flight, and reports them available, a step later.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from radixkv.spec.adapters.scheduler import Chunk, SchedulerPromises, Submission
from radixkv.spec.model.scheduler import Reason

Key = tuple[object, ...]


class Blocks:
    """Reference counts, a queue of free blocks that keep their content, and a map of keys."""

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(num_blocks))
        self.users = [0] * num_blocks
        self.key_of: dict[int, Key] = {}
        self.blocks_of: dict[Key, list[int]] = {}

    def take(self) -> int:
        block = self.free.pop(0)
        key = self.key_of.pop(block, None)
        if key is not None and block in self.blocks_of[key]:
            self.blocks_of[key].remove(block)
        self.users[block] = 1
        return block

    def share(self, block: int) -> int:
        if not self.users[block]:
            self.free.remove(block)
        self.users[block] += 1
        return block

    def give(self, table: list[int]) -> None:
        for block in reversed(table):
            self.users[block] -= 1
            if not self.users[block]:
                self.free.append(block)
        table.clear()

    def publish(self, key: Key, block: int, keeps_copies: bool) -> None:
        self.key_of[block] = key
        self.blocks_of[key] = [*(self.blocks_of.get(key, []) if keeps_copies else []), block]


class Work:
    """A request."""

    def __init__(self, request: Submission) -> None:
        self.request = request
        self.tokens = list(request.prompt)
        self.output: list[int] = []
        self.table: list[int] = []
        self.computed = self.hit = self.target = 0
        self.order: tuple[int, ...] = ()
        self.reason: Reason | None = None

    @property
    def prefilling(self) -> bool:
        return self.computed < self.target


class Toy:
    """What the toys have in common; each decides in `schedule`."""

    promises = SchedulerPromises()
    keeps_copies = True

    def __init__(self, config: dict[str, Any]) -> None:
        self.size: int = config["block_size"]
        self.budget: int = config["token_budget"]
        self.max_running: int = config["max_running"]
        self.shares: bool = config["prefix_cache"]
        self.has_priorities: bool = config["policy"] == "priority"
        self.num_blocks: int = config["num_blocks"]
        self.blocks = Blocks(config["num_blocks"])
        self.all: dict[str, Work] = {}
        self.queue: list[Work] = []
        self.runs: list[Work] = []
        self.chunks: list[tuple[Work, int, int]] = []

    # For the specification

    def add(self, request: Submission) -> bool:
        longest = len(request.prompt) + request.max_new_tokens - 1
        if -(-longest // self.size) > self.num_blocks:
            return False
        work = Work(request)
        work.order = (request.priority if self.has_priorities else 0, len(self.all))
        self.all[request.name] = work
        self.queue.append(work)
        return True

    def schedule(self) -> list[Chunk]:
        self.chunks = []
        self.decide()
        return [(work.request.name, start, length) for work, start, length in self.chunks]

    def update(self, tokens: Sequence[int]) -> list[str]:
        ended = []
        for (work, start, length), token in zip(self.chunks, tokens, strict=True):
            if work.reason is not None:
                self.after_abort(work)
                continue
            work.computed = start + length
            self.publish(work, work.computed)
            if work.computed < len(work.tokens):
                continue
            work.tokens.append(token)
            work.output.append(token)
            stops = token in work.request.stop
            if stops or len(work.output) == work.request.max_new_tokens:
                self.end(work, "stop" if stops else "length")
                ended.append(work.request.name)
        self.chunks = []
        return ended

    def abort(self, name: str) -> bool:
        work = self.all[name]
        if work.reason is not None:
            return False
        self.end(work, "abort")
        return True

    def running(self) -> list[str]:
        return [work.request.name for work in self.runs]

    def waiting(self) -> list[str]:
        return [work.request.name for work in self.queue]

    def num_computed(self, name: str) -> int:
        return self.all[name].computed

    def num_hit(self, name: str) -> int:
        return self.all[name].hit

    def block_table(self, name: str) -> list[int]:
        work = self.all[name]
        return [] if work.reason is not None else list(work.table)

    def output(self, name: str) -> list[int]:
        return self.all[name].output

    def reason(self, name: str) -> Reason | None:
        return self.all[name].reason

    def available(self) -> int:
        return len(self.blocks.free)

    # For the toys

    def decide(self) -> None:
        raise NotImplementedError

    def key(self, work: Work, end: int) -> Key:
        return (work.request.namespace, *work.tokens[:end])

    def publish(self, work: Work, num_tokens: int) -> None:
        """Publish whole blocks up to a token."""
        for index in range(num_tokens // self.size if self.shares else 0):
            if work.table[index] not in self.blocks.key_of:
                key = self.key(work, (index + 1) * self.size)
                self.blocks.publish(key, work.table[index], self.keeps_copies)

    def hits(self, work: Work) -> list[int]:
        """The cached blocks of a request, without the block of its last token."""
        found: list[int] = []
        for end in range(self.size, len(work.tokens), self.size):
            copies = self.blocks.blocks_of.get(self.key(work, end))
            if not copies:
                break
            found.append(copies[0])
        return found

    def start(self, work: Work, hits: Sequence[int]) -> None:
        work.table = [self.blocks.share(block) for block in hits]
        work.computed = work.hit = len(hits) * self.size
        work.target = len(work.tokens)
        self.queue.remove(work)
        self.runs.append(work)

    def short(self, work: Work, end: int) -> int:
        """Number of blocks that a request lacks up to a token."""
        return max(-(-end // self.size) - len(work.table), 0)

    def grow(self, work: Work, end: int) -> None:
        work.table += [self.blocks.take() for _ in range(self.short(work, end))]

    def preempt(self, work: Work) -> None:
        self.blocks.give(work.table)
        work.computed = work.target = 0
        self.runs.remove(work)
        self.queue.insert(0, work)

    def end(self, work: Work, reason: Reason) -> None:
        (self.runs if work in self.runs else self.queue).remove(work)
        work.reason = reason
        self.blocks.give(work.table)

    def after_abort(self, work: Work) -> None:
        """A step has ended in which a request was aborted."""


class ChunkWise(Toy):
    """After vLLM."""

    promises = SchedulerPromises(
        bounds_running=True, policy=True, preempts_when_short=True, hits=True, exact=True
    )

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.left = 0

    def add(self, request: Submission) -> bool:
        fits = super().add(request)
        self.queue.sort(key=lambda work: work.order)
        return fits

    def decide(self) -> None:
        self.left, preempted = self.budget, False
        for work in list(self.runs):
            length = self.length(work)
            if work not in self.runs or not length:
                continue
            while self.short(work, work.computed + length) > self.available():
                self.preempt(self.victim())
                preempted = True
                if work not in self.runs:
                    break
            else:
                self.plan(work, length)
        while self.queue and self.left and not preempted and len(self.runs) < self.max_running:
            work = self.queue[0]
            hits = self.hits(work)
            idle = sum(not self.blocks.users[block] for block in hits)
            if -(-len(work.tokens) // self.size) - len(hits) > self.available() - idle:
                return
            self.start(work, hits)
            self.plan(work, self.length(work))

    def length(self, work: Work) -> int:
        longest = 2 * self.size if len(self.runs) + len(self.queue) > 1 else self.budget
        return min(len(work.tokens) - work.computed, self.left, longest)

    def plan(self, work: Work, length: int) -> None:
        end = work.computed + length
        self.grow(work, end)
        self.publish(work, end)
        self.chunks.append((work, work.computed, length))
        self.left -= length

    def victim(self) -> Work:
        return max(self.runs, key=lambda work: work.order)

    def preempt(self, work: Work) -> None:
        for chunk in [chunk for chunk in self.chunks if chunk[0] is work]:
            self.chunks.remove(chunk)
            self.left += chunk[2]
            self.withdraw(work)
        super().preempt(work)
        self.queue.sort(key=lambda work: work.order)

    def withdraw(self, work: Work) -> None:
        """Take back what a step published that does not compute it."""
        for block in work.table[work.computed // self.size :]:
            if block in self.blocks.key_of:
                self.blocks.blocks_of[self.blocks.key_of.pop(block)].remove(block)


class LateFrees(ChunkWise):
    """After vLLM with steps that overlap: what a step in flight uses is freed after the step."""

    promises = SchedulerPromises(bounds_running=True, hits=True, keeps_in_flight=True)

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.late: list[list[int]] = []

    def end(self, work: Work, reason: Reason) -> None:
        if any(chunk[0] is work for chunk in self.chunks):
            self.late.append(work.table)
            work.table = []
        super().end(work, reason)

    def decide(self) -> None:
        for table in self.late:
            self.blocks.give(table)
        self.late = []
        super().decide()


class PrefillFirst(Toy):
    """After nano-vllm."""

    promises = SchedulerPromises(publish_on_compute=True, keeps_in_flight=True, exact=True)
    keeps_copies = False

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.prefilled = False

    def decide(self) -> None:
        decoding = any(not work.prefilling for work in self.runs)
        if not (self.prefilled and decoding):
            self.prefill()
        self.prefilled = bool(self.chunks)
        if not self.chunks:
            self.decode()

    def prefill(self) -> None:
        left = self.budget
        for work in [*self.runs, *self.queue]:
            if not left or len(self.chunks) == self.max_running:
                return
            if work in self.queue:
                hits = self.hits(work)
                idle = sum(not self.blocks.users[block] for block in hits)
                if -(-len(work.tokens) // self.size) - len(hits) > self.available() - idle:
                    return
                self.start(work, hits)
                self.grow(work, len(work.tokens))
            if work.prefilling:
                length = min(len(work.tokens) - work.computed, left)
                self.chunks.append((work, work.computed, length))
                left -= length

    def decode(self) -> None:
        for work in list(self.runs):
            if work not in self.runs or work.prefilling:
                continue
            if len(self.chunks) == min(self.max_running, self.budget):
                return
            while self.short(work, len(work.tokens)) > self.available():
                self.preempt(self.runs[-1])
                if work not in self.runs:
                    break
            else:
                self.grow(work, len(work.tokens))
                self.chunks.append((work, work.computed, 1))

    def end(self, work: Work, reason: Reason) -> None:
        if any(chunk[0] is work for chunk in self.chunks) and reason == "abort":
            (self.runs if work in self.runs else self.queue).remove(work)
            work.reason = reason
        else:
            super().end(work, reason)

    def after_abort(self, work: Work) -> None:
        self.blocks.give(work.table)


# The same with a bug


class PreemptsEarly(ChunkWise):
    """Keeps a block for nobody."""

    def short(self, work: Work, end: int) -> int:
        return super().short(work, end) + (end > work.target > 0 and len(self.runs) > 1)

    def grow(self, work: Work, end: int) -> None:
        work.table += [self.blocks.take() for _ in range(super().short(work, end))]


class PublishesAhead(ChunkWise):
    """Publishes a block that the step fills in part only."""

    def publish(self, work: Work, num_tokens: int) -> None:
        whole = -(-num_tokens // self.size) * self.size
        super().publish(work, whole if whole <= len(work.tokens) else num_tokens)


class KeepsWithdrawn(ChunkWise):
    """Leaves published what it does not compute: vLLM PR 43569."""

    def withdraw(self, work: Work) -> None:
        pass


class PreemptsFirst(ChunkWise):
    """Preempts the most important request."""

    def victim(self) -> Work:
        return min(self.runs, key=lambda work: work.order)


class ResumesFirst(ChunkWise):
    """Resumes a preempted request before more important new ones."""

    def preempt(self, work: Work) -> None:
        super().preempt(work)
        self.queue.remove(work)
        self.queue.insert(0, work)


class LeaksAborted(ChunkWise):
    """Does not free the blocks of a request that is aborted while it prefills."""

    def end(self, work: Work, reason: Reason) -> None:
        if reason == "abort" and work.prefilling:
            work.table = []
        super().end(work, reason)


class MissesIdle(ChunkWise):
    """Hits only what somebody uses."""

    def hits(self, work: Work) -> list[int]:
        return list(takewhile(lambda block: self.blocks.users[block], super().hits(work)))


class RunsTooMany(ChunkWise):
    """Admits a request beyond the limit."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.max_running += 1


class LeaksLate(LateFrees):
    """Forgets what was to be freed when nothing runs any more."""

    def decide(self) -> None:
        if not self.runs:
            self.late = []
        super().decide()


class KeepsKeys(PrefillFirst):
    """Leaves the key of a block that it hands out again."""

    def grow(self, work: Work, end: int) -> None:
        keys = {key: list(blocks) for key, blocks in self.blocks.blocks_of.items()}
        super().grow(work, end)
        self.blocks.blocks_of = keys


class PrefillsOnly(PrefillFirst):
    """Prefills as long as there is a prompt, as nano-vllm does."""

    def decide(self) -> None:
        self.prefilled = False
        super().decide()


class StepsTooLarge(PrefillFirst):
    """Decodes one request more than a step may have."""

    def decode(self) -> None:
        self.max_running += 1
        super().decode()
        self.max_running -= 1


DESIGNS = (ChunkWise, LateFrees, PrefillFirst)
BROKEN = {
    PreemptsEarly: "Q24",
    PublishesAhead: "Q22",
    PreemptsFirst: "Q26",
    ResumesFirst: "Q3",
    LeaksAborted: "Q36",
    MissesIdle: "Q11",
    RunsTooMany: "Q16",
    LeaksLate: "Q38",
    KeepsKeys: "Q22",
    PrefillsOnly: "Q31",
    StepsTooLarge: "Q16",
}
"""Each bug, with the rule that names it with seed 0."""
