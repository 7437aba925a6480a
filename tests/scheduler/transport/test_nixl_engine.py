"""Reads of NIXL between two agents."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from radixkv.scheduler.transport import Fault
from radixkv.scheduler.transport.nixl_engine import NixlEngine
from radixkv.scheduler.transport.threaded import ThreadedTransport

from .conformance import EngineConformance, Pair

STAGING_BYTES = 1 << 20


@pytest.fixture
def pair() -> Iterator[Pair]:
    ends = Pair(*[ThreadedTransport(NixlEngine(STAGING_BYTES)) for _ in range(2)])
    yield ends
    for end in ends:
        end.close()


class TestNixl(EngineConformance):
    withdrawn_faults = (Fault.CORRUPT,)
