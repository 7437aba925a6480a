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

A part is read by several requests, so that what one has brought is digested while the next brings
more. Over shared memory NIXL copies within the call that posts a request, so the next is posted
after that; where it copies behind our back, as over RDMA and TCP, all are posted at once.

An agent's metadata, which peers need to reach it, comes with each route.
"""

from __future__ import annotations

import secrets
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from .base import Fault
from .engine import Engine, EngineOffer, EnginePull, PullError
from .nixl_agent import NixlAgent, Prepared
from .staging import Run, Slot, cut_slot, slot_bytes
from .tickets import ArraySpec, Descriptor, PayloadArray

NAME: Final = "nixl"

_WORD_BYTES: Final = 8
_NO_WORD: Final = bytes(_WORD_BYTES)
_PLACE: Final = struct.Struct(f"<Q{_WORD_BYTES}s")  # its address, and what D says when it is read
_READ_BYTES: Final = 8 << 20
_SERVING_TEND_S: Final = 1e-3
_IDLE_TEND_S: Final = 5e-2  # for reads of what was withdrawn meanwhile
_MAX_METADATA_BYTES: Final = 64 << 10
_NEVER_FREED: Final[list[object]] = []
"""Agents and memory that a transfer may still write to; freeing it would give it to others."""


class NixlEngine(Engine):
    """Serves what is copied into its staging memory, and reads others' into it."""

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
        self._prepared: Prepared | None = None
        self._num_posted = 0
        self._posted: deque[tuple[Run, Any]] = deque()  # with their handles, and not ended
        self._num_arrived = 0

    def advance(self) -> int:
        """See `EnginePull.advance`."""
        is_here_at_once = False
        while self._num_posted < len(self._runs) and not is_here_at_once:
            is_here_at_once = self._post_next()
        while self._posted and not self._agent.is_running(self._posted[0][1]):
            self._end_first()
        return self._num_arrived

    def _post_next(self) -> bool:
        """Begin to read some more arrays; return whether they are here already."""
        if self._prepared is None:
            self._prepared = self._agent.prepare(
                self._peer, self._remote, self.slot.start, self._runs
            )
        number = self._num_posted
        handle = self._agent.make_read(self._prepared, number, self._peer)
        self._posted.append((self._runs[number], handle))
        self._num_posted += 1
        if self._agent.post(handle, self._peer):
            return False
        if len(self._posted) == 1:  # not asked again: that takes as long as to post
            self._end_first()
        return True

    def _end_first(self) -> None:
        run, handle = self._posted.popleft()
        self._agent.release(handle)
        self._num_arrived = run.stop_array

    def has_ended(self) -> bool:
        """Whether nothing is written any more, unless it advances."""
        return not any(self._may_write(handle) for _, handle in self._posted)

    def _may_write(self, handle: Any) -> bool:
        try:
            return self._agent.is_running(handle)
        except PullError:
            return False  # that is an end, too

    def free(self) -> None:
        """See `EnginePull.free`."""
        for _, handle in self._posted:
            self._agent.release(handle)
        if self._prepared is not None:
            self._agent.forget(self._prepared)
        if self._num_arrived == len(self.arrays) and self._word != _NO_WORD:
            self._agent.say(self._peer, self._word)
        self._engine._pool.free(self.slot)

    def abandon(self) -> None:
        """See `EnginePull.abandon`."""
        self._engine._quarantine.append(self)
