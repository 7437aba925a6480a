"""URLs, options and requirements of the Mooncake backend."""

from __future__ import annotations

import ctypes
import sys
from contextlib import closing

import pytest

from radixkv.kvcache.storage import (
    BackendOptions,
    MissingLibraryError,
    MissingPackageError,
    StorageUrlError,
    open_backend,
)
from radixkv.kvcache.storage.mooncake.backend import MooncakeBackend, master_of

from . import mooncake_server
from .conformance import KEYS, put
from .mooncake_calls import LONG_S
from .mooncake_server import MooncakeServer, needs_wheels


def test_namespaces_are_separate(shared_mooncake: MooncakeServer) -> None:
    url = f"mooncake://127.0.0.1:{shared_mooncake.port}"
    one = BackendOptions(timeout_s=LONG_S, connect_timeout_s=LONG_S, namespace="1" * 16)
    two = BackendOptions(timeout_s=LONG_S, connect_timeout_s=LONG_S, namespace="2" * 16)
    with closing(open_backend(url, one)) as first, closing(open_backend(url, two)) as second:
        put(first, KEYS[0], b"abc")
        assert second.contains(KEYS[:1]) == [False]
        assert isinstance(second, MooncakeBackend)
        second.namespace = "1" * 16
        assert second.contains(KEYS[:1]) == [True]
        assert first.delete(KEYS[0])


@pytest.mark.parametrize(
    ("url", "master"),
    [
        ("mooncake://master", ("master", 50051)),
        ("mooncake://10.0.0.1:7/", ("10.0.0.1", 7)),
        ("mooncake://", None),
        ("mooncake://:7", None),
        ("mooncake://[::1]:7", None),
        ("mooncake://[hunter2", None),
        ("mooncake://host:hunter2", None),
        ("mooncake://user:hunter2@host", None),
        ("mooncake://host/hunter2", None),
        ("mooncake://host?x=hunter2", None),
    ],
)
def test_urls(url: str, master: tuple[str, int] | None) -> None:
    if master is not None:
        assert master_of(url) == master
        return
    with pytest.raises(StorageUrlError) as caught:
        open_backend(url)
    assert str(caught.value) == "a Mooncake store's URL is mooncake://HOST[:PORT], of its master"


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    with pytest.raises(MissingPackageError) as caught:
        open_backend("mooncake://host")
    assert str(caught.value) == "mooncake is not installed: pip install 'radixkv[mooncake]'"
    monkeypatch.undo()
    monkeypatch.setattr(mooncake_server, "find_spec", lambda name: None)
    with pytest.raises(AssertionError, match=r"^these tests start a Mooncake store: "):
        mooncake_server.program("mooncake_master")


@needs_wheels
def test_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise OSError("cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(MissingLibraryError) as caught:
        open_backend("mooncake://host")
    with pytest.raises(AssertionError, match=r"^these tests start a Mooncake store: "):
        mooncake_server.program("mooncake_master")
    assert str(caught.value) == "libibverbs.so.1 is not installed: apt-get install libibverbs1"
    error = caught.value
    assert (error.library, error.debian_package) == ("libibverbs.so.1", "libibverbs1")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (BackendOptions(timeout_s=0.0), "timeout_s"),
        (BackendOptions(connect_timeout_s=0.0), "connect_timeout_s"),
    ],
)
def test_invalid_time_limits(options: BackendOptions, name: str) -> None:
    with pytest.raises(ValueError) as caught:
        open_backend("mooncake://host", options)
    assert str(caught.value) == f"{name} must be positive, got 0.0"
