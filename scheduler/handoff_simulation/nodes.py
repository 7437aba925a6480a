"""Simulated prefill and decode nodes: real schedulers, and blocks that hold tags."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar, Final

from ...kvcache import (
    CacheManager,
    HostConfig,
    Int32Array,
)
from ..decode import DecodeScheduler
from ..errors import HandoffsOpenError, StepOrderError
from ..handoff.actions import Offer, Timing
from ..handoff.gateway_messages import NodeStatus, Role
from ..handoff.messages import (
    Abort,
    AttemptKey,
    Commit,
    Grant,
    Ticket,
)
from ..handoff.node_reporter import NodeReporter
from ..handoff.prefill_side import Order
from ..prefill import PrefillScheduler
from ..request import Request
from ..step_plan import StepPlan
from .ghost import GhostCopies, GhostMemory
from .invariants import (
    COUNTED_ONCE,
    NO_EVICT,
    OFFERS_STAY,
    SENT_ONCE,
    SimulationError,
)

VOCABULARY: Final = 50
TIMING: Final = Timing(retry_s=1, silence_s=5, transfer_s=12, remember_s=20)


@dataclass(frozen=True)
class SimulationConfig:
    """Sizes of a simulation.

    Attributes:
        prefill_blocks, decode_blocks: of each node.
        host_blocks: of the tier below each; 0: there is none.
        block_size, num_groups: tokens of a block, groups of layers.
        budget, max_running: of each step of each node: tokens, requests.
        order: see `PrefillSide`.
        reserve_tokens: of the decode nodes; see `DecodeScheduler`.
        num_prefill, num_decode: how many nodes there are.
        max_attempts, request_s: of each request; see `RequestRetrier`. With a long request_s, an
            abandoned request does not end.
        timing: in ticks of the simulated clock.
    """

    prefill_blocks: int = 12
    decode_blocks: int = 12
    host_blocks: int = 0
    block_size: int = 2
    num_groups: int = 2
    budget: int = 5
    max_running: int = 4
    order: Order = "early"
    reserve_tokens: int | None = 0
    num_prefill: int = 1
    num_decode: int = 1
    max_attempts: int = 3
    request_s: int = 5000
    timing: Timing = TIMING


def sample(seed: int, tokens: Int32Array) -> int:
    """Choose the token after some; it depends on the seed, its position and what is before."""
    return (seed * 31 + len(tokens) * 7 + int(tokens.sum())) % VOCABULARY


def sampled(plan: StepPlan) -> list[int]:
    """Choose the token after each chunk; the one after half a prompt must not be used."""
    return [
        sample(chunk.request.sampling.seed, chunk.request.tokens)
        if chunk.start + chunk.length == chunk.request.num_tokens
        else -1
        for chunk in plan.chunks
    ]


class _Life:
    """What nodes of both roles have: a manager, what is in its blocks, a link to the gateway."""

    role: ClassVar[Role]

    def __init__(self, config: SimulationConfig, num_blocks: int, epoch: int) -> None:
        self.epoch = epoch
        self.reporter = NodeReporter(epoch, config.timing)
        self.status = NodeStatus(
            self.role, "", "simulated", config.block_size, num_blocks, "simulated"
        )
        host = HostConfig(config.host_blocks) if config.host_blocks else None
        self.manager = CacheManager(num_blocks, config.block_size, host=host)
        self.memory = GhostMemory(config.num_groups, config.block_size)
        self.copies = GhostCopies(self.manager, self.memory)


class PrefillNode(_Life):
    """P: computes prompts chunk by chunk, and serves what it has offered.

    Attributes:
        plan: of the step in flight, if there is one.
    """

    role = "prefill"

    def __init__(self, config: SimulationConfig, epoch: int, now: int) -> None:
        super().__init__(config, config.prefill_blocks, epoch)
        self.scheduler = PrefillScheduler(
            self.manager,
            epoch=epoch,
            timing=config.timing,
            token_budget=config.budget,
            max_running=min(config.max_running, config.budget),
            order=config.order,
            num_groups=config.num_groups,
        )
        self.scheduler.tick(now)
        self.plan: StepPlan | None = None
        self.offers: dict[Ticket, tuple[list[tuple[int, int]], list[bytes]]] = {}
        self.withdrawn: list[AttemptKey] = []
        self._num_written = 0
        self._computed: Counter[Request] = Counter()
        self._counted: dict[str, int] = {}

    def step(self) -> None:
        """Plan a step, or go on with it: one group of layers."""
        if self.plan is None:
            plan = self.scheduler.schedule()
            self.plan = plan if plan.chunks else None
            self._num_written = 0
            return
        plan = self.plan
        self.memory.compute(plan, self._num_written)
        self._num_written += 1
        if self._num_written < self.memory.num_groups:
            self.scheduler.wrote(plan, self._num_written - 1)
        else:
            self.plan = None
            for chunk in plan.chunks:
                self._computed[chunk.request] += chunk.length
            for request in self.scheduler.update(plan, sampled(plan)):
                self._counted[request.request_id] = self._computed.pop(request)

    def check_hits(self, commit: Commit) -> None:
        """Compare what P says that it had with what it computed.

        Raises:
            SimulationError: if that is not the prompt.
        """
        hits, computed = commit.hits, self._counted[commit.header.key.request_id]
        if hits.device + hits.host + hits.storage + computed != commit.position:
            what = f"{hits} and {computed} computed of {commit.position}"
            raise SimulationError(COUNTED_ONCE, what)

    def offer(self, offer: Offer) -> None:
        """Serve some blocks, in one group of layers, from now on."""
        places = [(block, offer.group) for block in offer.blocks]
        tags = [self.memory.tags.get(place, b"") for place in places]
        self.offers[offer.ticket] = places, tags

    def serve(self, ticket: Ticket) -> list[bytes] | None:
        """Return what is in the blocks of an offer; None if there is no such offer.

        Raises:
            SimulationError: if it is not what was offered: the blocks belong to others now.
        """
        if ticket not in self.offers:
            return None
        places, offered = self.offers[ticket]
        tags = [self.memory.tags.get(place, b"") for place in places]
        if tags != offered:
            raise SimulationError(OFFERS_STAY, f"{ticket} serves other KV")
        return tags

    def fence(self, key: AttemptKey) -> None:
        """Stop serving an attempt's offers, and say so."""
        self.withdrawn.remove(key)
        for ticket in [ticket for ticket in self.offers if ticket.key == key]:
            del self.offers[ticket]
        self.scheduler.fenced(key)


class DecodeNode(_Life):
    """D: decodes what has started, and computes again what it has preempted.

    Attributes:
        plan: of the step in flight, if there is one.
        preemptions: how often a request lost its blocks.
    """

    role = "decode"

    def __init__(self, config: SimulationConfig, epoch: int, now: int) -> None:
        super().__init__(config, config.decode_blocks, epoch)
        self.scheduler = DecodeScheduler(
            self.manager,
            epoch=epoch,
            timing=config.timing,
            token_budget=config.budget,
            max_running=min(config.max_running, config.budget),
            reserve_tokens=config.reserve_tokens,
            preempt="host" if config.host_blocks else "recompute",
            vocab_size=VOCABULARY,
        )
        self.scheduler.tick(now)
        self.plan: StepPlan | None = None
        self.preemptions = 0
        self._may_preempt = config.reserve_tokens is not None
        self._on_the_way: dict[AttemptKey, tuple[Grant, Int32Array]] = {}

    def granted(self, grant: Grant, prompt: Int32Array) -> None:
        """Take in that the rest of a prompt is on its way.

        Raises:
            SimulationError: if a block of the same prefix is, for another.
        """
        for other, tokens in self._on_the_way.values():
            if other.header.key == grant.header.key:
                continue
            first, size = max(grant.first_block, other.first_block), self.manager.block_size
            half = -(-max(len(prompt), len(tokens)) // (2 * size))
            stop = size * max(first + 1, half)
            if min(len(prompt), len(tokens)) >= stop and (prompt[:stop] == tokens[:stop]).all():
                raise SimulationError(SENT_ONCE, f"block {first} for {other} and {grant}")
        self._on_the_way[grant.header.key] = grant, prompt

    def started(self, key: AttemptKey) -> None:
        """Take in that a prompt has arrived."""
        self._on_the_way.pop(key, None)

    def gave_up(self, abort: Abort) -> None:
        """Take in that a prompt is not waited for any more, if it is about that grant."""
        other, _ = self._on_the_way.get(abort.header.key, (None, None))
        if other is not None and other.header.grant == abort.header.grant:
            del self._on_the_way[abort.header.key]

    def step(self) -> None:
        """Plan a step, or compute it.

        Raises:
            SimulationError: if a request is preempted whose blocks were reserved to its end.
        """
        if self.plan is None:
            plan = self.scheduler.schedule()
            self.preemptions += len(plan.preempted)
            if plan.preempted and not self._may_preempt:
                raise SimulationError(NO_EVICT, f"{plan.preempted[0]!r} is preempted")
            self.plan = plan if plan.chunks else None
            return
        plan, self.plan = self.plan, None
        for group in range(self.memory.num_groups):
            self.memory.compute(plan, group)
        self.scheduler.update(plan, sampled(plan))


Node = PrefillNode | DecodeNode


def try_reset(node: Node) -> bool:
    """Forget all KV if no hand-off is open; the blocks hold nothing from then on."""
    try:
        node.scheduler.reset_cache()
    except (HandoffsOpenError, StepOrderError):
        return False
    node.copies.forget()
    return True
