"""The mixed scheduler: prefill and decode on one node."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..kvcache import CacheManager
from .batching.batch import BatchScheduler
from .batching.preemption import PreemptMode
from .interface import Scheduler
from .policy import Policy
from .request import Request
from .step_plan import StepPlan


class MixedScheduler(Scheduler):
    """Decides, step by step, which tokens of which requests are computed.

    A step has ``token_budget`` tokens. Running requests come first: one token for each decoding
    request, then prefill chunks in order of admission. New requests follow while the reservation
    allows (see ``reservation``). Admission reserves blocks for the whole prompt, or refuses. When
    blocks run out, the last running request in the policy's order is preempted. It gives up its
    blocks, and is resumed before new requests by recomputing what the cache has lost.

    A request that needs a block which another one is about to compute waits for it, instead of
    computing it twice.

    Over a manager with tiers, blocks that the host holds are copied to the device before a request
    runs, and blocks in storage are prefetched while it waits. A preempted request may be parked:
    its KV is written out, its blocks are released after that, and nothing is recomputed. A request
    that needs a block in flight waits for it; other requests continue.

    The scheduler does no I/O and has no clock: call `schedule`, dispatch the operations of
    ``manager.tiers``, run the plan, and call `update`.
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
        depth: int = 1,
    ) -> None:
        """Make a scheduler. Nothing else may use its manager.

        Args:
            manager: holds the blocks.
            token_budget: most tokens of a step; at least max_running.
            max_running: most requests that hold blocks at a time.
            policy: order of admission and preemption; default `Fcfs`.
            reserve_tokens: horizon of the reservation in tokens. None reserves blocks up to the
                limit of each request, so that none is ever preempted.
            prefix_cache: whether requests share blocks; without it, the tiers are not used.
            preempt: "recompute" lets the cache drop the KV of a preempted request. "host" parks it
                in the host tier if there is room. "storage" does the same, but the host may drop
                it once storage has it.
            depth: most steps in flight: how often `schedule` may be called before `update`. A
                request's next row is planned before its last token is known. The token that
                follows a stop token is then computed in vain, and discarded.

        Raises:
            ConfigError, CountError: for an invalid policy, sizes that do not fit together, or a
                tier that the manager does not have.
        """
        super().__init__(
            BatchScheduler(
                manager,
                token_budget=token_budget,
                max_running=max_running,
                policy=policy,
                reserve_tokens=reserve_tokens,
                prefix_cache=prefix_cache,
                preempt=preempt,
                depth=depth,
            )
        )

    def add(self, request: Request) -> None:
        """Queue a request; its prompt is prefetched from storage while it waits.

        Raises:
            RequestError: if it was added before, or an active request has its id.
            RequestTooLargeError: if it could not run to its limit even alone.
        """
        self._batch.add(request)

    def update(self, plan: StepPlan, next_tokens: Sequence[int]) -> list[Request]:
        """Apply the results of a plan: publish blocks, append tokens, end requests.

        Args:
            plan: the first plan in flight.
            next_tokens: the token sampled after each chunk. It is used where the chunk completed
                the tokens of its request.

        Returns:
            The requests that ended in this step.

        Raises:
            StepOrderError: for another plan, or if the results are not one per chunk.
        """
        return self._batch.update(plan, next_tokens)

    def abort(self, request_id: str) -> bool:
        """End a request in any state; return False if no active request has this id.

        Steps in flight keep its blocks until the `update` of the last one. Blocks that are being
        copied for it are released when the copy has ended.
        """
        return self._batch.abort(request_id)

    def reset_cache(self, keep: Collection[bytes] = (), weights_revision: str = "") -> None:
        """Drop all KV because the weights have changed; requests continue and recompute theirs.

        Running requests are preempted. Before the reset, abort requests that should not continue
        with other weights.

        Args:
            keep: namespaces whose published KV stays.
            weights_revision: revision of the new weights, for storage keys; "" keeps the old keys.

        Raises:
            StepOrderError: during a step.
            NamespaceError: if keep is not a collection of bytes.
        """
        self._batch.reset_cache(keep, weights_revision)
