"""Preemption: which requests lose their blocks when blocks run out, and where their KV goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal, TypeAlias, get_args

import numpy as np

from ...kvcache import CacheManager, OutOfBlocksError
from ...kvcache.prefix.lease import count_held
from ..errors import ConfigError
from ..request import Request, lease_of
from ..step_plan import NO_ROWS, DecodeRows, SchedulerStats, StepPlan
from .leases import Leases
from .queues import RequestQueues
from .transfers import RequestTransfers

PreemptMode: TypeAlias = Literal["recompute", "host", "storage"]
"""What happens to the KV of a preempted request: it is dropped, or parked in a tier."""

PREEMPT_MODES: Final = get_args(PreemptMode)


def check_preempt_mode(mode: PreemptMode, manager: CacheManager, prefix_cache: bool) -> None:
    """Check that a manager has the tier in which preempted requests are parked.

    Raises:
        ConfigError: for an unknown mode, a missing tier, or a prefix cache that is off.
    """
    if mode not in PREEMPT_MODES:
        raise ConfigError(f"preempt must be one of {PREEMPT_MODES}, got {mode!r}")
    if mode == "recompute":
        return
    tiers = manager.tiers
    if tiers is None or (mode == "storage" and tiers.storage is None):
        raise ConfigError(f"preempt={mode!r} needs a {mode} tier")
    if not prefix_cache:
        raise ConfigError(f"preempt={mode!r} keeps KV in the prefix cache, which is off")


class Preemption:
    """Reserves the next token of decoding requests, and preempts when blocks run out.

    The victim is the running request that comes last in the policy's order. It gives up its blocks
    and is resumed later. Its KV is parked in a tier, or recomputed as far as the cache has lost it.
    """

    def __init__(
        self,
        manager: CacheManager,
        queues: RequestQueues,
        leases: Leases,
        transfers: RequestTransfers | None,
        others: Callable[[], Sequence[Request]],
        mode: PreemptMode,
        stats: SchedulerStats,
    ) -> None:
        self._manager = manager
        self._queues = queues
        self._leases = leases
        self._transfers = transfers
        self._others = others  # requests that hold blocks and are in no queue
        self._mode = mode
        self._stats = stats

    def extend_decoding(self, plan: StepPlan, *, is_ahead: bool) -> DecodeRows:
        """Extend the lease of every decoding request by a token.

        While blocks are short, requests are preempted, or wait if copies will free enough blocks.

        Args:
            plan: the plan, to which preempted requests are added.
            is_ahead: whether steps are in flight. Their blocks are not given up.

        Returns:
            The requests that decode in this step.

        Raises:
            OutOfBlocksError: if blocks are short while steps are in flight.
        """
        held_back = set[Request]()
        while True:
            # The last token of a request may be that of a step in flight.
            decoding = [
                request
                for request in self._queues.running
                if request.num_prefill_tokens <= request.num_scheduled < request.max_kv_tokens
            ]
            if held_back:
                decoding = [request for request in decoding if request not in held_back]
            if not decoding:
                return NO_ROWS
            rows = np.array([r.lease.row for r in decoding if r.lease is not None], np.int32)
            assert len(rows) == len(decoding), "a request decodes without a lease"
            try:
                self._manager.extend_batch(rows)
                return DecodeRows(decoding, self._manager.tables.num_tokens[rows] - 1, rows)
            except OutOfBlocksError as short:
                if is_ahead:
                    raise
                if self._transfers is None or not self.copies_will_free(short.needed):
                    self.preempt(plan)
                else:
                    held_back = self._last_to_grow(decoding, short.needed - short.available)

    def copies_will_free(self, needed: int) -> bool:
        """Tell whether enough blocks are available once all copies have ended.

        A block that no request holds is available, or becomes so with the end of a copy: of a
        parked request's KV, or into the blocks of an aborted one.
        """
        held = count_held(map(lease_of, (*self._queues.running, *self._others())))
        return needed <= self._manager.num_blocks - held

    def _last_to_grow(self, decoding: Sequence[Request], count: int) -> set[Request]:
        """Return the last requests, in the policy's order, that need a block for their token."""
        block_size = self._manager.block_size
        growing = [request for request in decoding if request.num_computed % block_size == 0]
        growing.sort(key=self._queues.policy.order)
        self._stats.waits_for_blocks += count
        return set(growing[-count:])

    def preempt(self, plan: StepPlan) -> None:
        """Preempt the running request that comes last in the policy's order."""
        running = self._queues.running
        victim = max(running, key=self._queues.policy.order)
        assert len(running) > 1, f"{victim!r} does not fit alone"
        if self._transfers is not None:
            self._park(victim, self._transfers)
        self.suspend(victim)
        plan.preempted.append(victim)

    def _park(self, victim: Request, transfers: RequestTransfers) -> None:
        """Park the KV of a victim if the mode says so and the tier has room.

        A parked request has no lease any more: its blocks are released when the copy is done.
        """
        transfers.drop_prefetch(victim)
        if self._mode == "recompute" or victim.num_computed == 0:
            return
        computed = victim.tokens[: victim.num_computed]
        victim.parked = transfers.tiers.park(lease_of(victim), computed, self._mode)
        if victim.parked is not None:
            victim.lease = None
            self._stats.parked += 1

    def suspend(self, victim: Request) -> None:
        """Release what a running request still holds, and queue it to be resumed."""
        self._leases.release(victim)
        victim.num_preemptions += 1
        victim.num_lost_tokens = max(victim.num_lost_tokens, victim.num_computed)
        victim.num_computed = victim.num_scheduled = 0
        victim.match = None
        self._queues.suspend(victim)
        self._stats.preemptions += 1
