"""The plan of a step, and the counts of a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from typing import Final, NamedTuple

import numpy as np

from ..kvcache import Int32Array
from .request import Request, lease_of


class Chunk(NamedTuple):
    """Tokens of a request that one step computes: ``length`` of them, from ``start`` on."""

    request: Request
    start: int
    length: int


class BlockCopy(NamedTuple):
    """A device block that a step copies before it computes.

    Attributes:
        owner: request whose block is read. It keeps its blocks until the ``update`` of the step.
        source, destination: block ids.
    """

    owner: Request
    source: int
    destination: int


class DecodeRows(NamedTuple):
    """Requests that compute one token each, by column.

    Attributes:
        requests: the requests, in order of admission.
        starts: int32 ``[rows]``, position of the token of each.
        table_rows: int32 ``[rows]``, `Lease.row` of each.
    """

    requests: Sequence[Request]
    starts: Int32Array
    table_rows: Int32Array


_NO_IDS: Final = np.empty(0, np.int32)
NO_ROWS: Final = DecodeRows((), _NO_IDS, _NO_IDS)


@dataclass
class StepPlan:
    """The tokens that one step computes.

    Attributes:
        decode: requests that compute one token each.
        prefill: chunks of prompts; they follow the decode rows.
        num_tokens: number of tokens in all chunks; at most the budget.
        admitted: requests that got their blocks; they may have to wait for copies into them.
        preempted: requests that lost their blocks.
        copies: blocks to copy first: after everything that was dispatched before the step.
    """

    decode: DecodeRows = NO_ROWS
    prefill: list[Chunk] = field(default_factory=list)
    num_tokens: int = 0
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)

    @property
    def num_decode(self) -> int:
        """Number of chunks that are decode rows; they come first."""
        return len(self.decode.requests)

    @property
    def num_chunks(self) -> int:
        """Number of chunks. Without one, all requests wait: there is nothing to ``update``."""
        return self.num_decode + len(self.prefill)

    @cached_property
    def chunks(self) -> list[Chunk]:
        """What the step computes, as a list: decode rows first (one token each), then `prefill`."""
        decode = zip(self.decode.requests, self.decode.starts.tolist(), repeat(1))
        return [*map(Chunk._make, decode), *self.prefill]

    @property
    def requests(self) -> list[Request]:
        """The request of each chunk."""
        return [*self.decode.requests, *[chunk.request for chunk in self.prefill]]

    def chunk(self, index: int) -> Chunk:
        """Return one of `chunks`, without making all of them."""
        decode, index_in_prefill = self.decode, index - self.num_decode
        if index_in_prefill >= 0:
            return self.prefill[index_in_prefill]
        return Chunk(decode.requests[index], decode.starts.item(index), 1)

    @cached_property
    def table_rows(self) -> Int32Array:
        """The row of the block tables of each chunk, an int32 array; read it before ``update``."""
        rows = [lease_of(chunk.request).row for chunk in self.prefill]
        return np.concatenate([self.decode.table_rows, np.array(rows, np.int32)])

    def add_decode(self, rows: DecodeRows) -> None:
        """Plan a token of each of some requests, and count it as scheduled."""
        self.decode = rows
        self.num_tokens += self.num_decode
        for request in rows.requests:
            request.num_scheduled += 1

    def add_prefill(self, chunk: Chunk) -> None:
        """Append a chunk, and count its tokens as scheduled."""
        self.prefill.append(chunk)
        self.num_tokens += chunk.length
        chunk.request.num_scheduled += chunk.length


@dataclass
class SchedulerStats:
    """Counts of events since the scheduler was made.

    If all requests have finished and none was preempted, the sum of `hit_tokens`,
    `host_hit_tokens`, `storage_hit_tokens`, `received_tokens` and `prefill_tokens` is the length of
    all prompts.

    Attributes:
        steps: non-empty plans.
        admitted: requests that began to compute, each counted once. On a prefill node: attempts
            that were granted.
        resumed: admissions after a preemption.
        preemptions: times that a request lost its blocks.
        parked: preemptions that parked the KV; resumed_parked: admissions with parked KV.
        hit_tokens: prompt tokens found on the device, with those copied from another sample,
            counted when a request first computes; on a prefill node, therefore, not for an attempt
            that its decode node refuses.
        host_hit_tokens: prompt tokens copied from the host, without `storage_hit_tokens`.
        storage_hit_tokens: prompt tokens that the request's own prefetch brought from storage.
        received_tokens: prompt tokens whose KV came from a prefill node; only on a decode node,
            which counts its own hits when a request starts to decode.
        resumed_hit_tokens: tokens that a resumed request did not have to recompute.
        prefill_tokens: tokens computed in prefill chunks.
        recomputed_tokens: prefill tokens that had been computed before a preemption.
        decode_tokens: tokens computed in decode rows.
        waits_for_leader: times that a request waited for another to compute a block it needs.
        waits_for_blocks: times that a decoding request waited for copies to free a block.
        prefetches_put_off: times that a prefetch was put off because the host had no room.
    """

    steps: int = 0
    admitted: int = 0
    resumed: int = 0
    preemptions: int = 0
    parked: int = 0
    resumed_parked: int = 0
    hit_tokens: int = 0
    host_hit_tokens: int = 0
    storage_hit_tokens: int = 0
    received_tokens: int = 0
    resumed_hit_tokens: int = 0
    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    decode_tokens: int = 0
    waits_for_leader: int = 0
    waits_for_blocks: int = 0
    prefetches_put_off: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens that were found, received or computed, each once."""
        hits = self.hit_tokens + self.host_hit_tokens + self.storage_hit_tokens
        return hits + self.received_tokens + self.prefill_tokens - self.recomputed_tokens
