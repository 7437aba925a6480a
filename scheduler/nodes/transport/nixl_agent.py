"""A NIXL agent: its registered memory, its peers, and its reads."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple

from ....kvcache.cleanup import give_back
from .base import Fault
from .errors import TransportUnavailableError
from .staging import Segment, StagingPool
from .transfer_engine import PullError

INSTALL: Final = "pip install --no-deps nixl-cu13, or nixl-cu12"

NUM_READERS: Final = 2
"""Number of threads that may read at the same time."""

VERSION_BYTES: Final = 16

_PACKAGES: Final = ("nixl", "nixl_cu12", "nixl_cu13")
_NAME: Final = re.compile(rb"radixkv-[0-9a-f]{16}")
_MAX_PEERS: Final = 256
_MAX_OUTPUT_BYTES: Final = 64 << 10
_INFINIBAND: Final = Path("/sys/class/infiniband")
_NO_INFINIBAND: Final = "^ib"
"""UCX's module for InfiniBand loads the drivers of Debian's package ibverbs-providers, and they a
second copy of a library that is in NIXL's wheel. With both, a process ends with SIGSEGV."""
_UCX_ERROR: Final = re.compile(r"UCX +ERROR +(.{1,200})")


def _has_infiniband() -> bool:
    """Whether there is a device for UCX's InfiniBand module, which RDMA over Ethernet needs too."""
    return _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir())


class PreparedReads(NamedTuple):
    """Reads that NIXL has prepared together, so that each begins sooner.

    Attributes:
        local, remote: NIXL's lists of the reads' ranges in this memory and in the peer's.
    """

    local: Any
    remote: Any


class NixlAgent:
    """An agent whose memory others may read, and that reads their memory into its own.

    Attributes:
        metadata: data that other agents need to reach this one.
        version: version of NIXL, of VERSION_BYTES.
        pool: staging memory.
        address: address of its first byte.
    """

    def __init__(self, staging_bytes: int, *, devices: str | None) -> None:
        """Start the agent, and read some of its own memory over NIXL.

        Args:
            staging_bytes, devices: see `NixlEngine`.

        Raises:
            TransportUnavailableError: if NIXL is not installed or does not work here.
        """
        api, package = _load()
        self.version = version(package).encode()[:VERSION_BYTES].ljust(VERSION_BYTES, b"\0")
        if devices is not None:
            os.environ.setdefault("UCX_NET_DEVICES", devices)
        if not _has_infiniband():
            os.environ.setdefault("UCX_MODULES", _NO_INFINIBAND)
        self.pool = StagingPool(staging_bytes)
        self.address: int = self.pool.memory.ctypes.data
        self._name = _new_name()
        self._peers: dict[bytes, str] = {}  # names by metadata, the last used at the end
        self._num_pulls: Counter[str] = Counter()  # by the name of a peer
        with _output_on_stderr() as output:
            try:
                self._start(api, staging_bytes)
                self._test()
            except Exception as error:  # NIXL's own types, one per code
                reasons = [_first_line(error), *_UCX_ERROR.findall(output())]
                raise TransportUnavailableError(
                    f"NIXL does not work here: {'; '.join(reasons)}"
                ) from error

    def _start(self, api: Any, staging_bytes: int) -> None:
        # NIXL's progress thread would occupy a processor, which makes TCP slower.
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

    def _test(self) -> None:
        """Read one half of the memory into the other."""
        half = len(self.pool.memory) // 2
        self.pool.memory[:half] = 1
        prepared = self.prepare(self._name, self.address, half, [Segment(0, half, 1)])
        handle = self.make_read(prepared, 0, self._name)
        self.post(handle)
        while self.is_running(handle):
            self.take_notifications()  # lets all of NIXL's workers progress
        if not self.pool.memory[half : 2 * half].all():
            raise RuntimeError("a read of its own memory gave other bytes")
        self.release(handle)
        self.release_prepared(prepared)

    def close(self) -> None:
        """Deregister the memory. Call it only when no read can write to it."""
        self.nixl.deregister_memory(self._registered)

    # Peers

    def add_peer(self, metadata: bytes) -> str:
        """Register a peer unless it is known, and return its name in this process.

        NIXL keeps what it has read of wrong metadata, and refuses other metadata of that name. So
        each registration has a name of its own, whatever the metadata says.

        Raises:
            PullError: for invalid metadata.
        """
        if metadata == self.metadata:
            return self._name
        name = self._peers.pop(metadata, None) or self._register(metadata)
        self._peers[metadata] = name
        for other in [each for each in list(self._peers.values()) if not self._num_pulls[each]]:
            if len(self._peers) <= _MAX_PEERS:
                break
            self._forget_peer(other)
            self._remove(other)
        return name

    def _register(self, metadata: bytes) -> str:
        name = _new_name()
        encoded = name.encode()
        renamed, num_names = _NAME.subn(encoded, metadata)
        if not num_names:
            raise PullError(Fault.MISMATCH, "no metadata of a NIXL agent")
        try:
            found = self.nixl.add_remote_agent(renamed)
        except Exception as error:
            give_back(partial(self._remove, name))
            raise _pull_error(error) from error
        if found not in (name, encoded):
            give_back(partial(self._remove, found))
            raise PullError(Fault.MISMATCH, "metadata of a NIXL agent with another name")
        return name

    def _remove(self, name: str | bytes) -> None:
        with contextlib.suppress(Exception):  # unknown, or its connection is broken
            self.nixl.remove_remote_agent(name)

    def enter(self, peer: str) -> str:
        """Count a pull from a peer, which is not removed until it has left; return the peer."""
        self._num_pulls[peer] += 1
        return peer

    def leave(self, peer: str) -> None:
        """Note the end of a pull; remove a peer that was forgotten with its last one."""
        self._num_pulls[peer] -= 1
        if not self._num_pulls[peer]:
            del self._num_pulls[peer]
            if peer != self._name and peer not in list(self._peers.values()):
                self._remove(peer)

    def notify(self, peer: str, notification: bytes) -> None:
        """Send a notification, which is lost if the peer is gone."""
        with contextlib.suppress(Exception):
            self.nixl.send_notif(peer, notification)

    def take_notifications(self) -> list[bytes]:
        """Return the notifications since the last call, and serve reads of peers.

        NIXL serves peers over TCP, and accepts connections, only during calls.
        """
        return [each for some in self.nixl.get_new_notifs().values() for each in some]

    # Reads

    def prepare(
        self, peer: str, remote: int, start: int, segments: Sequence[Segment]
    ) -> PreparedReads:
        """Prepare one read per segment, from a peer's address to an offset in the memory.

        Raises:
            PullError: if NIXL fails.
        """
        first, nixl = self.address + start, self.nixl
        to = [(first + each.start, each.num_bytes, 0) for each in segments]
        source = [(remote + each.start, each.num_bytes, 0) for each in segments]
        made: list[Any] = []
        try:
            made += [nixl.prep_xfer_dlist("NIXL_INIT_AGENT", nixl.get_xfer_descs(to, "DRAM"))]
            made += [nixl.prep_xfer_dlist(peer, nixl.get_xfer_descs(source, "DRAM"))]
            return PreparedReads(*made)
        except Exception as error:
            give_back(partial(self.release_prepared, made))
            raise self._lost(peer, error) from error

    def release_prepared(self, prepared: Sequence[Any]) -> None:
        """Free prepared reads, all of which have ended."""
        for each in prepared:
            with contextlib.suppress(Exception):  # NIXL may refuse when the peer is gone
                self.nixl.release_dlist_handle(each)

    def make_read(self, prepared: PreparedReads, number: int, peer: str) -> Any:
        """Return the handle of one prepared read.

        Raises:
            PullError: if NIXL fails.
        """
        local, remote = prepared
        try:
            return self.nixl.make_prepped_xfer("READ", local, [number], remote, [number])
        except Exception as error:
            raise self._lost(peer, error) from error

    def post(self, handle: Any, peer: str = "") -> bool:
        """Begin a read; return whether it may still write.

        Raises:
            PullError: if NIXL fails; `is_running` tells whether the read has begun.
        """
        try:
            state = self.nixl.transfer(handle)
        except Exception as error:
            raise self._lost(peer, error) from error
        return _is_running(state)

    def is_running(self, handle: Any, peer: str = "") -> bool:
        """Whether a read from a peer may still write.

        Raises:
            PullError: if the read failed; it writes nothing any more.
        """
        try:
            state = self.nixl.check_xfer_state(handle)
        except (MemoryError, OSError):  # of Python, so it does not tell that the read has ended
            raise
        except Exception as error:
            raise self._lost(peer, error) from error
        return _is_running(state)

    def release(self, handle: Any) -> None:
        """Free the handle of a read that has ended."""
        with contextlib.suppress(Exception):  # NIXL may refuse when the peer is gone
            self.nixl.release_xfer_handle(handle)

    def _lost(self, peer: str, error: Exception) -> PullError:
        """Forget a peer after an error, so that the next pull registers it again."""
        self._forget_peer(peer)
        return _pull_error(error)

    def _forget_peer(self, peer: str) -> None:
        for metadata in [each for each, name in list(self._peers.items()) if name == peer]:
            self._peers.pop(metadata, None)  # both threads may get here


@contextlib.contextmanager
def _output_on_stderr() -> Iterator[Callable[[], str]]:
    """Collect what C++ writes to stdout and stderr, yield what returns it, and write it to stderr.

    UCX says only there why it fails, and writes it to stdout, where commands print results.
    """
    if sys.stdout is not None:
        sys.stdout.flush()
    with tempfile.TemporaryFile() as file:
        kept: dict[int, int] = {}
        try:
            for each in (1, 2):
                with contextlib.suppress(OSError):  # a service may have closed it
                    kept[each] = os.dup(each)
                    os.dup2(file.fileno(), each)
            yield lambda: os.pread(file.fileno(), _MAX_OUTPUT_BYTES, 0).decode(errors="replace")
        finally:
            _restore(kept)
            if 2 in kept:
                os.write(2, os.pread(file.fileno(), _MAX_OUTPUT_BYTES, 0))


def _restore(kept: dict[int, int]) -> None:
    """Give descriptors the files back of which there are copies."""
    restore = [partial(os.dup2, copy, each) for each, copy in kept.items()]
    give_back(*restore, *[partial(os.close, copy) for copy in kept.values()])


def _new_name() -> str:
    return f"radixkv-{secrets.token_hex(8)}"


def _load() -> tuple[Any, str]:
    """Import NIXL, and stop its logging to stdout; return its module and the package's name.

    Raises:
        TransportUnavailableError: if NIXL is not installed.
    """
    for package in _PACKAGES:
        try:
            api = import_module(f"{package}._api")
        except ImportError:
            continue
        # NIXL logs each agent to stdout, where commands print results.
        logger = logging.getLogger("nixl")
        logger.handlers.clear()
        logger.propagate = True
        return api, package
    raise TransportUnavailableError(f"NIXL is not installed: {INSTALL}")


def _is_running(state: str) -> bool:
    if state not in ("PROC", "DONE"):
        raise PullError(Fault.FAILED, "NIXL ended the read with an error")
    return state == "PROC"


def _pull_error(error: Exception) -> PullError:
    lost = "emoteDisconnect" in type(error).__name__
    return PullError(Fault.PEER_LOST if lost else Fault.FAILED, _first_line(error))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
