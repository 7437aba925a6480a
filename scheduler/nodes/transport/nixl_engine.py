"""Transfer engine over NIXL: reads over RDMA, TCP or shared memory, also between hosts.

NIXL's transfers have no deadline and cannot be stopped. Releasing a handle leaves its read in
flight, and when a stopped peer continues, the read still writes to its destination. (Measured on
1.5.1: 97 to 99 % of 500 MiB arrived after the release.) Hence:

- Every read goes into a slot of staging memory, which is registered once, and never into a block.
- An abandoned pull keeps its slot and its handle in quarantine until NIXL reports that it has ended
  (DONE or an error).
- P copies each offer into a slot, too, and corrupts the slot when it is withdrawn: a later read
  gets bytes that do not have the digests of the offer.
- When less than half of the staging memory is free, P asks D to confirm the read of a part, and
  frees the slot then. A prompt may thus be larger than staging memory. P does not always ask,
  because the next read waits until P has received the confirmation.

A part is read by several requests. Where NIXL copies in the background (RDMA, TCP), all requests
are posted at once. Over shared memory, NIXL copies inside the call that posts a request, on the
caller's processor. Then a helper thread, if a processor is free, reads beside the transport's
thread. Each takes the next request, and digests the result while it is in its cache.

Peers need an agent's metadata to reach it, so every route contains it. NIXL and UCX read it without
checks: of 60 pieces of metadata with one flipped bit, each of three processes met one that ended it
with SIGSEGV. So a route has a digest, and only metadata of the same version of NIXL is read. A peer
that makes a digest for wrong metadata can still end this process.
"""

from __future__ import annotations

import contextlib
import secrets
import struct
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from ....kvcache.cleanup import give_back
from .base import Fault
from .descriptors import ArraySpec, Descriptor, PayloadArray, digest_arrays
from .nixl_agent import NUM_READERS, VERSION_BYTES, NixlAgent, PreparedReads
from .staging import Slot, slot_bytes, split_slot
from .transfer_engine import EngineOffer, EnginePull, PullError, TransferEngine, seal, unseal

NAME: Final = "nixl"

_CONFIRMATION_BYTES: Final = 8
_NO_CONFIRMATION: Final = bytes(_CONFIRMATION_BYTES)
_NO_DIGEST: Final = b""
_LOCATION: Final = struct.Struct(f"<Q{_CONFIRMATION_BYTES}s{VERSION_BYTES}s")
"""Address of an offer, the notification by which D confirms the read, and the version of NIXL."""
_READ_BYTES: Final = 4 << 20
_HELPER_WAIT_S: Final = 1e-3
_BUSY_MAINTAIN_S: Final = 1e-3
_IDLE_MAINTAIN_S: Final = 5e-2  # serves reads of withdrawn offers
_MAX_METADATA_BYTES: Final = 64 << 10
_NEVER_FREED: Final[list[object]] = []
"""Agents and memory that a transfer may still write. Nobody else may get this memory."""


class NixlEngine(TransferEngine):
    """Serves copies in its staging memory, and reads the copies of others into it.

    Attributes:
        helper: thread that reads beside the transport's thread.
    """

    name = NAME
    copies_offers = True
    room = "room in staging memory"

    def __init__(self, staging_bytes: int, *, devices: str | None = "lo") -> None:
        """Start an agent, register staging memory, and test a read.

        Args:
            staging_bytes: size of the staging memory, for all parts that are offered or received
                at a time.
            devices: network devices to use and listen at, unless UCX_NET_DEVICES is set. None: all
                that UCX finds.

        Raises:
            TransportUnavailableError: if NIXL is not installed or does not work here.
        """
        self._agent = NixlAgent(staging_bytes, devices=devices)
        self._pool = self._agent.pool
        self._num_offers = 0
        self._unconfirmed: dict[bytes, NixlOffer] = {}  # by the confirmation that P asked for
        self._quarantine: list[NixlPull] = []
        self.helper = ThreadPoolExecutor(NUM_READERS - 1, "radixkv-helper")

    @property
    def quarantined_bytes(self) -> int:
        """See `TransferEngine.quarantined_bytes`."""
        return sum(pull.slot.num_bytes for pull in self._quarantine)

    def offer(self, arrays: Sequence[PayloadArray]) -> NixlOffer | None:
        """See `TransferEngine.offer`."""
        specs = [ArraySpec(tuple(array.shape), str(array.dtype)) for array in arrays]
        slot = self._pool.allocate(slot_bytes(specs))
        if slot is None:
            return None
        try:
            self._pool.write(slot, arrays)
            is_short = self._pool.num_free_bytes < len(self._pool.memory) // 2
            confirmation = (
                secrets.token_bytes(_CONFIRMATION_BYTES) if is_short else _NO_CONFIRMATION
            )
            offer = NixlOffer(self, slot, confirmation)
        except BaseException:
            give_back(partial(self._pool.free, slot))
            raise
        if is_short:
            self._unconfirmed[confirmation] = offer
        self._num_offers += 1
        return offer

    def pull(self, route: bytes, descriptor: Descriptor, digest_key: bytes) -> NixlPull | None:
        """See `TransferEngine.pull`."""
        route = unseal(route)
        if not _LOCATION.size < len(route) <= _LOCATION.size + _MAX_METADATA_BYTES:
            raise PullError(Fault.MISMATCH, "no metadata of a NIXL agent")
        remote, confirmation, version = _LOCATION.unpack_from(route)
        if version != self._agent.version:
            raise PullError(
                Fault.MISMATCH, f"of NIXL {_text(version)}, not {_text(self._agent.version)}"
            )
        peer = self._agent.add_peer(route[_LOCATION.size :])
        slot = self._pool.allocate(slot_bytes(descriptor.arrays))
        if slot is None:
            return None
        try:
            return NixlPull(self, peer, remote, confirmation, slot, descriptor.arrays, digest_key)
        except BaseException:
            give_back(partial(self._pool.free, slot))
            raise

    def maintain(self) -> None:
        """See `TransferEngine.maintain`."""
        for confirmation in self._agent.take_notifications():
            if confirmation in self._unconfirmed:
                self._unconfirmed[confirmation].is_read = True
        for pull in list(self._quarantine):
            if pull.has_ended():
                self._quarantine.remove(pull)
                pull.free()

    @property
    def maintain_every_s(self) -> float:
        """See `TransferEngine.maintain_every_s`."""
        return _BUSY_MAINTAIN_S if self._num_offers or self._quarantine else _IDLE_MAINTAIN_S

    def close(self) -> None:
        """See `TransferEngine.close`."""
        shutdown = partial(self.helper.shutdown, wait=False, cancel_futures=True)
        give_back(shutdown, self.maintain, self._close_agent)

    def _close_agent(self) -> None:
        if self._quarantine:
            _NEVER_FREED.append((self._agent, self._quarantine))
        else:
            self._agent.close()


class NixlOffer(EngineOffer):
    """A copy of some arrays in staging memory.

    Attributes:
        is_read: whether D has confirmed the read.
    """

    def __init__(self, engine: NixlEngine, slot: Slot, confirmation: bytes) -> None:
        agent = engine._agent
        location = _LOCATION.pack(agent.address + slot.start, confirmation, agent.version)
        self.route = seal(location + agent.metadata)
        self.is_read = False
        self._engine = engine
        self._slot = slot
        self._confirmation = confirmation

    def is_ready(self) -> bool:
        """See `EngineOffer.is_ready`."""
        return True

    def was_read(self) -> bool:
        """See `EngineOffer.was_read`."""
        return self.is_read

    def withdraw(self, was_read: bool) -> None:
        """See `EngineOffer.withdraw`: corrupt the slot, so that late reads fail."""
        self._engine._num_offers -= 1
        self._engine._unconfirmed.pop(self._confirmation, None)
        self._engine._pool.memory[self._slot.start] ^= 0xFF
        self._engine._pool.free(self._slot)

    def is_withdrawn(self) -> bool:
        """See `EngineOffer.is_withdrawn`."""
        return True


class NixlPull(EnginePull):
    """Reads of a part into a slot.

    Attributes:
        slot: the destination, in use until NIXL has ended all reads.
    """

    def __init__(
        self,
        engine: NixlEngine,
        peer: str,
        remote: int,
        confirmation: bytes,
        slot: Slot,
        specs: tuple[ArraySpec, ...],
        digest_key: bytes,
    ) -> None:
        self.slot = slot
        self.digest_key = digest_key
        self.arrays = engine._pool.views(slot, specs)
        self._engine = engine
        self._agent = engine._agent
        self._remote = remote
        self._confirmation = confirmation
        self._segments = split_slot(specs, _READ_BYTES)  # one read each
        self._waiting = deque(range(len(self._segments)))  # reads that no thread has begun
        self._running: dict[int, Any] = {}  # handles of reads that may still write
        self._digests: list[bytes] = [_NO_DIGEST] * len(specs)  # of the arrays that have arrived
        self._num_arrived = 0
        self._prepared: PreparedReads | None = None
        self._helper_task: Future[None] | None = None
        self._peer = self._agent.enter(peer)  # last: `free` undoes it

    def advance(self) -> int:
        """See `EnginePull.advance`."""
        if self._prepared is None:
            self._prepared = self._agent.prepare(
                self._peer, self._remote, self.slot.start, self._segments
            )
        while self._waiting and not self._read_next(self._prepared):
            pass
        if self._waiting and self._helper_task is None:
            self._helper_task = self._engine.helper.submit(self._help, self._prepared)
        if not self._waiting and self._helper_task is not None and not self._helper_task.cancel():
            with contextlib.suppress(TimeoutError):
                self._helper_task.result(_HELPER_WAIT_S)
        # A copy of keys cannot be interrupted by the helper's insertion; one of pairs allocates.
        for number in list(self._running):
            if not self._agent.is_running(self._running[number], self._peer):
                self._agent.release(self._running.pop(number))
                self._digest(number)
        while self._num_arrived < len(self._digests) and self._digests[self._num_arrived]:
            self._num_arrived += 1
        return self._num_arrived

    def _read_next(self, prepared: PreparedReads) -> bool:
        """Begin the next read, if any; return whether it has ended at once."""
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
        if not may_write:  # `is_running` would take as long as `post`
            self._agent.release(handle)
            self._digest(number)
        return not may_write

    def _help(self, prepared: PreparedReads) -> None:
        """Read beside the transport's thread; runs in the helper."""
        while self._waiting:
            self._read_next(prepared)

    def _digest(self, number: int) -> None:
        """Digest the arrays of a read that has ended, while they are in the cache."""
        start = self._segments[number - 1].stop_array if number else 0
        stop = self._segments[number].stop_array
        arrays = self.arrays[start:stop]
        self._digests[start:stop] = digest_arrays(arrays, self.digest_key, start)

    def digests(self, start: int, stop: int) -> Sequence[bytes]:
        """See `EnginePull.digests`."""
        return self._digests[start:stop]

    def has_ended(self) -> bool:
        """Whether no read can write any more, unless `advance` is called."""
        if self._helper_task is not None and not self._helper_task.done():
            return False
        return not any([self._may_write(handle) for handle in self._running.values()])

    def _may_write(self, handle: Any) -> bool:
        try:
            return self._agent.is_running(handle)
        except PullError:
            return False

    def free(self) -> None:
        """See `EnginePull.free`."""
        agent = self._agent
        steps = [partial(agent.release, handle) for handle in self._running.values()]
        if self._prepared is not None:
            steps += [partial(agent.release_prepared, self._prepared)]
        if self._num_arrived == len(self.arrays) and self._confirmation != _NO_CONFIRMATION:
            steps += [partial(agent.notify, self._peer, self._confirmation)]
        steps += [partial(agent.leave, self._peer), partial(self._engine._pool.free, self.slot)]
        give_back(*steps)

    def abandon(self) -> None:
        """See `EnginePull.abandon`."""
        self._waiting.clear()  # stops the helper
        if self not in self._engine._quarantine:  # `close` may abandon it again, after an error
            self._engine._quarantine.append(self)


def _text(version: bytes) -> str:
    return version.rstrip(b"\0").decode("ascii", "replace")
