"""Simulated prefill and decode nodes: real schedulers, and blocks that hold tags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ...kvcache import CacheManager, Int32Array, Lease
from ..decode import DecodeScheduler
from ..errors import HandoffsOpenError, StepOrderError
from ..plan import StepPlan
from ..prefill import PrefillScheduler
from .actions import Offer, Timing
from .messages import Key, Ticket
from .prefill_side import Order

VOCABULARY: Final = 50
TIMING: Final = Timing(retry_s=1, silence_s=5, transfer_s=12, remember_s=20)


class SimulationError(AssertionError):
    """The simulation has seen what must not happen."""


@dataclass(frozen=True)
class SimulationConfig:
    """Sizes of a simulation.

    Attributes:
        prefill_blocks, decode_blocks: of each node.
        block_size, num_groups: tokens of a block, groups of layers.
        budget, max_running: of each step of each node: tokens, requests.
        order: see `PrefillSide`.
        reserve_tokens: of the decode nodes; see `DecodeScheduler`.
        num_prefill, num_decode: how many nodes there are.
        max_attempts: of each request; see `FrontDesk`.
        timing: in ticks of the simulated clock.
    """

    prefill_blocks: int = 12
    decode_blocks: int = 12
    block_size: int = 2
    num_groups: int = 2
    budget: int = 5
    max_running: int = 4
    order: Order = "early"
    reserve_tokens: int | None = 0
    num_prefill: int = 1
    num_decode: int = 1
    max_attempts: int = 3
    timing: Timing = TIMING


def sample(seed: int, tokens: Int32Array) -> int:
    """Choose the token after some; it depends on the seed, its position and what is before."""
    return (seed * 31 + len(tokens) * 7 + int(tokens.sum())) % VOCABULARY


class GhostMemory:
    """What each block of a node holds: in each group of layers, the prefix written to it."""

    def __init__(self, num_groups: int, block_size: int) -> None:
        self.num_groups = num_groups
        self.block_size = block_size
        self.tags: dict[tuple[int, int], bytes] = {}

    def write(self, lease: Lease, tokens: Int32Array, start: int, group: int) -> None:
        """Write the KV of the tokens from start on; never into what is shared."""
        size, table = self.block_size, lease.block_table
        first = max(start // size, lease.num_shared_blocks)
        for place in range(first, -(-len(tokens) // size)):
            self.tags[int(table[place]), group] = tokens[: (place + 1) * size].tobytes()

    def read(self, lease: Lease, tokens: Int32Array, group: int, who: object) -> None:
        """Read the KV of all of some tokens.

        Raises:
            SimulationError: if any of it is not that of their own prefix.
        """
        size, table = self.block_size, lease.block_table
        for place in range(-(-len(tokens) // size)):
            tag = self.tags.get((int(table[place]), group), b"")
            if not tag.startswith(tokens[: (place + 1) * size].tobytes()):
                raise SimulationError(f"{who} reads wrong content in its block {place}")

    def compute(self, plan: StepPlan, group: int) -> None:
        """Compute one group of layers of a step."""
        for chunk in plan.chunks:
            request, stop = chunk.request, chunk.start + chunk.length
            assert request.lease is not None, f"{request!r} is computed without blocks"
            self.read(request.lease, request.tokens[: chunk.start], group, request)
            self.write(request.lease, request.tokens[:stop], chunk.start, group)


def sampled(plan: StepPlan) -> list[int]:
    """Choose the token after each chunk; the one after half a prompt must not be used."""
    return [
        sample(chunk.request.sampling.seed, chunk.request.tokens)
        if chunk.start + chunk.length == chunk.request.num_tokens
        else -1
        for chunk in plan.chunks
    ]


class PrefillNode:
    """P: computes prompts chunk by chunk, and serves what it has offered.

    Attributes:
        plan: of the step in flight, if there is one.
    """

    def __init__(self, config: SimulationConfig, epoch: int, now: int) -> None:
        self.manager = CacheManager(config.prefill_blocks, config.block_size)
        self.memory = GhostMemory(config.num_groups, config.block_size)
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
        self.withdrawn: list[Key] = []
        self._num_written = 0

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
            self.scheduler.update(plan, sampled(plan))

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
            raise SimulationError(f"{ticket} serves what was not offered")
        return tags

    def fence(self, key: Key) -> None:
        """Stop serving an attempt's offers, and say so."""
        self.withdrawn.remove(key)
        for ticket in [ticket for ticket in self.offers if ticket.key == key]:
            del self.offers[ticket]
        self.scheduler.fenced(key)


class DecodeNode:
    """D: decodes what has started, and computes again what it has preempted.

    Attributes:
        plan: of the step in flight, if there is one.
        preemptions: how often a request lost its blocks.
    """

    def __init__(self, config: SimulationConfig, epoch: int, now: int) -> None:
        self.manager = CacheManager(config.decode_blocks, config.block_size)
        self.memory = GhostMemory(config.num_groups, config.block_size)
        self.scheduler = DecodeScheduler(
            self.manager,
            epoch=epoch,
            timing=config.timing,
            token_budget=config.budget,
            max_running=min(config.max_running, config.budget),
            reserve_tokens=config.reserve_tokens,
        )
        self.scheduler.tick(now)
        self.plan: StepPlan | None = None
        self.preemptions = 0
        self._may_preempt = config.reserve_tokens is not None

    def step(self) -> None:
        """Plan a step, or compute it.

        Raises:
            SimulationError: if a request is preempted whose blocks were reserved to its end.
        """
        if self.plan is None:
            plan = self.scheduler.schedule()
            self.preemptions += len(plan.preempted)
            if plan.preempted and not self._may_preempt:
                raise SimulationError(f"{plan.preempted[0]!r} is preempted")
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
    node.memory.tags.clear()
    return True
