"""The reservation: how many blocks stay available for admitted requests when a new one asks.

A request of n tokens that may need KV for at most m tokens, and holds `held` blocks, grows within a
horizon of h more tokens by::

    growth(h) = ceil(min(n + h, m) / block_size) - held

A request q is admitted if the blocks left after its own are at least

* the growth of q and of all running requests within the horizon (`None`: up to their limits, so
  that none is ever preempted), and
* the blocks that the neediest of them lacks to finish when all others are preempted: one request
  can always finish.

On a decode node, requests whose KV is being received hold blocks as well. They count as running,
with the token that is handed over. But they cannot be preempted, nor can attempts that were given
up and whose pulls may still write: the guard counts on none of their blocks. Nor may they keep a
preempted request waiting, because they may never arrive: if nothing runs, a request is admitted
that can finish.

Preempting a request frees the blocks that no other request holds; its published blocks can be
evicted then. On a decode node nearly all blocks are published, so there the guard counts block by
block which ones stay held (`needed_to_finish`). Elsewhere it counts on private blocks only, and may
refuse a request that would fit.

Source: the rule of SGLang's decode node, counted in blocks. Without a horizon it is TensorRT-LLM's
GUARANTEED_NO_EVICT.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..kvcache import Match
from ..kvcache.prefix.lease import count_held
from .request import Request, lease_of

HORIZON_CLIP_TOKENS = 4096
"""Longest horizon, because requests often end far below their limits (SGLang's value)."""


class Reservation:
    """Growth and guard over the admitted requests, for one round of admissions.

    Attributes:
        num_target_blocks: blocks that the requests hold at the end of the horizon, together. It
            does not fall before one of them leaves, so what it exceeds the blocks they hold by is
            a lower bound of their growth in later rounds.
    """

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
        self.num_target_blocks = 0
        self._growth = 0
        self._private = 0
        self._num_running = 0
        # Maximum over r of growth(r) + private(r). The guard is this minus all private blocks.
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

    def _target_of(self, request: Request, num_more: int = 0) -> int:
        most = request.max_kv_tokens
        if self._horizon_tokens is not None:
            most = min(most, request.num_tokens + num_more + self._horizon_tokens)
        return self._blocks(most)

    def _growth_of(self, request: Request, held: int, num_more: int = 0) -> int:
        return max(self._target_of(request, num_more) - held, 0)

    def _lack_of(self, request: Request, held: int, private: int) -> int:
        return self._blocks(request.max_kv_tokens) - held + private

    def add(self, request: Request, held: int, private: int) -> None:
        """Count a request that runs or was just admitted."""
        self._num_running += 1
        target = self._target_of(request)
        self.num_target_blocks += target
        self._growth += max(target - held, 0)
        self._private += private
        self._neediest = max(self._neediest, self._lack_of(request, held, private))

    def allows(self, request: Request, num_hit_blocks: int, available: int) -> bool:
        """Tell whether a request may be admitted.

        Args:
            request: a request that gets blocks for all of its tokens so far.
            num_hit_blocks: number of those blocks that are shared from the cache.
            available: blocks that are free or evictable once the hit is pinned.
        """
        held = self._blocks(request.num_tokens)
        private = held - num_hit_blocks
        left = available - private
        if not self._num_running:  # preempting it gives back all that the others may need
            return left >= self._lack_of(request, held, 0)
        growth = self._growth + self._growth_of(request, held)
        neediest = max(self._neediest, self._lack_of(request, held, private))
        return left >= growth and left >= neediest - (self._private + private)

    def needed_to_receive(self, request: Request, num_hit_blocks: int) -> int:
        """Return the number of available blocks that receiving a request needs, without the guard.

        Args:
            request: a request that gets blocks for its whole prompt.
            num_hit_blocks: number of those blocks that are shared from the cache.
        """
        held = self._blocks(request.num_tokens)
        return held - num_hit_blocks + self._growth + self._growth_of(request, held, num_more=1)


def needed_to_finish(
    request: Request,
    match: Match,
    running: Sequence[Request],
    receiving: Sequence[Request],
    quarantined: Sequence[Request],
    block_size: int,
) -> int:
    """Return the number of available blocks that the guard requires for receiving a request.

    With so many, each request can finish when all other running requests are preempted.

    Args:
        request: a request that gets blocks for its whole prompt.
        match: its hit.
        running: requests that can be preempted.
        receiving: requests that hold blocks, cannot be preempted, and will run.
        quarantined: requests that hold blocks and will not run.
        block_size: tokens per block.
    """

    def blocks(num_tokens: int) -> int:
        return -(-num_tokens // block_size)

    fixed = [lease_of(each) for each in (*receiving, *quarantined)]
    held = count_held([*fixed, *map(lease_of, running)], match)
    freed = held - count_held(fixed, match)  # by preempting all running requests
    neediest = blocks(request.max_kv_tokens) - blocks(request.num_tokens) - freed
    for each in receiving:
        lack = blocks(each.max_kv_tokens) - lease_of(each).num_blocks
        neediest = max(neediest, lack - freed)
    for each in running:
        lease = lease_of(each)
        lack = blocks(each.max_kv_tokens) - lease.num_blocks
        if lack - (freed - lease.num_blocks) > neediest:  # a bound; exact without shared blocks
            neediest = max(neediest, lack - (held - count_held([*fixed, lease], match)))
    return blocks(request.num_tokens) - match.num_blocks + max(neediest, 0)
