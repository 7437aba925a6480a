"""Arguments that opening a transport refuses, and routes that an engine refuses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from radixkv.scheduler.nodes.transport import (
    Fault,
    TransportArgumentError,
    TransportUnavailableError,
    describe,
    jax_engine,
    nixl_agent,
    nixl_engine,
    open_transport,
    registry,
    storage_engine,
)
from radixkv.scheduler.nodes.transport.descriptors import make_digest_key
from radixkv.scheduler.nodes.transport.jax_engine import JaxEngine
from radixkv.scheduler.nodes.transport.nixl_engine import _LOCATION, NixlEngine
from radixkv.scheduler.nodes.transport.transfer_engine import PullError, seal

from .conformance import arrays


def test_an_unknown_name_and_an_invalid_address_are_refused() -> None:
    with pytest.raises(
        TransportArgumentError,
        match=r"^transport must be one of jax, nixl, storage, got 'pigeon'$",
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


def test_missing_cryptography_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    with pytest.raises(
        TransportUnavailableError,
        match=r"^cryptography is not installed: pip install 'radixkv\[nodes\]'$",
    ):
        open_transport("jax")


def test_missing_nixl_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "_PACKAGES", ("radixkv_no_such_package",))
    with pytest.raises(
        TransportUnavailableError,
        match=r"^NIXL is not installed: pip install --no-deps nixl-cu13, or nixl-cu12$",
    ):
        open_transport("nixl")


@pytest.mark.parametrize(
    ("host", "devices"), [("127.0.0.1", "lo"), ("::1", "lo"), ("192.0.2.77", None)]
)
@pytest.mark.parametrize("staging_bytes", [None, 4096])
def test_an_engine_gets_what_it_is_opened_with(
    monkeypatch: pytest.MonkeyPatch, host: str, devices: str | None, staging_bytes: int | None
) -> None:
    opened: list[object] = []

    def open_engine(*arguments: object, **named: object) -> None:
        opened.append((*arguments, named))
        raise TransportUnavailableError("not here")

    monkeypatch.setattr(jax_engine, "JaxEngine", open_engine)
    monkeypatch.setattr(nixl_engine, "NixlEngine", open_engine)
    monkeypatch.setattr(storage_engine, "open_storage_engine", open_engine)
    given = {} if staging_bytes is None else {"staging_bytes": staging_bytes}
    for name in registry.PROCESS_TRANSPORTS:
        with pytest.raises(TransportUnavailableError, match=r"^not here$"):
            open_transport(name, host=host, storage="redis://h:1", **given)
    size = staging_bytes or 256 << 20
    assert opened == [(host, {}), (size, {"devices": devices}), ("redis://h:1", size, {})]


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        *[("127.0.0.1:1", True), ("[::1]:65535", True), ("127.0.0.1:65536", False)],
        *[("127.0.0.1:0", False), ("127.0.0.1:", False), ("127.0.0.1", False), (":1", False)],
        *[("127.0.0.1:-1", False), ("127.0.0.1:\u0661", False), ("host:1", False), ("", False)],
    ],
)
def test_the_address_of_a_server_is_a_number_and_a_port(text: str, *, is_one: bool) -> None:
    assert jax_engine._is_address(text) is is_one


@pytest.mark.parametrize("given", [None, "eth7"])
@pytest.mark.parametrize("devices", [None, "lo"])
def test_ucx_listens_at_the_devices_of_its_environment_first(
    monkeypatch: pytest.MonkeyPatch, given: str | None, devices: str | None
) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", given or "")  # so that it is restored
    if given is None:
        monkeypatch.delenv("UCX_NET_DEVICES")
    for step in ("_start", "_test"):
        monkeypatch.setattr(nixl_agent.NixlAgent, step, lambda *_: None)
    nixl_agent.NixlAgent(1 << 12, devices=devices)
    assert os.environ.get("UCX_NET_DEVICES") == (given or devices)


@pytest.mark.parametrize("route", [b"", b"12345678", b"12345678nowhere", b"12345678host:1"])
def test_jax_refuses_an_invalid_address(route: bytes) -> None:
    with pytest.raises(PullError, match=r"^no address of a transfer server$") as caught:
        JaxEngine().pull(seal(route), describe(arrays(), num_blocks=3), make_digest_key())
    assert caught.value.fault is Fault.MISMATCH


@pytest.fixture
def nixl() -> Iterator[NixlEngine]:
    engine = NixlEngine(1 << 20)
    yield engine
    assert engine._pool.num_free_bytes == 1 << 20
    engine.close()


@pytest.mark.parametrize("route", [b"", bytes(32), bytes(100_000)])
def test_nixl_refuses_invalid_metadata(nixl: NixlEngine, route: bytes) -> None:
    with pytest.raises(PullError, match=r"^no metadata of a NIXL agent$"):
        nixl.pull(seal(route), describe(arrays(), num_blocks=3), make_digest_key())


def test_nixl_refuses_metadata_of_another_version(nixl: NixlEngine) -> None:
    version = nixl._agent.version
    route = _LOCATION.pack(0, bytes(8), b"0.9.1") + nixl._agent.metadata
    with pytest.raises(PullError) as caught:
        nixl.pull(seal(route), describe(arrays(), num_blocks=3), make_digest_key())
    reason = f"of NIXL 0.9.1, not {version.decode().rstrip(chr(0))}"
    assert (caught.value.fault, caught.value.reason) == (Fault.MISMATCH, reason)


@pytest.mark.parametrize("engine", ["jax", "nixl"])
@pytest.mark.parametrize("route", [b"", b"1234567", b"12345678 no digest of this"])
def test_a_damaged_route_is_refused(nixl: NixlEngine, engine: str, route: bytes) -> None:
    with pytest.raises(PullError, match=r"^the route is damaged$") as caught:
        (nixl if engine == "nixl" else JaxEngine()).pull(
            route, describe(arrays(), num_blocks=3), make_digest_key()
        )
    assert caught.value.fault is Fault.MISMATCH


def test_why_ucx_fails_is_reported(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """UCX says it on stdout, where commands print results."""
    monkeypatch.setenv("UCX_TLS", "pigeon")
    with pytest.raises(TransportUnavailableError) as caught:
        NixlEngine(1 << 20)
    assert str(caught.value).startswith(
        "NIXL does not work here: nixlBackendError: NIXL_ERR_BACKEND; no usable transports/devices "
        "(asked pigeon on "
    )
    printed = capfd.readouterr()
    assert (printed.out, "transport 'pigeon' is not available" in printed.err) == ("", True)


def test_jax_needs_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    for free in (95, 96):
        monkeypatch.setattr(jax_engine, "num_free_descriptors", lambda free=free: free)
        if free == 96:
            JaxEngine().close()
            continue
        with pytest.raises(TransportUnavailableError) as caught:
            JaxEngine()
        assert str(caught.value) == (
            "jax transfers need 96 file descriptors, and 95 are free (`ulimit -n`)"
        )


@pytest.mark.parametrize(
    ("devices", "given", "expected"),
    [([], None, "^ib"), ([], "^cuda", "^cuda"), (["mlx5_0"], None, None)],
    ids=["no device", "given", "a device"],
)
def test_ucx_loads_drivers_of_infiniband_only_for_a_device(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    devices: list[str],
    given: str | None,
    expected: str | None,
) -> None:
    for device in devices:
        (tmp_path / device).mkdir()
    monkeypatch.setattr(nixl_agent, "_INFINIBAND", tmp_path)
    monkeypatch.setattr(nixl_agent.NixlAgent, "_test", lambda agent: None)
    monkeypatch.setenv("UCX_MODULES", "^ib" if given is None else given)
    if given is None:
        monkeypatch.delenv("UCX_MODULES")
    nixl_agent.NixlAgent(1 << 16, devices=None).close()
    assert os.environ.get("UCX_MODULES") == expected
