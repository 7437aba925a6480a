"""The mixed scheduler: one node that prefills and decodes."""

from __future__ import annotations

from ..kvcache import CacheManager
from .batch import BatchScheduler
from .policy import Policy
from .preemption import PreemptMode
from .request import Request


class MixedScheduler(BatchScheduler):
    """Decides, step by step, which tokens of which requests are computed.

    A step has `token_budget` tokens. Running requests come first: a token for each that decodes,
    then prefill chunks in order of admission, then new ones while the reservation allows (see
    `reservation`). A whole prompt gets its blocks at admission, or nothing. When blocks run out,
    the last in the policy's order is preempted: it gives up its blocks and is resumed, before new
    requests, by computing again what the cache has lost.

    Requests that need a block which another is about to compute wait for it, instead of
    computing it twice.

    Over a manager with tiers, what the host has of a request is copied into its blocks first, and
    what storage has is fetched while it waits. A preempted one may be parked: its KV is written
    out, its blocks come free when that is done, and nothing is computed again. Who needs a block
    that is on its way so waits for it, while the others go on.

    It does no I/O and knows no clock: call `schedule`, dispatch what `manager.tiers` has to be
    copied, run the plan, call `update`.
    """

    def __init__(
        self,
        manager: CacheManager,
        *,
        token_budget: int,
        max_running: int,
        policy: Policy | None = None,
        reserve_tokens: int | None = 512,
        prefix_cache: bool = True,
        preempt: PreemptMode = "recompute",
    ) -> None:
        """Make a scheduler over a manager that nobody else uses.

        Args:
            manager: holds the blocks.
            token_budget: tokens of a step, at least max_running.
            max_running: requests that hold blocks at a time.
            policy: order of admission and preemption; default `Fcfs`.
            reserve_tokens: horizon of the reservation; None: to the end of each request, so that
                none is ever preempted.
            prefix_cache: whether requests share blocks; without, the tiers are of no use.
            preempt: "recompute": what a preempted request has computed may be lost. "host": it is
                parked there, if there is room. "storage": the same, but the host may drop it as
                soon as storage has it.

        Raises:
            ConfigError, CountError: for what is no policy, sizes that cannot work, or a tier that
                the manager has not.
        """
        super().__init__(
            manager,
            token_budget=token_budget,
            max_running=max_running,
            policy=policy,
            reserve_tokens=reserve_tokens,
            prefix_cache=prefix_cache,
            preempt=preempt,
        )

    def add(self, request: Request) -> None:
        """Queue a request; what storage has of its prompt is fetched while it waits.

        Raises:
            RequestError: if it was added before, or a live one has its id.
            RequestTooLargeError: if it could not run to its limit even alone.
        """
        self._add(request)
