"""How many blocks to keep for what already runs, before somebody new is admitted.

With `held` blocks, a request of n tokens that may come to need m at most grows, within a horizon
of h more tokens, by::

    growth(h) = ceil(min(n + h, m) / block_size) - held

A request q is admitted if the blocks left after its own are at least

* the growth of all running requests and of q within the horizon (`None`: to their ends, so that
  nobody is ever preempted), and
* what the neediest of them lacks to reach its end when all the others are preempted: one can
  always finish.

On a decode node, requests whose KV is being received have their blocks, too. They count as those
that run do, with the token that is handed over. But nobody can preempt them, nor those that were
given up and whose pulls may still write: the guard counts on no block of theirs.

What comes free when a request is preempted is all that no other holds: blocks that it has published
can be evicted then. On a decode node nearly all are published, so the guard counts there, block by
block, what stays held (`needed_to_finish`); where nothing is received, it counts on private blocks
alone, and may refuse what would fit.

Source: the rule of SGLang's decode side, with TensorRT-LLM's GUARANTEED_NO_EVICT as the case of no
horizon; counted here in blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..kvcache import Match
from ..kvcache.prefix.lease import count_held
from .request import Request, lease_of

HORIZON_CLIP_TOKENS = 4096
"""A horizon is cut to this: limits are often far above what is generated (SGLang's value)."""


class Reservation:
    """The sum and the guard over the running requests, for one round of admissions."""

    def __init__(
        self,
        running: Iterable[Request],
        block_size: int,
        reserve_tokens: int | None,
        receiving: Iterable[Request] = (),
    ) -> None:
        self._block_size = block_size
        self._horizon_tokens = (
            None if reserve_tokens is None else min(reserve_tokens, HORIZON_CLIP_TOKENS)
        )
        self._growth = 0
        self._private = 0
        # max over r of growth(r) + private(r); less all private blocks, this is the guard.
        self._neediest = 0
        for request in running:
            lease = lease_of(request)
            self.add(request, lease.num_blocks, lease.num_blocks - lease.num_shared_blocks)
        for request in receiving:
            held = lease_of(request).num_blocks
            self._growth += self._growth_of(request, held, num_more=1)
            self._neediest = max(self._neediest, self._lack_of(request, held, 0))

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _growth_of(self, request: Request, held: int, num_more: int = 0) -> int:
        most = request.max_kv_tokens
        if self._horizon_tokens is not None:
            most = min(most, request.num_tokens + num_more + self._horizon_tokens)
        return max(self._blocks(most) - held, 0)

    def _lack_of(self, request: Request, held: int, private: int) -> int:
        return self._blocks(request.max_kv_tokens) - held + private

    def add(self, request: Request, held: int, private: int) -> None:
        """Count a request that runs, or has just been admitted."""
        self._growth += self._growth_of(request, held)
        self._private += private
        self._neediest = max(self._neediest, self._lack_of(request, held, private))

    def allows(self, request: Request, num_hit_blocks: int, available: int) -> bool:
        """Tell whether a request may be admitted.

        Args:
            request: it; all of its tokens so far get blocks at once.
            num_hit_blocks: how many of those blocks are shared from the cache.
            available: blocks free or evictable once the hit is pinned.
        """
        held = self._blocks(request.num_tokens)
        private = held - num_hit_blocks
        left = available - private
        growth = self._growth + self._growth_of(request, held)
        neediest = max(self._neediest, self._lack_of(request, held, private))
        return left >= growth and left >= neediest - (self._private + private)

    def needed_to_receive(self, request: Request, num_hit_blocks: int) -> int:
        """Return how many blocks must be available for a request to be received, but for the guard.

        Args:
            request: it; all of its prompt gets blocks at once.
            num_hit_blocks: how many of those blocks are shared from the cache.
        """
        held = self._blocks(request.num_tokens)
        return held - num_hit_blocks + self._growth + self._growth_of(request, held, num_more=1)


def needed_to_finish(
    request: Request,
    match: Match,
    running: Sequence[Request],
    receiving: Sequence[Request],
    fenced_off: Sequence[Request],
    block_size: int,
) -> int:
    """Return how many blocks must be available for a request to be received: the guard.

    With as many, each request can reach its end when all others that run are preempted.

    Args:
        request: it; all of its prompt gets blocks at once.
        match: its hit.
        running: those that can be preempted.
        receiving: those that hold blocks, cannot be preempted, and will run.
        fenced_off: those that hold blocks, and will not run.
        block_size: tokens of a block.
    """

    def blocks(num_tokens: int) -> int:
        return -(-num_tokens // block_size)

    fixed = [lease_of(each) for each in (*receiving, *fenced_off)]
    held = count_held([*fixed, *map(lease_of, running)], match)
    freed = held - count_held(fixed, match)  # when all that run are preempted
    neediest = blocks(request.max_kv_tokens) - blocks(request.num_tokens) - freed
    for each in receiving:
        lack = blocks(each.max_kv_tokens) - lease_of(each).num_blocks
        neediest = max(neediest, lack - freed)
    for each in running:
        lease = lease_of(each)
        lack = blocks(each.max_kv_tokens) - lease.num_blocks
        if lack - (freed - lease.num_blocks) > neediest:  # unless it shares blocks with those
            neediest = max(neediest, lack - (held - count_held([*fixed, lease], match)))
    return blocks(request.num_tokens) - match.num_blocks + max(neediest, 0)
