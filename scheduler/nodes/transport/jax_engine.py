"""`jax.experimental.transfer` as an engine, behind a guard.

As it is, a pull from a peer that has stopped, or of what is not offered, never ends; another dtype
of the same size is taken as if it were right; what is offered and never pulled is never freed; and
anybody who guesses a number of 64 bits may read. So here

- no two pulls share a connection, which is broken at the deadline: that ends its arrays with an
  error. Of a peer that stopped midway, one or two arrays end only when it goes on or dies, and
  until then, what other peers send over the same server may not arrive. So nobody waits for those
  arrays, and each peer is read by a server of its own, which is replaced when a pull has failed;
- an offer has a new random number, which is used once: what a pull did not get is gone;
- an offer that nobody has pulled is pulled by its own node, all of it, and so freed;
- a server that does not serve its own node any more is replaced: one whose process was stopped
  while others broke their pulls may serve nobody when it goes on;
- the server listens at one address, on loopback if nothing else is said;
- descriptors are compared before, and digests after (`base.refusal`, `EngineWork`).

Four zero bytes that anybody sends to its port end the process: keep it on a network of your own.

Source: measured on jax 0.10.2, 0.11.2 and 0.12.0; neither timeouts nor errors are documented.
"""

from __future__ import annotations

import ipaddress
import secrets
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from .base import Fault
from .descriptors import (
    ArraySpec,
    Descriptor,
    PayloadArray,
    digest_arrays,
)
from .errors import TransportUnavailableError
from .jax_reader import (
    JaxPull,
    JaxReader,
    first_line,
)
from .transfer_engine import (
    Engine,
    EngineOffer,
    PullError,
)

NAME: Final = "jax"

_NUMBER: Final = struct.Struct("<Q")
_NUM_CHANNELS: Final = 4
_PARALLEL_COPIES: Final = 8
_COPY_BYTES: Final = 4 << 20
_OWN_PULL_S: Final = 1.0
_SELF_TEST_S: Final = 10.0
_STUCK_S: Final = 0.05
_TEND_S: Final = 0.05


class JaxEngine(Engine):
    """Serves JAX arrays, and reads others' into new JAX arrays. There is no staging memory of ours.

    A broken pull keeps its arrays until JAX says that they have ended: that is the quarantine.
    """

    name = NAME
    copies_offers = False

    def __init__(self, host: str = "127.0.0.1") -> None:
        """Start the server, and pull something from itself.

        Args:
            host: the address that peers connect to, as a number; not that of all interfaces.

        Raises:
            TransportUnavailableError: if JAX has no transfers here, or they do not work.
        """
        _check_host(host)
        self._host = f"[{host}]" if ":" in host else host
        self._device = jax.local_devices()[0]
        self._server = self._start()
        self.address: str = self._server.address()
        self._readers: dict[str, JaxReader] = {}  # by the address of the one peer they read
        self._quarantine: list[JaxPull] = []
        self._replaced: list[Any] = []  # to let go of one that has connections ends the process
        _test(self)

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
                use_raw_buffers=False,  # raw ones serve what came into donated memory later
            )
        except Exception as error:  # JAX's own types, which differ by version
            raise TransportUnavailableError(
                f"no transfer server at {self._host}:0: {first_line(error)}"
            ) from error

    def offer(self, arrays: Sequence[PayloadArray]) -> JaxOffer:
        """See `Engine.offer`."""
        # A copy: on CPU, `device_put` would share the memory of a NumPy array.
        served = [
            jnp.array(each, copy=True, device=self._device)
            if isinstance(each, np.ndarray)
            else each
            for each in arrays
        ]
        number = secrets.randbits(63)
        self._server.await_pull(number, served)
        specs = tuple([ArraySpec(tuple(each.shape), str(each.dtype)) for each in served])
        return JaxOffer(self, self.address, number, specs)

    def probe(self) -> JaxPull:
        """Pull something small from this node itself, which takes milliseconds."""
        # Nothing is compiled for it: this runs beside steps, which count what is compiled.
        offer = self.offer([jax.device_put(np.zeros(1, np.int8), self._device)])
        return self.begin(offer.address, offer.number, offer.specs)

    def replace_server(self) -> None:
        """Serve from another server from now on; what the old one was to serve is gone."""
        self._readers.pop(self.address, None)
        self._forget_offers()
        self._replaced.append(self._server)
        self._server = self._start()
        self.address = self._server.address()

    def _forget_offers(self) -> None:
        reset = getattr(self._server, "_reset_rendevous_table", None)
        if reset is not None:
            reset()

    def pull(self, route: bytes, descriptor: Descriptor) -> JaxPull:
        """See `Engine.pull`."""
        address = route[_NUMBER.size :].decode("ascii", "replace")
        if len(route) <= _NUMBER.size or not _is_address(address):
            raise PullError(Fault.MISMATCH, "no address of a transfer server")
        return self.begin(address, _NUMBER.unpack_from(route)[0], descriptor.arrays)

    def begin(self, address: str, number: int, specs: Sequence[ArraySpec]) -> JaxPull:
        """Pull what is offered by a number.

        Raises:
            PullError: if it fails at once.
        """
        if address not in self._readers:
            try:
                server = self._start()
            except TransportUnavailableError as error:
                raise PullError(Fault.FAILED, first_line(error)) from error
            self._readers[address] = JaxReader(server, address, self._device)
        return self._readers[address].begin(number, specs, self._abandoned)

    def _abandoned(self, pull: JaxPull) -> None:
        """Keep a broken pull until it has ended, and read its peer by another server."""
        self._quarantine.append(pull)
        self._readers = {
            address: reader
            for address, reader in self._readers.items()
            if reader is not pull.reader
        }

    def tend(self) -> None:
        """See `Engine.tend`."""
        self._quarantine = [pull for pull in self._quarantine if not pull.has_ended()]

    @property
    def tend_s(self) -> float | None:
        """See `Engine.tend_s`."""
        return _TEND_S if self._quarantine else None

    @property
    def quarantined_bytes(self) -> int:
        """See `Engine.quarantined_bytes`."""
        return sum(pull.num_bytes for pull in self._quarantine)

    def close(self) -> None:
        """See `Engine.close`; there is no other way to stop a server than to forget it."""
        self._forget_offers()
        self._server = None
        self._readers.clear()


class JaxOffer(EngineOffer):
    """Arrays that one pull may have.

    Attributes:
        address: of the server that has them.
        number, specs: by which they are pulled.
    """

    def __init__(
        self, engine: JaxEngine, address: str, number: int, specs: tuple[ArraySpec, ...]
    ) -> None:
        self.route = _NUMBER.pack(number) + address.encode()
        self.address = address
        self.number = number
        self.specs = specs
        self._engine = engine
        self._own: JaxPull | None = None
        self._probe: JaxPull | None = None
        self._own_until = 0.0

    def was_read(self) -> bool:
        """See `EngineOffer.was_read`: JAX does not say."""
        return False

    def withdraw(self, was_read: bool) -> None:
        """See `EngineOffer.withdraw`: pull it, all of it, unless D has."""
        if not was_read and self.address == self._engine.address:
            self._own = self._engine.begin(self.address, self.number, self.specs)
            self._probe = self._engine.probe()
            self._own_until = time.monotonic() + _OWN_PULL_S

    def is_withdrawn(self) -> bool:
        """See `EngineOffer.is_withdrawn`.

        If it does not come, D has begun to pull it; or the server serves nobody any more.
        """
        if self._own is None or self._probe is None:
            return True
        try:
            done = self._own.advance() == len(self.specs)
        except PullError:
            done = True
        if not done and time.monotonic() < self._own_until:
            return False
        if not done:
            self._own.abandon()
            if not self._probe.has_ended() and self.address == self._engine.address:
                self._probe.abandon()
                self._engine.replace_server()
        self._own = self._probe = None
        return True


def _test(engine: JaxEngine) -> None:
    """Pull from oneself, and break a pull that does not end, after which others still work.

    Raises:
        TransportUnavailableError: if it does not go so.
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
            raise TransportUnavailableError("a pull of what was never offered has ended")
        stuck.abandon()
        _await(stuck.has_ended, "a pull that was broken")
        offered = engine.offer(sent)
        pull = engine.begin(engine.address, offered.number, specs)
        _await(pull.has_ended, "a pull from this node itself")
        pull.advance()
        if digest_arrays(pull.arrays) != digest_arrays(sent):
            raise TransportUnavailableError("a pull from this node itself gave other bytes")
    except (PullError, AttributeError) as error:
        raise TransportUnavailableError(
            f"jax.experimental.transfer failed its self-test: {first_line(error)}"
        ) from error


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
        raise TransportUnavailableError(f"{host!r} is no IP address") from None
    if is_any:
        raise TransportUnavailableError(
            f"{host} is every interface: jax transfers know no secret, so name one address"
        )


def _is_address(text: str) -> bool:
    """Whether it is an IP address and a port, as a server gives its own."""
    host, _, port = text.rpartition(":")
    try:
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16
