"""Transfers of JAX between two servers."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator

import jax.numpy as jnp
import pytest

from radixkv.scheduler.transport import ArraySpec, Fault
from radixkv.scheduler.transport.jax_engine import JaxEngine
from radixkv.scheduler.transport.jax_reader import JaxPull
from radixkv.scheduler.transport.threaded import ThreadedTransport

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
    """A pull of what nobody offers: that is how one from a server that serves nobody looks."""
    return engine.begin(engine.address, secrets.randbits(63), [ArraySpec((1,), "int8")])


def withdraw_what_is_pulled(engine: JaxEngine, *, serves: bool) -> None:
    """Withdraw an offer that cannot be pulled any more, as D has begun to.

    Its time is over when the engine has had all the time that it needs to serve its own node.
    """
    offer = engine.offer([jnp.zeros(4)])
    offer.number = secrets.randbits(63)
    offer.withdraw(was_read=False)
    offer._own_until = float("inf")
    assert offer._probe is not None
    while serves and not offer._probe.has_ended():
        time.sleep(1e-3)
    assert not offer.is_withdrawn()
    offer._own_until = 0.0
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
