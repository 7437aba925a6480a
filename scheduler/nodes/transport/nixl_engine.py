"""NIXL as an engine: reads over RDMA, TCP or shared memory, between hosts too.

NIXL's transfers have no deadline, and cannot be stopped: a handle that is released while a read is
in flight leaves the read going, and when a peer that had been stopped goes on, it writes to where
the read was to go. (Measured on 1.5.1: 97 to 99 % of 500 MiB, after "released".) So

- every read goes into a slot of staging memory, which is registered once, and never into a block;
- a pull that is given up keeps its slot in quarantine, and its handle, until NIXL says that it has
  ended (DONE or an error);
- P copies what it offers into a slot too, and spoils that when it is withdrawn: who reads it later
  gets bytes that do not have the digests of the offer;
- when more than half of it is taken, P asks D to say when it has read a part, and takes its slot
  back then: so that a prompt may be larger than staging memory. It does not always, as the next
  read waits until P has heard it.

A part is read by several requests. Where NIXL copies behind our back, as over RDMA and TCP, all are
posted at once. Over shared memory it copies within the call that posts one, on the caller's
processor: then a helper, if there is a processor for it, reads beside the transport's thread. Each
takes the next request, and digests what it has brought while that is in its cache.

An agent's metadata, which peers need to reach it, comes with each route.
"""

from __future__ import annotations

import contextlib
import secrets
import struct
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from .base import Fault
from .descriptors import (
    ArraySpec,
    Descriptor,
    PayloadArray,
    digest_arrays,
)
from .nixl_agent import (
    NUM_READERS,
    NixlAgent,
    Prepared,
)
from .staging import (
    Slot,
    cut_slot,
    slot_bytes,
)
from .transfer_engine import (
    Engine,
    EngineOffer,
    EnginePull,
    PullError,
)

NAME: Final = "nixl"

_WORD_BYTES: Final = 8
_NO_WORD: Final = bytes(_WORD_BYTES)
_NO_DIGEST: Final = b""
_PLACE: Final = struct.Struct(f"<Q{_WORD_BYTES}s")  # its address, and what D says when it is read
_READ_BYTES: Final = 4 << 20
_HELP_S: Final = 1e-3
_SERVING_TEND_S: Final = 1e-3
_IDLE_TEND_S: Final = 5e-2  # for reads of what was withdrawn meanwhile
_MAX_METADATA_BYTES: Final = 64 << 10
_NEVER_FREED: Final[list[object]] = []
"""Agents and memory that a transfer may still write to; freeing it would give it to others."""


class NixlEngine(Engine):
    """Serves what is copied into its staging memory, and reads others' into it.

    Attributes:
        helper: a thread that reads beside the transport's own.
    """

    name = NAME
    copies_offers = True

    def __init__(self, staging_bytes: int, *, devices: str | None = "lo") -> None:
        """Start an agent, register staging memory, and read some of it over NIXL.

        Args:
            staging_bytes: for what is offered, or for what is received: of all parts at a time.
            devices: the network devices that may be used and listened at, unless UCX_NET_DEVICES
                is set; None: all that UCX finds.

        Raises:
            TransportUnavailableError: if NIXL is not installed, or does not work here.
        """
        self._agent = NixlAgent(staging_bytes, devices=devices)
        self._pool = self._agent.pool
        self._num_offers = 0
        self._read_by: dict[bytes, NixlOffer] = {}  # some offers, by what D says when it has read
        self._quarantine: list[NixlPull] = []
        self.helper = ThreadPoolExecutor(NUM_READERS - 1, "radixkv-helper")

    @property
    def quarantined_bytes(self) -> int:
        """See `Engine.quarantined_bytes`."""
        return sum(pull.slot.num_bytes for pull in self._quarantine)

    def offer(self, arrays: Sequence[PayloadArray]) -> NixlOffer | None:
        """See `Engine.offer`."""
        specs = [ArraySpec(tuple(array.shape), str(array.dtype)) for array in arrays]
        slot = self._pool.allocate(slot_bytes(specs))
        if slot is None:
            return None
        self._pool.write(slot, arrays)
        is_short = self._pool.num_free_bytes < len(self._pool.memory) // 2
        word = secrets.token_bytes(_WORD_BYTES) if is_short else _NO_WORD
        offer = NixlOffer(self, slot, word)
        if is_short:
            self._read_by[word] = offer
        self._num_offers += 1
        return offer

    def pull(self, route: bytes, descriptor: Descriptor) -> NixlPull | None:
        """See `Engine.pull`."""
        if not _PLACE.size < len(route) <= _PLACE.size + _MAX_METADATA_BYTES:
            raise PullError(Fault.MISMATCH, "no metadata of a NIXL agent")
        remote, word = _PLACE.unpack_from(route)
        peer = self._agent.meet(route[_PLACE.size :])
        slot = self._pool.allocate(slot_bytes(descriptor.arrays))
        if slot is None:
            return None
        return NixlPull(self, peer, remote, word, slot, descriptor.arrays)

    def tend(self) -> None:
        """See `Engine.tend`."""
        for word in self._agent.heard():
            if word in self._read_by:
                self._read_by[word].is_read = True
        for pull in list(self._quarantine):
            if pull.has_ended():
                self._quarantine.remove(pull)
                pull.free()

    @property
    def tend_s(self) -> float:
        """See `Engine.tend_s`."""
        return _SERVING_TEND_S if self._num_offers or self._quarantine else _IDLE_TEND_S

    def close(self) -> None:
        """See `Engine.close`."""
        self.helper.shutdown(wait=False, cancel_futures=True)
        self.tend()
        if self._quarantine:
            _NEVER_FREED.append((self._agent, self._quarantine))
        else:
            self._agent.close()


class NixlOffer(EngineOffer):
    """A copy of some arrays in staging memory.

    Attributes:
        is_read: D has said so.
    """

    def __init__(self, engine: NixlEngine, slot: Slot, word: bytes) -> None:
        agent = engine._agent
        self.route = _PLACE.pack(agent.address + slot.start, word) + agent.metadata
        self.is_read = False
        self._engine = engine
        self._slot = slot
        self._word = word

    def was_read(self) -> bool:
        """See `EngineOffer.was_read`."""
        return self.is_read

    def withdraw(self, was_read: bool) -> None:
        """See `EngineOffer.withdraw`: spoil it for who reads it all the same."""
        self._engine._num_offers -= 1
        self._engine._read_by.pop(self._word, None)
        self._engine._pool.memory[self._slot.start] ^= 0xFF
        self._engine._pool.free(self._slot)

    def is_withdrawn(self) -> bool:
        """See `EngineOffer.is_withdrawn`."""
        return True


class NixlPull(EnginePull):
    """A read into a slot.

    Attributes:
        slot: its own until NIXL has ended it.
    """

    def __init__(
        self,
        engine: NixlEngine,
        peer: str,
        remote: int,
        word: bytes,
        slot: Slot,
        specs: tuple[ArraySpec, ...],
    ) -> None:
        self.slot = slot
        self.arrays = engine._pool.views(slot, specs)
        self._engine = engine
        self._agent = engine._agent
        self._peer = peer
        self._remote = remote
        self._word = word
        self._runs = cut_slot(specs, _READ_BYTES)
        self._waiting = deque(range(len(self._runs)))  # reads that neither thread has begun
        self._running: dict[int, Any] = {}  # handles of reads that may still write
        self._found: list[bytes] = [_NO_DIGEST] * len(specs)  # digests of what has arrived
        self._num_arrived = 0
        self._prepared: Prepared | None = None
        self._helping: Future[None] | None = None

    def advance(self) -> int:
        """See `EnginePull.advance`."""
        if self._prepared is None:
            place = self._remote, self.slot.start
            self._prepared = self._agent.prepare(self._peer, *place, self._runs)
        while self._waiting and not self._read_next(self._prepared):
            pass
        if self._waiting and self._helping is None:
            self._helping = self._engine.helper.submit(self._help, self._prepared)
        if not self._waiting and self._helping is not None and not self._helping.cancel():
            with contextlib.suppress(TimeoutError):
                self._helping.result(_HELP_S)
        for number, handle in list(self._running.items()):
            if not self._agent.is_running(handle):
                self._end(number, self._running.pop(number))
        while self._num_arrived < len(self._found) and self._found[self._num_arrived]:
            self._num_arrived += 1
        return self._num_arrived

    def _read_next(self, prepared: Prepared) -> bool:
        """Begin the next read, if there is one; return whether it has ended at once."""
        try:
            number = self._waiting.popleft()
        except IndexError:  # the other thread was quicker
            return False
        handle = self._agent.make_read(prepared, number, self._peer)
        may_write = True
        try:
            may_write = self._agent.post(handle, self._peer)
        finally:
            if may_write:
                self._running[number] = handle
        if not may_write:  # not asked again: that takes as long as to post
            self._end(number, handle)
        return not may_write

    def _help(self, prepared: Prepared) -> None:
        """Read beside the transport's thread; the helper."""
        while self._waiting:
            self._read_next(prepared)

    def _end(self, number: int, handle: Any) -> None:
        """Digest what a read has brought, while it is in a cache."""
        self._agent.release(handle)
        start = self._runs[number - 1].stop_array if number else 0
        stop = self._runs[number].stop_array
        self._found[start:stop] = digest_arrays(self.arrays[start:stop])

    def digests(self, start: int, stop: int) -> Sequence[bytes]:
        """See `EnginePull.digests`."""
        return self._found[start:stop]

    def has_ended(self) -> bool:
        """Whether nothing is written any more, unless it advances."""
        if self._helping is not None and not self._helping.done():
            return False
        return not any(self._may_write(handle) for handle in self._running.values())

    def _may_write(self, handle: Any) -> bool:
        try:
            return self._agent.is_running(handle)
        except PullError:
            return False  # that is an end, too

    def free(self) -> None:
        """See `EnginePull.free`."""
        for handle in self._running.values():
            self._agent.release(handle)
        if self._prepared is not None:
            self._agent.forget(self._prepared)
        if self._num_arrived == len(self.arrays) and self._word != _NO_WORD:
            self._agent.say(self._peer, self._word)
        self._engine._pool.free(self.slot)

    def abandon(self) -> None:
        """See `EnginePull.abandon`."""
        self._waiting.clear()  # so that the helper begins nothing more
        self._engine._quarantine.append(self)
