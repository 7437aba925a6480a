"""NIXL as an engine: reads over RDMA, TCP or shared memory, between hosts too.

NIXL's transfers have no deadline, and cannot be stopped: a handle that is released while a read is
in flight leaves the read going, and when a peer that had been stopped goes on, it writes to where
the read was to go. (Measured on 1.5.1: 97 to 99 % of 500 MiB, after "released".) So

- every read goes into a slot of staging memory, which is registered once, and never into a block;
- a pull that is given up keeps its slot in quarantine, and its handle, until NIXL says that it has
  ended (DONE or an error);
- P copies what it offers into a slot too, and spoils that when it is withdrawn: who reads it later
  gets bytes that do not have the digests of the offer.

A part is read by several requests, one after the other: over shared memory NIXL copies within the
call that posts a request, so that its arrays can be checked while they are in the processor's
cache. Where it copies behind our back, as over RDMA and TCP, all of them are posted at once.

An agent's metadata, which peers need to reach it, comes with each route.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import struct
from collections import deque
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final

from .base import Fault
from .engine import Engine, EngineOffer, EnginePull, PullError
from .errors import TransportUnavailableError
from .staging import Run, Slot, StagingPool, cut_slot, slot_bytes
from .tickets import ArraySpec, Descriptor, PayloadArray

NAME: Final = "nixl"
INSTALL: Final = "pip install --no-deps nixl-cu12"

_PACKAGES: Final = ("nixl", "nixl_cu12", "nixl_cu13")
_ADDRESS: Final = struct.Struct("<Q")
_PIECE_BYTES: Final = 4 << 20
_READ_BYTES: Final = 4 << 20
_MAX_METADATA_BYTES: Final = 64 << 10
_NEVER_FREED: Final[list[object]] = []
"""Agents and memory that a transfer may still write to; freeing it would give it to others."""


class NixlEngine(Engine):
    """Serves what is copied into its staging memory, and reads others' into it."""

    name = NAME

    def __init__(self, staging_bytes: int, *, devices: str | None = "lo") -> None:
        """Start an agent, register staging memory, and read some of it over NIXL.

        Args:
            staging_bytes: for what is offered, or for what is received: of all parts at a time.
            devices: the network devices that may be used and listened at, unless UCX_NET_DEVICES
                is set; None: all that UCX finds.

        Raises:
            TransportUnavailableError: if NIXL is not installed, or does not work here.
        """
        api = _load()
        if devices is not None:
            os.environ.setdefault("UCX_NET_DEVICES", devices)
        self._pool = StagingPool(staging_bytes)
        self._first = self._pool.memory.ctypes.data
        self._agent_name = f"radixkv-{secrets.token_hex(8)}"
        self._peers: dict[bytes, str] = {}  # names by metadata
        self._quarantine: list[NixlPull] = []
        try:
            self._agent: Any = api.nixl_agent(self._agent_name, api.nixl_agent_config())
            memory = [(self._first, staging_bytes, 0, "")]
            self._registered: Any = self._agent.register_memory(memory, "DRAM")
            self.metadata: bytes = self._agent.get_agent_metadata()
            self._test()
        except Exception as error:  # NIXL's own types, one per code
            raise TransportUnavailableError(f"NIXL does not work here: {_words(error)}") from error

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
        return NixlOffer(self, slot)

    def pull(self, route: bytes, descriptor: Descriptor) -> NixlPull | None:
        """See `Engine.pull`."""
        metadata = route[_ADDRESS.size :]
        if not _ADDRESS.size < len(route) <= _ADDRESS.size + _MAX_METADATA_BYTES:
            raise PullError(Fault.MISMATCH, "no metadata of a NIXL agent")
        slot = self._pool.allocate(slot_bytes(descriptor.arrays))
        if slot is None:
            return None
        (remote,) = _ADDRESS.unpack_from(route)
        try:
            peer = self._peer(metadata)
        except Exception as error:
            self._pool.free(slot)
            raise PullError(_fault(error), _words(error)) from error
        return NixlPull(self, peer, remote, slot, descriptor.arrays)

    def tend(self) -> None:
        """See `Engine.tend`."""
        for pull in list(self._quarantine):
            if pull.has_ended():
                self._quarantine.remove(pull)
                pull.free()

    def close(self) -> None:
        """See `Engine.close`."""
        self.tend()
        if self._quarantine:
            _NEVER_FREED.append((self._agent, self._pool, self._quarantine))
        else:
            self._agent.deregister_memory(self._registered)
        self._agent = None

    def _peer(self, metadata: bytes) -> str:
        """Make an agent known, if it is not, and return its name."""
        if metadata == self.metadata:
            return self._agent_name
        if metadata not in self._peers:
            name = self._agent.add_remote_agent(metadata)
            self._peers[metadata] = name.decode() if isinstance(name, bytes) else name
        return self._peers[metadata]

    def forget(self, peer: str) -> None:
        """Have an agent, which could not be read, made known again the next time."""
        self._peers = {key: name for key, name in self._peers.items() if name != peer}

    def make_read(self, peer: str, remote: int, start: int, num_bytes: int) -> Any:
        """Prepare a read from a peer's address to a place in staging memory; its handle."""
        pieces = range(0, num_bytes, _PIECE_BYTES)
        sizes = [min(_PIECE_BYTES, num_bytes - each) for each in pieces]
        local = self._first + start
        here = [(local + each, size, 0) for each, size in zip(pieces, sizes, strict=True)]
        there = [(remote + each, size, 0) for each, size in zip(pieces, sizes, strict=True)]
        agent = self._agent
        return agent.initialize_xfer(
            "READ", agent.get_xfer_descs(here, "DRAM"), agent.get_xfer_descs(there, "DRAM"), peer
        )

    def post(self, handle: Any) -> None:
        """Begin a read."""
        self._agent.transfer(handle)

    def _test(self) -> None:
        """Read from one end of the memory to the other."""
        half = len(self._pool.memory) // 2
        self._pool.memory[:half] = 1
        handle = self.make_read(self._agent_name, self._first, half, half)
        self.post(handle)
        while self.is_running(handle):
            pass
        if not self._pool.memory[half : 2 * half].all():
            raise RuntimeError("a read of its own memory gave other bytes")
        self.release(handle)

    def is_running(self, handle: Any) -> bool:
        """Whether a read may still write.

        Raises:
            PullError: if it has failed; then it writes no more.
        """
        try:
            state = self._agent.check_xfer_state(handle)
        except Exception as error:
            raise PullError(_fault(error), _words(error)) from error
        if state not in ("PROC", "DONE"):
            raise PullError(Fault.FAILED, "NIXL ended the read with an error")
        return bool(state == "PROC")

    def release(self, handle: Any) -> None:
        """Forget a read that has ended."""
        with contextlib.suppress(Exception):  # a handle whose peer is gone may refuse
            self._agent.release_xfer_handle(handle)


class NixlOffer(EngineOffer):
    """A copy of some arrays in staging memory."""

    def __init__(self, engine: NixlEngine, slot: Slot) -> None:
        self.route = _ADDRESS.pack(engine._first + slot.start) + engine.metadata
        self._engine = engine
        self._slot = slot

    def withdraw(self, was_read: bool) -> None:
        """See `EngineOffer.withdraw`."""
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
        slot: Slot,
        specs: tuple[ArraySpec, ...],
    ) -> None:
        self.slot = slot
        self.arrays = engine._pool.views(slot, specs)
        self._engine = engine
        self._peer = peer
        self._remote = remote
        self._waiting = deque(cut_slot(specs, _READ_BYTES))
        self._posted: deque[tuple[Run, Any]] = deque()  # with their handles
        self._num_arrived = 0

    def advance(self) -> int:
        """See `EnginePull.advance`."""
        is_done_at_once = False
        while self._waiting and not is_done_at_once:
            is_done_at_once = self._post(self._waiting.popleft())
        while self._posted and not self._engine.is_running(self._posted[0][1]):
            run, handle = self._posted.popleft()
            self._engine.release(handle)
            self._num_arrived = run.stop_array
        return self._num_arrived

    def _post(self, run: Run) -> bool:
        """Begin to read some arrays; return whether they are here already."""
        try:
            handle = self._engine.make_read(
                self._peer, self._remote + run.start, self.slot.start + run.start, run.num_bytes
            )
            self._posted.append((run, handle))
            self._engine.post(handle)
        except Exception as error:
            self._engine.forget(self._peer)
            raise PullError(_fault(error), _words(error)) from error
        return not self._engine.is_running(handle)

    def has_ended(self) -> bool:
        """Whether nothing is written any more, unless it advances."""
        return not any(self._may_write(handle) for _, handle in self._posted)

    def _may_write(self, handle: Any) -> bool:
        try:
            return self._engine.is_running(handle)
        except PullError:
            return False  # that is an end, too

    def free(self) -> None:
        """See `EnginePull.free`."""
        for _, handle in self._posted:
            self._engine.release(handle)
        self._engine._pool.free(self.slot)

    def abandon(self) -> None:
        """See `EnginePull.abandon`."""
        self._engine._quarantine.append(self)


def _load() -> Any:
    """Import NIXL, and keep it from writing to stdout.

    Raises:
        TransportUnavailableError: if it is not installed.
    """
    for package in _PACKAGES:
        try:
            api = import_module(f"{package}._api")
        except ImportError:
            continue
        # It logs each agent to stdout, where commands print results.
        logger = logging.getLogger("nixl")
        logger.handlers.clear()
        logger.propagate = True
        return api
    raise TransportUnavailableError(f"NIXL is not installed: {INSTALL}")


def _fault(error: Exception) -> Fault:
    return Fault.PEER_LOST if "emoteDisconnect" in type(error).__name__ else Fault.FAILED


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
