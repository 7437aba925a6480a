"""The running requests on the device: what a step needs of each, in a slot that it keeps."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntFlag
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int32, UInt32

from ...kvcache import BlockTables, Int32Array
from ...kvcache.copies.block_arrays import put_of
from ..request import Request, lease_of
from ..step_plan import StepPlan

_NUM_SCALARS = 6
_KEPT_TOKEN = -1
"""The last token was sampled by a step in flight: only the device has it."""


class Needs(IntFlag):
    """What a request needs beside the most likely token. The empty set takes no other program."""

    DRAWS = 1
    ADJUSTS = 2
    COUNTS = 4
    LOGPROBS = 8
    PROMPT_LOGPROBS = 16
    GUIDE = 32


def needs_of(request: Request) -> int:
    """Return the `Needs` of a request."""
    sampling = request.sampling
    needs = Needs.DRAWS if sampling.temperature > 0 else Needs(0)
    if sampling.has_penalties:
        needs |= Needs.COUNTS | Needs.ADJUSTS
    if (sampling.min_p > 0 and sampling.temperature > 0) or (
        sampling.min_tokens > 0 and request.late_token_ids
    ):
        needs |= Needs.ADJUSTS
    if request.guide is not None:
        needs |= Needs.GUIDE | Needs.ADJUSTS
    if request.logprobs is not None:
        needs |= Needs.LOGPROBS
    if request.prompt_logprobs is not None:
        needs |= Needs.PROMPT_LOGPROBS
    return needs


class BatchState(NamedTuple):
    """Arrays of the running requests on the device, by slot.

    Attributes:
        block_tables: `[slots, width]` block ids; entries past the blocks of a request are not read.
        last_tokens: `[slots]` token that was sampled last.
        temperature, top_k, top_p, seed: `[slots]`, see `SamplingParams`.
    """

    block_tables: Int32[Array, "slots width"]
    last_tokens: Int32[Array, " slots"]
    temperature: Float[Array, " slots"]
    top_k: Int32[Array, " slots"]
    top_p: Float[Array, " slots"]
    seed: UInt32[Array, " slots"]

    @classmethod
    def zeros(cls, num_slots: int, width: int, sharding: NamedSharding | None = None) -> BatchState:
        """Allocate the arrays for `num_slots` requests of at most `width` blocks."""
        # `jnp.zeros` would compile a program for each shape.
        arrays = (
            np.zeros((num_slots, width), np.int32),
            np.zeros(num_slots, np.int32),
            np.zeros(num_slots, np.float32),
            np.zeros(num_slots, np.int32),
            np.zeros(num_slots, np.float32),
            np.zeros(num_slots, np.uint32),
        )
        return cls(*put_of(sharding)(arrays, sharding))

    def at(self, slots: Int32[Array, " rows"]) -> BatchState:
        """Return the arrays by row, for the slot of each row; slots out of range are clamped."""
        return BatchState(*(each.at[slots].get(mode="clip") for each in self))


class DeviceBatch:
    """The running requests on the device, and the slot of each.

    A request keeps its slot until another one needs it. The device follows the growth of a block
    table by itself (see `step_arrays`); a request is sent as a whole when it is new, or when blocks
    of its table were replaced by published ones.

    Attributes:
        state: the arrays; a step replaces them.
        num_slots, width: most requests of a step, and most blocks of a request.
        to_count: slots of requests with penalties whose tokens the device has not counted.
        set_slot: program that writes a packed request into its slot; it donates the state.
    """

    def __init__(self, num_slots: int, width: int, sharding: NamedSharding | None = None) -> None:
        self.num_slots, self.width = num_slots, width
        # An empty request in slot 0 compiles the program.
        empty = np.zeros(width + _NUM_SCALARS, np.int32)
        self.state = _set_slot(BatchState.zeros(num_slots, width, sharding), empty)
        self.set_slot: Callable[[BatchState, Int32Array], BatchState] = _set_slot
        self._needs = np.zeros(num_slots, np.uint8)
        self.to_count: list[tuple[int, Request]] = []
        self._forget(BlockTables())

    def _forget(self, tables: BlockTables) -> None:
        """Free all slots: the device knows no request of these tables."""
        self._tables = tables
        self._rows = np.full(self.num_slots, -1, np.int32)  # of the tables, by slot; -1: free
        self._slots = np.full(len(tables.live), -1, np.int32)  # by row of the tables; -1: none
        self._sent = np.zeros(len(tables.live), np.int64)  # version of a row that was sent

    def send(self, plan: StepPlan, tables: BlockTables) -> Int32Array:
        """Send the requests of a step that the device does not know.

        Returns:
            int32 ``[chunks]``, the slot of each.
        """
        if tables is not self._tables:
            self._forget(tables)
        if (num_new := len(tables.live) - len(self._slots)) > 0:
            self._slots = np.pad(self._slots, (0, num_new), constant_values=-1)
            self._sent = np.pad(self._sent, (0, num_new))
        rows = plan.table_rows
        is_known = (self._slots[rows] >= 0) & (self._sent[rows] == tables.versions[rows])
        for index in np.flatnonzero(~is_known).tolist():
            request, start, _ = plan.chunk(index)
            row = rows.item(index)
            is_read = start < request.num_tokens
            if self._slots[row] < 0:
                assert is_read, f"the last token of {request!r} is lost with its slot"
                self._take_slot(row, rows)
            self._sent[row] = tables.versions[row]
            slot = self._slots.item(row)
            self._needs[slot] = needs = needs_of(request)
            if needs & Needs.COUNTS and is_read:
                self.to_count.append((slot, request))
            last_token = request.tokens[-1] if is_read else _KEPT_TOKEN
            self.state = self.set_slot(
                self.state, _pack_request(request, last_token, slot, self.width)
            )
        return self._slots[rows]

    def needs(self, slots: Int32Array) -> int:
        """Return the `Needs` of the requests in these slots together, or 0."""
        return int(np.bitwise_or.reduce(self._needs[slots]))

    def _take_slot(self, row: int, in_step: Int32Array) -> None:
        """Give a row of the tables a slot that is free, or that the step does not use."""
        is_free = (self._rows < 0) | ~self._tables.live[self._rows]
        if not is_free.any():
            is_free = ~np.isin(self._rows, in_step)
        slot = int(np.argmax(is_free))
        if self._rows[slot] >= 0:
            self._slots[self._rows[slot]] = -1
        self._rows[slot], self._slots[row] = row, slot


def _pack_request(
    request: Request, last_token: int | np.int32, slot: int, width: int
) -> Int32Array:
    """Write all that the device holds of a request into one int32 vector."""
    table = lease_of(request).block_table
    packed = np.zeros(width + _NUM_SCALARS, np.int32)
    packed[: len(table)] = table
    scalars, sampling = packed[width:], request.sampling
    scalars[0] = slot
    scalars[1] = last_token
    scalars[2:3].view(np.float32)[0] = sampling.temperature
    scalars[3] = sampling.top_k
    scalars[4:5].view(np.float32)[0] = sampling.top_p
    scalars[5:6].view(np.uint32)[0] = sampling.seed
    return packed


def _unpack_request(state: BatchState, packed: Int32[Array, " packed"]) -> BatchState:
    slot, last_token, temperature, top_k, top_p, seed = packed[-_NUM_SCALARS:]
    request = BatchState(
        packed[:-_NUM_SCALARS],
        jnp.where(last_token == _KEPT_TOKEN, state.last_tokens[slot], last_token),
        lax.bitcast_convert_type(temperature, np.dtype(np.float32)),
        top_k,
        lax.bitcast_convert_type(top_p, np.dtype(np.float32)),
        lax.bitcast_convert_type(seed, np.dtype(np.uint32)),
    )
    return BatchState(
        *(each.at[slot].set(value) for each, value in zip(state, request, strict=True))
    )


_set_slot = jax.jit(_unpack_request, donate_argnums=0)
