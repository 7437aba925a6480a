"""Transfer engine over `jax.experimental.transfer`, with the guards that it lacks.

JAX's transfers have these gaps. A pull from a peer that has stopped, or of an array that is not
offered, never ends. Another dtype of the same size is accepted as if it were right. An offer that
is never pulled is never freed. Anybody who guesses a 64-bit number may read an offer. Hence:

- Each pull has a connection of its own, which is broken at the deadline; that ends its arrays with
  an error. If the peer stopped in the middle of a pull, one or two arrays end only when it
  continues or dies. Until then, data of other peers over the same server may not arrive. So nobody
  waits for these arrays, and each peer is read over a server of its own, which is replaced when a
  pull has failed.
- An offer has a new random number, which is used once. The rest of an incomplete pull is gone.
- An offer that no peer has pulled is pulled by its own node, completely, which frees it.
- A server that no longer serves its own node is replaced. If its process was stopped while others
  broke their pulls, it may serve nobody after it continues.
- A connection takes five file descriptors, and the process aborts when there are none. So a pull
  waits for a connection, of which a peer has a few, and for descriptors. A server for a peer that
  nothing is read from is closed when there are many, or few descriptors.
- A server that is deleted while it serves may end the process. So does JAX's client, which Python
  deletes when the process ends, even long after a peer has broken a pull. So the client is never
  deleted, nor is a server with open offers or running pulls (`_keep_for_ever`).
- The server listens at one address, loopback by default.
- Descriptors are compared before a pull, and digests after it (`base.check_pull`, `TransferTable`).

Four zero bytes that anybody sends to its port end the process: keep it on a network of your own.

Source: measured on jax 0.10.2, 0.11.2 and 0.12.0; neither timeouts nor errors are documented.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import resource
import secrets
import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from ....kvcache.cleanup import give_back
from .base import Fault
from .descriptors import (
    ArraySpec,
    Descriptor,
    PayloadArray,
    digest_arrays,
    is_ready,
    make_digest_key,
)
from .errors import TransportUnavailableError
from .transfer_engine import (
    MAX_FILES,
    EngineOffer,
    EnginePull,
    PullError,
    TransferEngine,
    seal,
    unseal,
)

NAME: Final = "jax"

_NUMBER: Final = struct.Struct("<Q")
_NUM_CHANNELS: Final = 4
_PARALLEL_COPIES: Final = 8
_COPY_BYTES: Final = 4 << 20
_SELF_PULL_S: Final = 1.0
_SELF_TEST_S: Final = 10.0
_STUCK_S: Final = 0.05
_MAINTAIN_EVERY_S: Final = 0.05
_MAX_PULLS_PER_PEER: Final = 16
_MAX_READERS: Final = 32
_DESCRIPTORS_PER_SERVER: Final = 1 + _NUM_CHANNELS
_DESCRIPTORS_PER_CONNECTION: Final = 1 + _NUM_CHANNELS  # at each end
_DESCRIPTORS_TO_START: Final = 32  # of JAX's client and the self-test
_SPARE_DESCRIPTORS: Final = 64  # for connections from peers, and for the rest of the process
_LOST_WORDS: Final = ("onnection", "recv")  # in the errors after a peer has ended


class JaxEngine(TransferEngine):
    """Serves JAX arrays, and reads those of others into new JAX arrays; it has no staging memory.

    The arrays of a broken pull stay in quarantine until JAX reports that they have ended.
    """

    name = NAME
    copies_offers = False
    room = "free connection or file descriptor"

    def __init__(self, host: str = "127.0.0.1") -> None:
        """Start the server, and pull from it.

        Args:
            host: numeric address that peers connect to; not the address of all interfaces.

        Raises:
            TransportUnavailableError: if JAX has no transfers here, they do not work, or there are
                too few file descriptors.
        """
        _check_host(host)
        needed = _DESCRIPTORS_TO_START + _SPARE_DESCRIPTORS
        if (free := num_free_descriptors()) < needed:
            raise TransportUnavailableError(
                f"jax transfers need {needed} file descriptors, and {free} are free (`ulimit -n`)"
            )
        self._host = f"[{host}]" if ":" in host else host
        self._device = jax.local_devices()[0]
        _keep_for_ever(self._device.client)
        self._server = self._start()
        self.address: str = self._server.address()
        # By the address of their peer, the last used at the end.
        self._readers: dict[str, JaxReader] = {}
        self._quarantine: list[JaxPull] = []
        self.num_open = 0  # offers of the server that somebody may pull, or is pulling
        _test(self)
        self.num_open = 0

    def _start(self) -> Any:
        try:
            from jax.experimental import transfer
        except ImportError as error:
            raise TransportUnavailableError("jax.experimental.transfer is Linux only") from error
        try:
            return transfer.start_transfer_server(
                self._device.client,
                f"{self._host}:0",
                [f"{self._host}:0"] * _NUM_CHANNELS,
                max_num_parallel_copies=_PARALLEL_COPIES,
                transfer_size=_COPY_BYTES,
                use_raw_buffers=False,  # raw buffers serve later content of donated memory
            )
        except Exception as error:  # JAX's own types, which differ by version
            raise TransportUnavailableError(
                f"no transfer server at {self._host}:0: {_first_line(error)}"
            ) from error

    def offer(self, arrays: Sequence[PayloadArray]) -> JaxOffer:
        """See `TransferEngine.offer`."""
        # A copy: on CPU, `device_put` would share the memory of a NumPy array.
        served = [
            jnp.array(each, copy=True, device=self._device)
            if isinstance(each, np.ndarray)
            else each
            for each in arrays
        ]
        number = secrets.randbits(63)
        specs = tuple([ArraySpec(tuple(each.shape), str(each.dtype)) for each in served])
        offer = JaxOffer(self, self.address, number, specs)
        self.num_open += 1  # first: at worst, the server is kept without need
        self._server.await_pull(number, served)  # last: nothing but a pull takes it back
        return offer

    def probe(self) -> JaxPull:
        """Pull a small array from this node itself, which takes milliseconds."""
        # It must not compile anything: it runs beside steps, which count compilations.
        offer = self.offer([jax.device_put(np.zeros(1, np.int8), self._device)])
        self.num_open -= 1  # until it is pulled, `close` finds its reader
        return self.begin(offer.address, offer.number, offer.specs)

    def replace_server(self) -> None:
        """Start another server in place of the current one, whose offers are lost."""
        self._readers.pop(self.address, None)
        self._forget_offers()
        _keep_for_ever(self._server)
        self._server = self._start()
        self.address = self._server.address()
        self.num_open = 0

    def _forget_offers(self) -> None:
        reset = getattr(self._server, "_reset_rendevous_table", None)
        if reset is not None:
            reset()

    def pull(self, route: bytes, descriptor: Descriptor, digest_key: bytes) -> JaxPull | None:
        """See `TransferEngine.pull`."""
        route = unseal(route)
        address = route[_NUMBER.size :].decode("ascii", "replace")
        if len(route) <= _NUMBER.size or not _is_address(address):
            raise PullError(Fault.MISMATCH, "no address of a transfer server")
        if not self.has_room(address, 1):
            return None
        pull = self.begin(address, _NUMBER.unpack_from(route)[0], descriptor.arrays)
        pull.digest_key = digest_key
        return pull

    def begin(self, address: str, number: int, specs: Sequence[ArraySpec]) -> JaxPull:
        """Pull the offer of a number from the server at an address; see `has_room`.

        Raises:
            PullError: if the pull fails at once.
        """
        reader = self._readers.pop(address, None)
        if reader is None:
            try:
                reader = JaxReader(self._start(), address, self._device)
            except TransportUnavailableError as error:
                raise PullError(Fault.FAILED, _first_line(error)) from error
        self._readers[address] = reader
        return reader.begin(number, specs, self._quarantine_pull)

    def has_room(self, address: str, num_pulls: int) -> bool:
        """Whether some pulls from an address may begin; it closes servers that read nothing."""
        reader = self._readers.get(address)
        num_idle = 0 if reader is None else reader.num_idle
        if reader is not None and reader.num_running + num_pulls > _MAX_PULLS_PER_PEER:
            return False
        num_new = max(0, num_pulls - num_idle)
        if not num_new:
            return True
        num_ends = 2 if address == self.address else 1
        needed = num_new * num_ends * _DESCRIPTORS_PER_CONNECTION
        needed += _DESCRIPTORS_PER_SERVER if reader is None else 0
        unused = [
            key for key, each in self._readers.items() if not each.num_running and key != address
        ]
        while unused and not self._has_descriptors(needed, is_new=reader is None):
            del self._readers[unused.pop(0)]
        return self._has_descriptors(needed, is_new=reader is None)

    def _has_descriptors(self, needed: int, *, is_new: bool) -> bool:
        """Whether some descriptors may be taken, for a new reader or one that is there."""
        if is_new and len(self._readers) >= _MAX_READERS:
            return False
        used = _DESCRIPTORS_PER_SERVER
        for address, reader in self._readers.items():
            num_ends = 2 if address == self.address else 1
            num_connections = reader.num_running + reader.num_idle
            used += _DESCRIPTORS_PER_SERVER
            used += num_connections * num_ends * _DESCRIPTORS_PER_CONNECTION
        if used + needed > MAX_FILES:
            return False
        return num_free_descriptors() >= needed + _SPARE_DESCRIPTORS

    def _quarantine_pull(self, pull: JaxPull) -> None:
        """Keep a broken pull until it has ended, and read its peer over another server."""
        readers = {
            address: reader
            for address, reader in self._readers.items()
            if reader is not pull.reader
        }
        self._quarantine.append(pull)
        self._readers = readers

    def maintain(self) -> None:
        """See `TransferEngine.maintain`."""
        self._quarantine = [pull for pull in self._quarantine if not pull.has_ended()]

    @property
    def maintain_every_s(self) -> float | None:
        """See `TransferEngine.maintain_every_s`."""
        return _MAINTAIN_EVERY_S if self._quarantine else None

    @property
    def quarantined_bytes(self) -> int:
        """See `TransferEngine.quarantined_bytes`."""
        return sum(pull.num_bytes for pull in self._quarantine)

    def close(self) -> None:
        """See `TransferEngine.close`; dropping the server is the only way to stop it.

        What still serves or reads is kept until the process ends: the server, and those of peers.
        """
        try:
            give_back(self._forget_offers, self._keep_busy, self._readers.clear)
        finally:
            self._server = None

    def _keep_busy(self) -> None:
        """Keep what still serves or reads, unless it is known that nothing does."""
        busy = {each for each in self._readers.values() if each.num_running}
        busy |= {pull.reader for pull in self._quarantine if not pull.has_ended()}
        kept = (*busy, self._server) if busy or self.num_open else ()
        give_back(*[partial(_keep_for_ever, each) for each in kept])


class JaxOffer(EngineOffer):
    """Arrays that one pull may read.

    Attributes:
        address: address of the server.
        number, specs: number and layout of the offer.
    """

    def __init__(
        self, engine: JaxEngine, address: str, number: int, specs: tuple[ArraySpec, ...]
    ) -> None:
        self.route = seal(_NUMBER.pack(number) + address.encode())
        self.address = address
        self.number = number
        self.specs = specs
        self._engine = engine
        self._self_pull: JaxPull | None = None
        self._probe: JaxPull | None = None
        self._self_pull_until = 0.0
        self._is_waiting = False  # for connections to pull it

    def is_ready(self) -> bool:
        """See `EngineOffer.is_ready`."""
        return True

    def was_read(self) -> bool:
        """See `EngineOffer.was_read`: JAX does not tell."""
        return False

    def withdraw(self, was_read: bool) -> None:
        """See `EngineOffer.withdraw`: pull the whole offer, unless D has."""
        self._is_waiting = not was_read
        if self._is_waiting:
            self._begin_self_pull()
        else:
            self._close()

    def _begin_self_pull(self) -> None:
        """Begin to pull the offer, unless it went with its server or there is no room."""
        engine = self._engine
        if self.address != engine.address:
            self._is_waiting = False
        elif engine.has_room(self.address, 2):
            try:
                self._self_pull = engine.begin(self.address, self.number, self.specs)
                self._probe = engine.probe()
            except PullError:  # the server serves nobody
                self._abandon()
                engine.replace_server()
            self._is_waiting = False
            self._self_pull_until = time.monotonic() + _SELF_PULL_S

    def is_withdrawn(self) -> bool:
        """See `EngineOffer.is_withdrawn`.

        If the node's own pull does not end, either D has begun to pull the offer, or the server
        serves nobody any more, which the probe tells.
        """
        if self._is_waiting:
            self._begin_self_pull()
        if self._is_waiting:
            return False
        if self._self_pull is not None and _end_if_arrived(self._self_pull):
            if not self._self_pull.arrays:  # it has not failed
                self._close()
            self._self_pull = None
        if self._probe is not None and _end_if_arrived(self._probe):
            self._probe = None
        if self._self_pull is None and self._probe is None:
            return True
        if time.monotonic() < self._self_pull_until:
            return False
        serves_nobody = self._self_pull is not None and self._probe is not None
        self._abandon()
        if serves_nobody and self.address == self._engine.address:
            self._engine.replace_server()
        return True

    def _close(self) -> None:
        """Count the offer as open no more: it was pulled, here or by D."""
        if self.address == self._engine.address:
            self._engine.num_open -= 1

    def _abandon(self) -> None:
        """Abandon the node's own pulls that have not ended."""
        pulls = [each for each in (self._self_pull, self._probe) if each is not None]
        give_back(*[pull.abandon for pull in pulls])
        self._self_pull = self._probe = None


class JaxReader:
    """Reads one peer, over a server that reads no other.

    A connection serves one pull at a time, so breaking it ends no other pull. The connection of a
    successful pull is used again, because new connections are slow at first.

    Attributes:
        num_running: number of connections that pulls use.
    """

    def __init__(self, server: Any, address: str, device: jax.Device) -> None:
        self._server = server
        self._address = address
        self._sharding = jax.sharding.SingleDeviceSharding(device)
        self._idle: list[Any] = []
        self.num_running = 0

    @property
    def num_idle(self) -> int:
        """Number of connections that no pull uses."""
        return len(self._idle)

    def begin(
        self, number: int, specs: Sequence[ArraySpec], on_abandon: Callable[[JaxPull], None]
    ) -> JaxPull:
        """Pull the offer of a number.

        Args:
            number, specs: number and layout of the offer.
            on_abandon: called with the pull when it is abandoned.

        Raises:
            PullError: if the pull fails at once.
        """
        wanted = [
            jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype), sharding=self._sharding)  # type: ignore[no-untyped-call]  # JAX's
            for spec in specs
        ]
        try:
            connection = self._idle.pop() if self._idle else self._server.connect(self._address)
            arrays = tuple(connection.pull(number, wanted))
        except Exception as error:
            raise PullError(Fault.FAILED, _first_line(error)) from error
        try:
            pull = JaxPull(self, connection, arrays, on_abandon)
        except BaseException:
            give_back(connection._poison_connection)
            raise
        self.num_running += 1
        return pull

    def reuse(self, connection: Any) -> None:
        """Keep the connection of a successful pull for the next one."""
        self._idle.append(connection)
        self.num_running -= 1


class JaxPull(EnginePull):
    """Arrays that arrive some time, or never.

    Attributes:
        reader: the reader of the peer.
        num_bytes: size of all arrays.
    """

    arrays: tuple[jax.Array, ...]

    def __init__(
        self,
        reader: JaxReader,
        connection: Any,
        arrays: tuple[jax.Array, ...],
        on_abandon: Callable[[JaxPull], None],
    ) -> None:
        self.reader = reader
        self.arrays = arrays
        self.num_bytes = sum(array.nbytes for array in arrays)
        self._connection = connection
        self._is_connected = True  # until another pull may use the connection
        self._on_abandon = on_abandon
        self._num_arrived = 0

    def advance(self) -> int:
        """See `EnginePull.advance`."""
        try:
            for array in self.arrays[self._num_arrived :]:
                if not is_ready(array):
                    break
                array.block_until_ready()
                self._num_arrived += 1
        except jax.errors.JaxRuntimeError as error:
            lost = any(word in str(error) for word in _LOST_WORDS)
            fault = Fault.PEER_LOST if lost else Fault.FAILED
            raise PullError(fault, _first_line(error)) from None
        if self._is_connected and self._num_arrived == len(self.arrays):
            self.reader.reuse(self._connection)
            self._is_connected = False
        return self._num_arrived

    def has_ended(self) -> bool:
        """Whether every array has arrived or failed."""
        return all(is_ready(array) for array in self.arrays)

    def free(self) -> None:
        """See `EnginePull.free`."""
        self.arrays = ()

    def abandon(self) -> None:
        """See `EnginePull.abandon`: break the connection, unless everything has arrived."""
        if self._is_connected:
            self._connection._poison_connection()
            self._on_abandon(self)
            self._is_connected = False
            self.reader.num_running -= 1


def _test(engine: JaxEngine) -> None:
    """Break a pull that never ends, then pull from this node itself.

    Raises:
        TransportUnavailableError: if either does not work.
    """
    sent = [
        jnp.arange(4096, dtype=jnp.float32).reshape(4, 1024).astype(dtype)
        for dtype in (jnp.bfloat16, jnp.float32, jnp.int8)
    ]
    specs = [ArraySpec(tuple(each.shape), str(each.dtype)) for each in sent]
    try:
        stuck = engine.begin(engine.address, secrets.randbits(63), specs)
        time.sleep(_STUCK_S)
        if stuck.has_ended():
            raise TransportUnavailableError("a pull of an array that was never offered has ended")
        stuck.abandon()
        _await(stuck.has_ended, "a broken pull")
        offered = engine.offer(sent)
        pull = engine.begin(engine.address, offered.number, specs)
        _await(pull.has_ended, "a pull from this node itself")
        pull.advance()
        key = make_digest_key()
        if digest_arrays(pull.arrays, key) != digest_arrays(sent, key):
            raise TransportUnavailableError("a pull from this node itself gave other bytes")
    except (PullError, AttributeError) as error:
        raise TransportUnavailableError(
            f"jax.experimental.transfer failed its self-test: {_first_line(error)}"
        ) from error


def _end_if_arrived(pull: JaxPull) -> bool:
    """Free a pull whose arrays have all arrived, or abandon one that failed; return whether."""
    try:
        if pull.advance() < len(pull.arrays):
            return False
        pull.free()
    except PullError:
        pull.abandon()
    return True


def _keep_for_ever(each: object) -> None:
    """Never delete an object, not even when the process ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def num_free_descriptors() -> int:
    """Number of file descriptors that this process may still open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd"))


def _await(is_true: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + _SELF_TEST_S
    while not is_true():
        if time.monotonic() > end:
            raise TransportUnavailableError(f"{what} did not end within {_SELF_TEST_S:g} s")
        time.sleep(1e-3)


def _check_host(host: str) -> None:
    try:
        is_any = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        raise TransportUnavailableError(f"host must be an IP address, got {host!r}") from None
    if is_any:
        raise TransportUnavailableError(
            f"{host} means all interfaces, and jax transfers know no secret: name one address"
        )


def _is_address(text: str) -> bool:
    """Whether a text is an IP address and a port, as a server's address is."""
    host, _, port = text.rpartition(":")
    try:
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
