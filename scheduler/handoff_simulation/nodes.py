"""Simulated prefill and decode nodes: real schedulers over ghost memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar, Final

from ...kvcache import CacheManager, HostConfig, Int32Array
from ..decode import DecodeScheduler
from ..errors import HandoffsOpenError, StepOrderError
from ..gateway.node_reporter import NodeReporter
from ..handoff.actions import Offer, Timing
from ..handoff.gateway_messages import NodeStatus, Role
from ..handoff.messages import Abort, AttemptKey, Commit, Grant, PartId
from ..handoff.prefill_side import Order
from ..prefill import PrefillScheduler
from ..request import Request
from ..step_plan import StepPlan
from .ghost import GhostCopies, GhostMemory
from .invariants import COUNTED_ONCE, NO_EVICT, OFFERS_STAY, SENT_ONCE, SimulationError

VOCABULARY: Final = 50
TIMING: Final = Timing(retry_s=1, silence_s=5, transfer_s=12, remember_s=20)


@dataclass(frozen=True)
class SimulationConfig:
    """Sizes of a simulation.

    Attributes:
        prefill_blocks, decode_blocks: device blocks of each node.
        host_blocks: blocks of each node's host tier; 0: no host tier.
        block_size: tokens per block.
        num_groups: number of layer groups.
        budget, max_running: most tokens and requests of a step.
        order: of `PrefillSide`.
        reserve_tokens: of `DecodeScheduler`.
        num_prefill, num_decode: number of nodes.
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
    """Choose the next token; it depends on the seed, the position and all earlier tokens."""
    return (seed * 31 + len(tokens) * 7 + int(tokens.sum())) % VOCABULARY


def sampled(plan: StepPlan) -> list[int]:
    """Choose the token after each chunk; -1 after part of a prompt, which must not be used."""
    return [
        sample(chunk.request.sampling.seed, chunk.request.tokens)
        if chunk.start + chunk.length == chunk.request.num_tokens
        else -1
        for chunk in plan.chunks
    ]


class _SimulatedNode:
    """Parts that nodes of both roles have: manager, ghost memory, copies and reporter."""

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


class PrefillNode(_SimulatedNode):
    """P: computes prompts chunk by chunk, and serves its offers.

    Attributes:
        plan: of the step in flight.
        offers: blocks of each part on offer, and their contents at that time.
        withdrawn: attempts whose offers are still served and wait for the fence.
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
        self.offers: dict[PartId, tuple[list[tuple[int, int]], list[bytes]]] = {}
        self.withdrawn: list[AttemptKey] = []
        self._num_written = 0
        self._computed: Counter[Request] = Counter()
        self._counted: dict[str, int] = {}

    def step(self) -> None:
        """Plan a step, or compute the next group of layers of the planned one."""
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
        """Check that P's hits and computed tokens add up to the prompt.

        Raises:
            SimulationError: if they do not.
        """
        hits, computed = commit.hits, self._counted[commit.header.key.request_id]
        if hits.device + hits.host + hits.storage + computed != commit.position:
            what = f"{hits} and {computed} computed of {commit.position}"
            raise SimulationError(COUNTED_ONCE, what)

    def offer(self, offer: Offer) -> None:
        """Serve an offer from now on."""
        places = [(block, offer.group) for block in offer.blocks]
        tags = [self.memory.tags.get(place, b"") for place in places]
        self.offers[offer.part_id] = places, tags

    def serve(self, part_id: PartId) -> list[bytes] | None:
        """Return the contents of an offer's blocks; None if there is no such offer.

        Raises:
            SimulationError: if the contents have changed: the blocks were recycled.
        """
        if part_id not in self.offers:
            return None
        places, offered = self.offers[part_id]
        tags = [self.memory.tags.get(place, b"") for place in places]
        if tags != offered:
            raise SimulationError(OFFERS_STAY, f"{part_id} serves other KV")
        return tags

    def fence(self, key: AttemptKey) -> None:
        """Stop serving an attempt's offers, and report it."""
        self.withdrawn.remove(key)
        for part_id in [part_id for part_id in self.offers if part_id.key == key]:
            del self.offers[part_id]
        self.scheduler.fenced(key)


class DecodeNode(_SimulatedNode):
    """D: decodes started requests, and recomputes preempted ones.

    Attributes:
        plan: of the step in flight.
        preemptions: number of preemptions.
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
        self._granted: dict[AttemptKey, tuple[Grant, Int32Array]] = {}

    def granted(self, grant: Grant, prompt: Int32Array) -> None:
        """Record a grant, for which blocks are now in flight.

        Raises:
            SimulationError: if a block of the same prefix is in flight for another attempt.
        """
        for other, tokens in self._granted.values():
            if other.header.key == grant.header.key:
                continue
            first, size = max(grant.first_block, other.first_block), self.manager.block_size
            half = -(-max(len(prompt), len(tokens)) // (2 * size))
            stop = size * max(first + 1, half)
            if min(len(prompt), len(tokens)) >= stop and (prompt[:stop] == tokens[:stop]).all():
                raise SimulationError(SENT_ONCE, f"block {first} for {other} and {grant}")
        self._granted[grant.header.key] = grant, prompt

    def started(self, key: AttemptKey) -> None:
        """Record that a prompt has arrived."""
        self._granted.pop(key, None)

    def gave_up(self, abort: Abort) -> None:
        """Record that a grant was given up."""
        other, _ = self._granted.get(abort.header.key, (None, None))
        if other is not None and other.header.grant == abort.header.grant:
            del self._granted[abort.header.key]

    def step(self) -> None:
        """Plan a step, or compute it.

        Raises:
            SimulationError: if it preempts a request whose blocks were reserved to its end.
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
    """Reset a node's cache and its memory if no hand-off is open; return whether it was done."""
    try:
        node.scheduler.reset_cache()
    except (HandoffsOpenError, StepOrderError):
        return False
    node.copies.forget()
    return True
