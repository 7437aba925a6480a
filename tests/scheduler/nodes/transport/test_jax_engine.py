"""JaxEngine: transfers between two servers."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator

import jax.numpy as jnp
import pytest

from radixkv.scheduler.nodes.transport import (
    ArraySpec,
    Fault,
    TransportUnavailableError,
    jax_engine,
)
from radixkv.scheduler.nodes.transport.jax_engine import JaxEngine, JaxPull
from radixkv.scheduler.nodes.transport.threaded import ThreadedTransport

from .conformance import EngineConformance, Pair


@pytest.fixture
def pair() -> Iterator[Pair]:
    ends = Pair(ThreadedTransport(JaxEngine()), ThreadedTransport(JaxEngine()))
    yield ends
    for end in ends:
        end.close()


class TestJax(EngineConformance):
    withdrawn_fault = Fault.TIMED_OUT


def never(engine: JaxEngine) -> JaxPull:
    """A pull that never ends, as from a server that serves nobody."""
    return engine.begin(engine.address, secrets.randbits(63), [ArraySpec((1,), "int8")])


def withdraw_what_is_pulled(engine: JaxEngine, *, serves: bool) -> None:
    """Withdraw an offer that D has begun to pull, so that P cannot pull it.

    Its time is over when the engine has had all the time that it needs to serve its own node.
    """
    offer = engine.offer([jnp.zeros(4)])
    offer.number = secrets.randbits(63)
    offer.withdraw(was_read=False)
    offer._self_pull_until = float("inf")
    assert offer._probe is not None
    while serves and not offer._probe.has_ended():
        time.sleep(1e-3)
    assert not offer.is_withdrawn()
    offer._self_pull_until = 0.0
    assert offer.is_withdrawn()


def test_a_server_that_serves_nobody_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, reader = JaxEngine(), JaxEngine()
    address = engine.address
    withdraw_what_is_pulled(engine, serves=True)
    assert engine.address == address
    old = engine.offer([jnp.zeros(4)])
    with monkeypatch.context() as patch:
        patch.setattr(JaxEngine, "probe", never)
        withdraw_what_is_pulled(engine, serves=False)
    assert engine.address != address
    old.withdraw(was_read=False)
    assert old.is_withdrawn()  # it went with its server
    offer = engine.offer([jnp.ones(4)])
    pull = reader.begin(offer.address, offer.number, offer.specs)
    while pull.advance() < 1:
        time.sleep(1e-3)
    assert pull.arrays[0].tolist() == [1.0] * 4
    engine.close()
    reader.close()


def test_pulls_one_after_the_other_share_a_connection_and_others_do_not() -> None:
    engine, reader = JaxEngine(), JaxEngine()

    def begin() -> JaxPull:
        offer = engine.offer([jnp.ones(4)])
        return reader.begin(offer.address, offer.number, offer.specs)

    def end(pull: JaxPull) -> None:
        while pull.advance() < 1:
            time.sleep(1e-3)
        pull.free()

    first = begin()
    end(first)
    second, third = begin(), begin()
    assert second._connection is first._connection is not third._connection
    second.abandon()
    end(third)  # of a server that is not used any more, as it is that of a broken pull
    assert begin().reader is not third.reader
    engine.close()
    reader.close()


def ends_at_once(pull: JaxPull) -> bool:
    return True


def breaks_nothing(pull: JaxPull) -> None:
    """Like a version of JAX whose connections cannot be broken."""


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("has_ended", ends_at_once, "a pull of an array that was never offered has ended"),
        ("abandon", breaks_nothing, "a broken pull did not end within 0 s"),
    ],
)
def test_a_server_that_fails_its_self_test_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: object, text: str
) -> None:
    monkeypatch.setattr(jax_engine, "_SELF_TEST_S", 0.0)
    monkeypatch.setattr(JaxPull, name, value)
    with pytest.raises(TransportUnavailableError) as error:
        JaxEngine()
    assert str(error.value) == text


def test_a_server_that_gives_other_bytes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter(range(10))
    monkeypatch.setattr(jax_engine, "digest_arrays", lambda arrays: next(numbers))
    with pytest.raises(
        TransportUnavailableError, match=r"^a pull from this node itself gave other bytes$"
    ):
        JaxEngine()


def test_a_host_is_a_number() -> None:
    with pytest.raises(
        TransportUnavailableError, match=r"^host must be an IP address, got 'here'$"
    ):
        JaxEngine("here")
