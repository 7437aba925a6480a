"""The libraries below the transfer engines, in memory: no thread, no clock, and all counted.

A pull of JAX arrives at once, or never if there is no such offer; a read of NIXL ends at once, at
the next question, or never.
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import jax
import numpy as np
from jax.experimental import transfer

from radixkv.scheduler.nodes.transport import jax_engine, nixl_agent
from radixkv.scheduler.nodes.transport.jax_engine import JaxEngine
from radixkv.scheduler.nodes.transport.nixl_engine import NixlEngine

# JAX


class JaxNetwork:
    """The transfer servers of a test.

    Attributes:
        servers: all of them, by address.
        connections: all that were ever made.
        is_stuck: whether no pull ever arrives.
    """

    def __init__(self) -> None:
        self.servers: dict[str, JaxServer] = {}
        self.connections: list[JaxConnection] = []
        self.is_stuck = False
        self._numbers = count(1)

    def start(self, client: object, address: str, channels: object, **_: object) -> JaxServer:
        """Stand for `start_transfer_server`."""
        return JaxServer(self, f"127.0.0.1:{next(self._numbers)}")

    @property
    def num_busy(self) -> int:
        """Number of connections whose pull has neither arrived nor been broken."""
        return sum(each.is_busy for each in self.connections)

    def forget(self, engines: Sequence[JaxEngine]) -> None:
        """Forget all connections, and the servers that only read."""
        self.connections.clear()
        self.servers = {each.address: self.servers[each.address] for each in engines}


class JaxServer:
    """A server.

    Attributes:
        offers: arrays by number, until they are pulled.
    """

    def __init__(self, network: JaxNetwork, address: str) -> None:
        self.offers: dict[int, list[Any]] = {}
        self._network, self._address = network, address
        network.servers[address] = self

    def address(self) -> str:
        return self._address

    def await_pull(self, number: int, arrays: list[Any]) -> None:
        self.offers[number] = arrays

    def connect(self, address: str) -> JaxConnection:
        connection = JaxConnection(self._network, self._network.servers[address])
        self._network.connections.append(connection)
        return connection

    def _reset_rendevous_table(self) -> None:
        self.offers.clear()


class JaxConnection:
    def __init__(self, network: JaxNetwork, server: JaxServer) -> None:
        self._network, self._server = network, server
        self.is_broken = self.is_busy = False

    def pull(self, number: int, wanted: Sequence[Any]) -> list[JaxArray]:
        found = None if self._network.is_stuck else self._server.offers.pop(number, None)
        self.is_busy = found is None
        return [JaxArray(self, each) for each in found or [None] * len(wanted)]

    def _poison_connection(self) -> None:
        self.is_broken, self.is_busy = True, False


class JaxArray:
    """An array that has arrived, or never does."""

    def __init__(self, connection: JaxConnection, content: Any) -> None:
        self._connection, self._content = connection, content

    @property
    def nbytes(self) -> int:
        return 1

    def is_ready(self) -> bool:
        return self._content is not None or self._connection.is_broken

    def block_until_ready(self) -> None:
        if self._content is None:
            raise jax.errors.JaxRuntimeError("the connection was broken")

    def __array__(self, dtype: object = None, copy: object = None) -> Any:
        return np.asarray(self._content)


@contextmanager
def jax_engines(number: int) -> Iterator[tuple[JaxNetwork, list[JaxEngine]]]:
    """Yield engines over servers in memory, without their self-tests."""
    network, ticks = JaxNetwork(), count()
    clock = SimpleNamespace(monotonic=lambda: float(next(ticks)), sleep=time.sleep)
    with (
        patch.object(transfer, "start_transfer_server", network.start),
        patch.object(jax_engine, "_test", lambda engine: None),
        patch.object(jax_engine, "num_free_descriptors", lambda: 1_000),
        patch.object(jax_engine, "time", clock),
    ):
        yield network, [JaxEngine() for _ in range(number)]


# NIXL


class Nixl:
    """The library.

    Attributes:
        agents: all agents, in order.
        lost: addresses from which a read never ends.
        is_slow: whether other reads end only when they are asked for.
    """

    nixl_agent_config = SimpleNamespace
    nixl_thread_sync_t = SimpleNamespace(NIXL_THREAD_SYNC_RW=1)

    def __init__(self) -> None:
        self.agents: list[NixlPeer] = []
        self.lost: set[int] = set()
        self.is_slow = False

    def nixl_agent(self, name: str, config: object) -> NixlPeer:
        return NixlPeer(self, name)


class Read:
    """A read.

    Attributes:
        state: what NIXL says of it; empty before it is posted.
    """

    def __init__(self, to: tuple[int, int, int], source: tuple[int, int, int]) -> None:
        self.to, self.source = to, source
        self.state = ""

    def copy(self) -> None:
        self.state = "DONE"
        ctypes.memmove(self.to[0], self.source[0], self.to[1])


class NixlPeer:
    """An agent of the library.

    Attributes:
        lists, reads: those that are not released.
        is_registered: whether its memory is.
        remotes: agents that it knows, by name.
    """

    def __init__(self, nixl: Nixl, name: str) -> None:
        self._nixl = nixl
        self._metadata = f"{len(nixl.agents)} {name}".encode()
        self._notifications: list[bytes] = []
        self.remotes: dict[str, NixlPeer] = {name: self}
        self.lists: dict[int, Any] = {}
        self.reads: list[Read] = []
        self.is_registered = False
        nixl.agents.append(self)

    def create_backend(self, name: str, options: object) -> None:
        """Do nothing."""

    def register_memory(self, memory: object, kind: str) -> object:
        self.is_registered = True
        return memory

    def deregister_memory(self, registered: object) -> None:
        assert not any(read.state == "PROC" for read in self.reads), "a read may still write"
        self.is_registered = False

    def get_agent_metadata(self) -> bytes:
        return self._metadata

    def add_remote_agent(self, metadata: bytes) -> bytes:
        found = re.fullmatch(rb"(\d+) (.*)", metadata)
        assert found is not None
        self.remotes[found[2].decode()] = self._nixl.agents[int(found[1])]
        return found[2]

    def remove_remote_agent(self, name: str | bytes) -> None:
        del self.remotes[name if isinstance(name, str) else name.decode()]

    def send_notif(self, peer: str, notification: bytes) -> None:
        self.remotes[peer]._notifications.append(notification)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        found, self._notifications = self._notifications, []
        return {"anybody": found}

    def get_xfer_descs(self, ranges: list[tuple[int, int, int]], kind: str) -> Any:
        return ranges

    def prep_xfer_dlist(self, peer: str, ranges: Any) -> Any:
        assert peer == "NIXL_INIT_AGENT" or peer in self.remotes
        made = list(ranges)
        self.lists[id(made)] = made
        return made

    def release_dlist_handle(self, made: Any) -> None:
        del self.lists[id(made)]

    def make_prepped_xfer(
        self, kind: str, to: Any, here: list[int], source: Any, there: list[int]
    ) -> Read:
        read = Read(to[here[0]], source[there[0]])
        self.reads.append(read)
        return read

    def transfer(self, read: Read) -> str:
        read.state = "PROC"
        if read.source[0] not in self._nixl.lost and not self._nixl.is_slow:
            read.copy()
        return read.state

    def check_xfer_state(self, read: Read) -> str:
        if not read.state:
            raise RuntimeError("NIXL_ERR_NOT_POSTED")
        if read.state == "PROC" and read.source[0] not in self._nixl.lost:
            read.copy()
        return read.state

    def release_xfer_handle(self, read: Read) -> None:
        assert read.state != "PROC", "a read may still write"
        self.reads.remove(read)


class Helper:
    """Stands for the helper thread: its work is done within `submit`."""

    def submit(self, function: Callable[..., None], *arguments: Any) -> Future[None]:
        done: Future[None] = Future()
        try:
            function(*arguments)
        except Exception as error:
            done.set_exception(error)
        else:
            done.set_result(None)
        return done

    def shutdown(self, **_: object) -> None:
        """Do nothing."""


@contextmanager
def nixl_engines(number: int, staging_bytes: int) -> Iterator[tuple[Nixl, list[NixlEngine]]]:
    """Yield engines over agents in memory, whose helpers are no threads."""
    nixl = Nixl()
    with (
        patch.object(nixl_agent, "_load", lambda: (nixl, "nixl")),
        patch.object(nixl_agent, "version", lambda package: "1.0"),
        patch.dict(os.environ),
    ):
        engines = [NixlEngine(staging_bytes) for _ in range(number)]
        for engine in engines:
            engine.helper.shutdown()
            engine.helper = Helper()  # type: ignore[assignment]
        yield nixl, engines
