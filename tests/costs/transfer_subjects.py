"""Subjects of the transfer engines, over libraries in memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from radixkv.scheduler.nodes.transport import nixl_agent
from radixkv.scheduler.nodes.transport.descriptors import describe
from radixkv.scheduler.nodes.transport.nixl_engine import NixlEngine
from radixkv.scheduler.nodes.transport.transfer_engine import seal

from .fake_libraries import Nixl, jax_engines, nixl_engines
from .measure import Operations
from .node_subjects import finish
from .subjects import Subject

ARRAYS: Final[list[npt.NDArray[Any]]] = [
    np.arange(64, dtype=np.uint8),
    np.arange(16, dtype=np.float32),
]
LAYOUT: Final = describe(ARRAYS, num_blocks=1)
KEY: Final = bytes(16)
STAGING_BYTES: Final = 1 << 15


def calls(prefill: Any, decode: Any, lost_route: bytes) -> Operations:
    """A part that is read, one that is withdrawn before, and a pull that never ends."""
    offer = yield "offer", partial(prefill.offer, ARRAYS)
    pull = yield "pull", partial(decode.pull, offer.route, LAYOUT, KEY)
    num_arrived = yield "advance", pull.advance
    assert num_arrived == len(ARRAYS)
    yield "digests", partial(pull.digests, 0, num_arrived)
    yield "free", pull.free
    yield "maintain", prefill.maintain
    yield "was_read", offer.was_read
    yield "withdraw", partial(offer.withdraw, was_read=True)
    offer = yield "offer", partial(prefill.offer, ARRAYS)
    yield "withdraw", partial(offer.withdraw, was_read=False)
    is_withdrawn = yield "is_withdrawn", offer.is_withdrawn
    assert is_withdrawn
    pull = yield "pull", partial(decode.pull, lost_route, LAYOUT, KEY)
    num_arrived = yield "advance", pull.advance
    assert num_arrived == 0
    yield "abandon", pull.abandon
    for engine in (prefill, decode):
        yield "quarantined_bytes", partial(getattr, engine, "quarantined_bytes")
        yield "maintain_every_s", partial(getattr, engine, "maintain_every_s")


def jax_calls(num_ended: int, num_idle: int) -> Operations:
    """Engines of JAX, after transfers, and with connections that no pull uses."""
    with jax_engines(2) as (_, (prefill, decode)):
        lost = seal(bytes(8) + prefill.address.encode())
        for _ in range(num_ended):
            finish(calls(prefill, decode, lost))
            decode.maintain()
        offers = [prefill.offer(ARRAYS) for _ in range(num_idle)]
        pulls = [decode.pull(offer.route, LAYOUT, KEY) for offer in offers]
        for pull in pulls:
            assert pull is not None and pull.advance() == len(ARRAYS)
            pull.free()
        yield from calls(prefill, decode, lost)
        yield "maintain", decode.maintain
        assert not decode.quarantined_bytes


def nixl_calls(num_ended: int, num_open: int) -> Operations:
    """Engines of NIXL, after transfers, and with parts in their staging memory."""
    with nixl_engines(2, STAGING_BYTES) as (nixl, (prefill, decode)):
        assert prefill.offer([np.zeros(STAGING_BYTES // 2 + 1, np.uint8)])  # D is to confirm
        for _ in range(num_ended):
            finish(nixl_transfers(nixl, prefill, decode))
        offers = [prefill.offer(ARRAYS) for _ in range(num_open)]
        pulls = [decode.pull(offer.route, LAYOUT, KEY) for offer in offers if offer is not None]
        for pull in pulls:
            assert pull is not None and pull.advance() == len(ARRAYS)
        yield from nixl_transfers(nixl, prefill, decode)


def nixl_transfers(nixl: Nixl, prefill: NixlEngine, decode: NixlEngine) -> Operations:
    """The calls, of which one pull ends after it was abandoned."""
    lost = prefill.offer(ARRAYS)
    assert lost is not None
    nixl.lost.add(prefill._agent.address + lost._slot.start)
    yield from calls(prefill, decode, lost.route)
    nixl.lost.clear()
    yield "maintain", decode.maintain
    assert not decode.quarantined_bytes
    lost.withdraw(was_read=True)


def jax_drains() -> Iterator[object]:
    """Engines of JAX, whose parts are read, withdrawn and lost."""
    with jax_engines(2) as (network, (prefill, decode)):
        while True:
            for _ in range(10):
                finish(calls(prefill, decode, seal(bytes(8) + prefill.address.encode())))
                decode.maintain()
            network.forget([prefill, decode])
            yield prefill, decode


def nixl_drains() -> Iterator[object]:
    """Engines of NIXL, whose parts are read, withdrawn and lost, and a peer of each drain."""
    with nixl_engines(2, STAGING_BYTES) as (nixl, (prefill, decode)):
        assert prefill.offer([np.zeros(STAGING_BYTES // 2 + 1, np.uint8)])  # D is to confirm
        while True:
            for _ in range(10):
                finish(nixl_transfers(nixl, prefill, decode))
            other = NixlEngine(STAGING_BYTES)
            offer = other.offer(ARRAYS)
            assert offer is not None
            with patch.object(nixl_agent, "_MAX_PEERS", 1):  # the one before is forgotten
                pull = decode.pull(offer.route, LAYOUT, KEY)
            assert pull is not None and pull.advance() == len(ARRAYS)
            pull.free()
            other.close()
            nixl.agents.pop()
            yield prefill, decode


SUBJECTS: Final = (
    Subject("the jax engine after transfers", partial(jax_calls, num_idle=2), 2, 20, has_jax=True),
    Subject("the jax engine with idle connections", partial(jax_calls, 1), 1, 14, has_jax=True),
    Subject("the nixl engine after transfers", partial(nixl_calls, num_open=2), 2, 100),
    Subject("the nixl engine with parts", partial(nixl_calls, 1), 2, 60),
)
DRAINS: Final = {"the jax engine": jax_drains, "the nixl engine": nixl_drains}
