"""Arguments that opening a transport refuses, and routes that an engine refuses."""

from __future__ import annotations

import pytest

from radixkv.scheduler.nodes.transport import (
    Fault,
    TransportArgumentError,
    TransportUnavailableError,
    describe,
    nixl_agent,
    open_transport,
)
from radixkv.scheduler.nodes.transport.jax_engine import JaxEngine
from radixkv.scheduler.nodes.transport.nixl_engine import NixlEngine
from radixkv.scheduler.nodes.transport.transfer_engine import PullError

from .conformance import arrays


def test_an_unknown_name_and_an_invalid_address_are_refused() -> None:
    with pytest.raises(
        TransportArgumentError,
        match=r"^transport must be one of jax, nixl, got 'pigeon'$",
    ):
        open_transport("pigeon")
    with pytest.raises(TransportArgumentError, match=r"^host must be an IP address, got 'here'$"):
        open_transport("jax", host="here")


def test_jax_listens_at_one_address() -> None:
    with pytest.raises(TransportUnavailableError, match=r"^0\.0\.0\.0 means all interfaces"):
        open_transport("jax", host="0.0.0.0")
    with pytest.raises(
        TransportUnavailableError, match=r"^no transfer server at 192\.0\.2\.77:0: "
    ):
        open_transport("jax", host="192.0.2.77")


def test_missing_nixl_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "_PACKAGES", ("radixkv_no_such_package",))
    with pytest.raises(
        TransportUnavailableError,
        match=r"^NIXL is not installed: pip install --no-deps nixl-cu12$",
    ):
        open_transport("nixl")


@pytest.mark.parametrize("route", [b"", b"12345678", b"12345678nowhere", b"12345678host:1"])
def test_jax_refuses_an_invalid_address(route: bytes) -> None:
    with pytest.raises(PullError, match=r"^no address of a transfer server$") as caught:
        JaxEngine().pull(route, describe(arrays(), num_blocks=3))
    assert caught.value.fault is Fault.MISMATCH


@pytest.mark.parametrize("route", [b"", bytes(16), bytes(100_000)])
def test_nixl_refuses_invalid_metadata(route: bytes) -> None:
    engine = NixlEngine(1 << 20)
    with pytest.raises(PullError, match=r"^no metadata of a NIXL agent$"):
        engine.pull(route, describe(arrays(), num_blocks=3))
    with pytest.raises(PullError) as caught:
        engine.pull(b"12345678 12345678 not metadata", describe(arrays(), num_blocks=3))
    assert caught.value.fault is Fault.FAILED
    assert engine._pool.num_free_bytes == 1 << 20
    engine.close()
