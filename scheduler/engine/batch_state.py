"""The running requests on the device: what a step needs of each, in a slot that it keeps."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32, UInt32

from ...kvcache import Int32Array, Lease
from ..request import Request, lease_of
from ..step_plan import Chunk

_NUM_SCALARS = 6
_KEPT_TOKEN = -1
"""The last token was sampled by a step in flight: only the device has it."""


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
    def zeros(cls, num_slots: int, width: int) -> BatchState:
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
        return cls(*map(jax.device_put, arrays))

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
    """

    def __init__(self, num_slots: int, width: int) -> None:
        self.num_slots, self.width = num_slots, width
        # An empty request in slot 0 compiles the program.
        empty = np.zeros(width + _NUM_SCALARS, np.int32)
        self.state = _set_slot(BatchState.zeros(num_slots, width), empty)
        self._slots: dict[Lease, int] = {}
        self._free = list(range(num_slots))
        self._sent = [0] * num_slots  # `Lease.num_replaced_blocks` at that time

    def send(self, chunks: Sequence[Chunk]) -> list[int]:
        """Send the requests of a step that the device does not know; return the slots of all."""
        leases = [lease_of(chunk.request) for chunk in chunks]
        slots = [self._slots.get(lease, -1) for lease in leases]
        stale = [
            index
            for index, (slot, lease) in enumerate(zip(slots, leases, strict=True))
            if slot < 0 or self._sent[slot] != lease.num_replaced_blocks
        ]
        for index in stale:
            chunk, lease = chunks[index], leases[index]
            is_read = chunk.start < chunk.request.num_tokens
            if slots[index] < 0:
                assert is_read, f"the last token of {chunk.request!r} is lost with its slot"
                slots[index] = self._slots[lease] = self._take(leases)
            self._sent[slots[index]] = lease.num_replaced_blocks
            last_token = chunk.request.tokens[-1] if is_read else _KEPT_TOKEN
            packed = _pack_request(chunk.request, last_token, slots[index], self.width)
            self.state = _set_slot(self.state, jax.device_put(packed))
        return slots

    def _take(self, in_step: Collection[Lease]) -> int:
        """Take a free slot, one of a lease that was released, or one that the step does not use."""
        if not self._free:
            ended = [lease for lease in self._slots if lease.row < 0]
            if not ended:
                used = set(in_step)
                ended = [next(lease for lease in self._slots if lease not in used)]
            self._free = [self._slots.pop(lease) for lease in ended]
        return self._free.pop()


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
