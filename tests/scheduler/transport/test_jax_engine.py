"""Transfers of JAX between two servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from radixkv.scheduler.transport import Fault
from radixkv.scheduler.transport.jax_engine import JaxEngine
from radixkv.scheduler.transport.threaded import ThreadedTransport

from .conformance import Pair, TransportConformance


@pytest.fixture
def pair() -> Iterator[Pair]:
    ends = Pair(ThreadedTransport(JaxEngine()), ThreadedTransport(JaxEngine()))
    yield ends
    for end in ends:
        end.close()


class TestJax(TransportConformance):
    withdrawn_faults = (Fault.TIMED_OUT,)
