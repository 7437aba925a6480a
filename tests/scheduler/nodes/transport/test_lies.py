"""Whatever a peer says of an offer, the next good pull of the real engine succeeds."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixkv.scheduler.nodes.transport import (
    ArraySpec,
    Fault,
    Offered,
    PullFailed,
    PullInfo,
    Received,
    describe,
)
from radixkv.scheduler.nodes.transport.jax_engine import JaxEngine
from radixkv.scheduler.nodes.transport.nixl_agent import NixlAgent
from radixkv.scheduler.nodes.transport.nixl_engine import _LOCATION, NixlEngine
from radixkv.scheduler.nodes.transport.threaded import ThreadedTransport
from radixkv.scheduler.nodes.transport.transfer_engine import TransferEngine, seal

from .conformance import LATE_S, SOON_S, part_id, wait

ARRAYS: list[npt.NDArray[Any]] = [np.arange(64, dtype=np.float32), np.ones((2, 8), np.int8)]


class Ends:
    """A node that offers, and one that pulls what it is told; both live through the module."""

    def __init__(self, new: Callable[[], TransferEngine]) -> None:
        self.engine = new()
        self.prefill, self.decode = ThreadedTransport(self.engine), ThreadedTransport(new())
        self._parts = count()

    def offer(self) -> PullInfo:
        part = part_id(next(self._parts))
        described = describe(ARRAYS, num_blocks=1)
        self.prefill.offer(part, ARRAYS, described, ttl_s=LATE_S)
        return wait(self.prefill, Offered).info

    def pull(self, info: PullInfo, timeout_s: float = SOON_S) -> Fault | None:
        """Pull a part, and return its fault; the bytes that arrive are right."""
        self.decode.pull(info.part_id, info, info.descriptor, timeout_s=timeout_s)
        while not (events := self.decode.poll()):
            pass
        (event,) = events
        if isinstance(event, PullFailed):
            return event.fault
        assert isinstance(event, Received)
        for array, expected in zip(event.arrays, ARRAYS, strict=True):
            assert np.asarray(array).tobytes() == expected.tobytes()
        self.decode.release(info.part_id)
        return None

    def check(self) -> None:
        assert self.pull(self.offer(), LATE_S) is None

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()


@pytest.fixture(scope="module", params=["jax", "nixl"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    made = Ends(JaxEngine if request.param == "jax" else lambda: NixlEngine(1 << 20))
    yield made
    made.close()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_route_costs_one_pull(ends: Ends, data: st.DataObject) -> None:
    info = ends.offer()
    route = bytearray(info.route)
    place = data.draw(st.integers(0, len(route) - 1))
    match data.draw(st.sampled_from(["flip", "cut", "insert", "other"])):
        case "flip":
            route[place] ^= 1 << data.draw(st.integers(0, 7))
        case "cut":
            del route[place:]
        case "insert":
            route[place:place] = data.draw(st.binary(min_size=1, max_size=32))
        case "other":
            route = bytearray(data.draw(st.binary(max_size=600)))
    # Only the digest may be what it was: one in 2**64 others is right, too.
    assert ends.pull(replace(info, route=bytes(route))) is Fault.MISMATCH
    ends.check()


@pytest.mark.parametrize(
    "specs",
    [
        [ArraySpec((63,), "float32"), ArraySpec((2, 8), "int8")],
        [ArraySpec((65,), "float32"), ArraySpec((2, 8), "int8")],
        [ArraySpec((64,), "int32"), ArraySpec((2, 8), "int8")],
        [ArraySpec((64,), "float32")],
        [ArraySpec((64,), "float32"), ArraySpec((2, 8), "int8"), ArraySpec((1,), "int8")],
        [ArraySpec((1 << 16,), "float32"), ArraySpec((2, 8), "int8")],
    ],
    ids=["smaller", "larger", "type", "fewer", "more", "huge"],
)
def test_arrays_that_are_not_as_described(ends: Ends, specs: list[ArraySpec]) -> None:
    """P and D agree on what should be offered, and P offers something else."""
    info = ends.offer()
    lie = replace(info, descriptor=replace(info.descriptor, arrays=tuple(specs)))
    has_these_bytes = lie.descriptor.num_bytes == info.descriptor.num_bytes
    timeout_s = LATE_S if has_these_bytes else SOON_S
    assert (ends.pull(lie, timeout_s) is None) == has_these_bytes
    ends.check()


def test_wrong_digests(ends: Ends) -> None:
    info = ends.offer()
    wrong = tuple(digest[::-1] for digest in info.digests)
    other_key = replace(ends.offer(), digest_key=secrets.token_bytes(16))
    for lie in (replace(info, digests=wrong), other_key):
        assert ends.pull(lie, LATE_S) is Fault.CORRUPT
    ends.check()


def test_what_an_engine_raises_costs_one_pull(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise UnicodeDecodeError("ascii", b"x", 0, 1, "of a peer")

    info = ends.offer()
    with monkeypatch.context() as patch:
        patch.setattr(type(ends.engine), "pull", refuse)
        ends.decode.pull(info.part_id, info, info.descriptor, timeout_s=LATE_S)
        failed = wait(ends.decode, PullFailed)
    reason = "UnicodeDecodeError: 'ascii' codec can't decode byte 0x78 in position 0: of a peer"
    assert (failed.fault, failed.reason) == (Fault.FAILED, reason)
    ends.check()


# A peer that knows how to make a route


def listener() -> socket.socket:
    """A server that accepts and says nothing."""
    return socket.create_server(("127.0.0.1", 0))


def jax_lies(engine: JaxEngine, info: PullInfo) -> Iterator[bytes]:
    number, address = info.route[8:16], info.route[16:]
    yield secrets.token_bytes(8) + address
    yield number + b"127.0.0.1:1"
    with listener() as mute:
        yield number + f"127.0.0.1:{mute.getsockname()[1]}".encode()
    yield number + b"[::1]:1"
    yield number + b"127.0.0.1:99999"
    yield number + address + b"\xff"


def nixl_lies(engine: NixlEngine, info: PullInfo) -> Iterator[bytes]:
    size = _LOCATION.size
    location, metadata = info.route[8 : 8 + size], info.route[8 + size :]
    remote, confirmation, version = _LOCATION.unpack(location)
    for address in (0, remote + (1 << 20), remote - (1 << 20), (1 << 64) - 1, 1 << 63):
        yield _LOCATION.pack(address, confirmation, version) + metadata
    name = engine._agent._name.encode()
    yield location + metadata.replace(name, b"another-" + name[8:])
    yield location + metadata.replace(name, b"\xff" * len(name))
    other = NixlAgent(1 << 12, devices="lo")  # other memory, under the name of the peer
    lie = other.metadata.replace(other._name.encode(), name)
    yield location + lie
    other.close()
    yield location + lie


def test_routes_of_a_liar(ends: Ends) -> None:
    engine, info = ends.engine, ends.offer()
    match engine:
        case JaxEngine():
            lies = jax_lies(engine, info)
        case NixlEngine():
            lies = nixl_lies(engine, info)
        case _:
            raise AssertionError(engine)
    for lie in lies:
        assert ends.pull(replace(ends.offer(), route=seal(lie))) is not None
        ends.check()
