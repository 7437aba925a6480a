"""NIXL's Python interface, as far as it is used: an agent, its memory, and its reads."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final, NamedTuple

from .base import Fault
from .errors import TransportUnavailableError
from .staging import Run, StagingPool
from .transfer_engine import PullError

INSTALL: Final = "pip install --no-deps nixl-cu12"

NUM_READERS: Final = 2
"""Threads that may read at a time."""

_PACKAGES: Final = ("nixl", "nixl_cu12", "nixl_cu13")


class Prepared(NamedTuple):
    """Some reads that NIXL has looked at together, so that each begins sooner.

    Attributes:
        here, there: NIXL's lists of their places, in this memory and in the peer's.
    """

    here: Any
    there: Any


class NixlAgent:
    """An agent whose memory others may read, and that reads theirs into its own.

    Attributes:
        metadata: what other agents need to reach it.
        pool: its memory.
        address: of the first byte of that.
    """

    def __init__(self, staging_bytes: int, *, devices: str | None) -> None:
        """Start it, and read some of its memory over NIXL.

        Args:
            staging_bytes, devices: see `NixlEngine`.

        Raises:
            TransportUnavailableError: if NIXL is not installed, or does not work here.
        """
        api = _load()
        if devices is not None:
            os.environ.setdefault("UCX_NET_DEVICES", devices)
        self.pool = StagingPool(staging_bytes)
        self.address: int = self.pool.memory.ctypes.data
        self._name = f"radixkv-{secrets.token_hex(8)}"
        self._peers: dict[bytes, str] = {}  # names by metadata
        try:
            # NIXL's own thread would take a processor all the time, and then TCP is slower.
            config = api.nixl_agent_config(
                enable_prog_thread=False,
                backends=[],
                sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW,
            )
            self.nixl: Any = api.nixl_agent(self._name, config)
            self.nixl.create_backend("UCX", {"num_workers": str(NUM_READERS)})
            memory = [(self.address, staging_bytes, 0, "")]
            self._registered: Any = self.nixl.register_memory(memory, "DRAM")
            self.metadata: bytes = self.nixl.get_agent_metadata()
            self._test()
        except Exception as error:  # NIXL's own types, one per code
            raise TransportUnavailableError(f"NIXL does not work here: {_words(error)}") from error

    def _test(self) -> None:
        """Read from one end of the memory to the other."""
        half = len(self.pool.memory) // 2
        self.pool.memory[:half] = 1
        prepared = self.prepare(self._name, self.address, half, [Run(0, half, 1)])
        handle = self.make_read(prepared, 0, self._name)
        self.post(handle)
        while self.is_running(handle):
            self.heard()  # which has all of NIXL's workers go on
        if not self.pool.memory[half : 2 * half].all():
            raise RuntimeError("a read of its own memory gave other bytes")
        self.release(handle)
        self.forget(prepared)

    def close(self) -> None:
        """Take the memory out of others' reach; only when nothing is read into it any more."""
        self.nixl.deregister_memory(self._registered)

    # Other agents

    def meet(self, metadata: bytes) -> str:
        """Make an agent known, if it is not, and return its name.

        Raises:
            PullError: if that is no metadata.
        """
        if metadata == self.metadata:
            return self._name
        if metadata not in self._peers:
            try:
                name = self.nixl.add_remote_agent(metadata)
            except Exception as error:
                raise _pull_error(error) from error
            self._peers[metadata] = name.decode() if isinstance(name, bytes) else name
        return self._peers[metadata]

    def say(self, peer: str, word: bytes) -> None:
        """Tell another agent something; it is lost if that is gone."""
        with contextlib.suppress(Exception):
            self.nixl.send_notif(peer, word)

    def heard(self) -> list[bytes]:
        """Return what others have said since the last call; and serve their reads meanwhile.

        Over TCP, and when they connect, NIXL does nothing for others but within a call.
        """
        return [word for words in self.nixl.get_new_notifs().values() for word in words]

    # Reads

    def prepare(self, peer: str, remote: int, start: int, runs: Sequence[Run]) -> Prepared:
        """Prepare reads from a peer's address to a place in the memory, a read for each run.

        Raises:
            PullError: if that fails.
        """
        local, nixl = self.address + start, self.nixl
        here = [(local + run.start, run.num_bytes, 0) for run in runs]
        there = [(remote + run.start, run.num_bytes, 0) for run in runs]
        try:
            return Prepared(
                nixl.prep_xfer_dlist("NIXL_INIT_AGENT", nixl.get_xfer_descs(here, "DRAM")),
                nixl.prep_xfer_dlist(peer, nixl.get_xfer_descs(there, "DRAM")),
            )
        except Exception as error:
            raise self._lost(peer, error) from error

    def forget(self, prepared: Prepared) -> None:
        """Forget prepared reads, all of which have ended."""
        for each in (prepared.here, prepared.there):
            with contextlib.suppress(Exception):  # it may refuse when the peer is gone
                self.nixl.release_dlist_handle(each)

    def make_read(self, prepared: Prepared, number: int, peer: str) -> Any:
        """Return a handle of one of the prepared reads.

        Raises:
            PullError: if that fails.
        """
        here, there = prepared
        try:
            return self.nixl.make_prepped_xfer("READ", here, [number], there, [number])
        except Exception as error:
            raise self._lost(peer, error) from error

    def post(self, handle: Any, peer: str = "") -> bool:
        """Begin a read; whether it may still write.

        Raises:
            PullError: if that fails; `is_running` tells whether anything was begun.
        """
        try:
            state = self.nixl.transfer(handle)
        except Exception as error:
            raise self._lost(peer, error) from error
        return _is_running(state)

    def is_running(self, handle: Any) -> bool:
        """Whether a read may still write.

        Raises:
            PullError: if it has failed; then it writes no more.
        """
        try:
            state = self.nixl.check_xfer_state(handle)
        except Exception as error:
            raise _pull_error(error) from error
        return _is_running(state)

    def release(self, handle: Any) -> None:
        """Forget a read that has ended."""
        with contextlib.suppress(Exception):  # a handle whose peer is gone may refuse
            self.nixl.release_xfer_handle(handle)

    def _lost(self, peer: str, error: Exception) -> PullError:
        """Have an agent that could not be read made known again the next time."""
        for metadata in [each for each, name in list(self._peers.items()) if name == peer]:
            self._peers.pop(metadata, None)  # it may be the helper's call
        return _pull_error(error)


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


def _is_running(state: str) -> bool:
    if state not in ("PROC", "DONE"):
        raise PullError(Fault.FAILED, "NIXL ended the read with an error")
    return state == "PROC"


def _pull_error(error: Exception) -> PullError:
    lost = "emoteDisconnect" in type(error).__name__
    return PullError(Fault.PEER_LOST if lost else Fault.FAILED, _words(error))


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
