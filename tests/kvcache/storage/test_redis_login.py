"""Passwords, TLS and URLs of Redis; no secret is ever shown."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import trustme

from radixkv.kvcache.storage import StorageWorkers
from radixkv.kvcache.storage.errors import BackendUnreachableError, StorageUrlError
from radixkv.kvcache.storage.redis.address import RedisAddress
from radixkv.kvcache.storage.redis.backend import RedisBackend
from radixkv.kvcache.storage.urls import BackendOptions, open_backend

from .conformance import KEYS, MIB, get, put
from .redis_calls import DOING, LONG_S, SOON_S, every_call, finish, raw
from .redis_server import RedisServer, running

PASSWORD = "p@ss/w?rd#1:"
IN_URL = "p%40ss%2Fw%3Frd%231%3A"
PATIENT = BackendOptions(timeout_s=LONG_S, connect_timeout_s=LONG_S)


@pytest.fixture(scope="module")
def guarded() -> Iterator[RedisServer]:
    with running([f'requirepass "{PASSWORD}"', f'user ann on ">{PASSWORD}ann" ~* +@all']) as server:
        yield server


def text_of(error: BaseException) -> str:
    """Return everything that a log could show of an error, including its causes."""
    parts = [str(error), repr(error), repr(error.args), repr(vars(error))]
    return "\n".join([*parts, *traceback.format_exception(error)])


@pytest.mark.parametrize("login", [f":{IN_URL}", f"ann:{IN_URL}ann", f"default:{IN_URL}"])
@pytest.mark.parametrize("place", ["tcp", "socket"])
def test_a_login_in_the_url(guarded: RedisServer, login: str, place: str) -> None:
    tcp, unix = (
        f"redis://{login}@127.0.0.1:{guarded.port}/2",
        f"unix://{login}@{guarded.socket}?db=2",
    )
    with closing(open_backend(tcp if place == "tcp" else unix, PATIENT)) as backend:
        put(backend, KEYS[0], b"secret")
        assert get(backend, KEYS[0], 6) == (6, [b"secret"])
    with raw(guarded, password=PASSWORD, db=2) as client:
        assert client.dbsize() == 1


@pytest.mark.parametrize("login", ["", f":{IN_URL}x@", f"mallory:{IN_URL}@", "ann@"])
def test_a_wrong_login_is_refused_and_not_shown(
    guarded: RedisServer, login: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    backend = open_backend(f"redis://{login}127.0.0.1:{guarded.port}", PATIENT)
    assert isinstance(backend, RedisBackend)
    with closing(backend):
        for doing, error in zip(DOING, every_call(backend), strict=True):
            reason = "wrong or no username or password"
            assert str(error) == f"{doing} was refused by the server: {reason}"
            assert not any(secret in text_of(error) for secret in (PASSWORD, IN_URL, "mallory"))
    assert not any(
        secret in repr(backend) + caplog.text for secret in (PASSWORD, IN_URL, "mallory")
    )


def test_a_password_is_shown_by_no_error_of_a_dead_server(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    with running([f'requirepass "{PASSWORD}"']) as server:
        url = f"redis://mallory:{IN_URL}@127.0.0.1:{server.port}"
        backend = open_backend(url, BackendOptions(timeout_s=SOON_S))
        assert isinstance(backend, RedisBackend)
        server.pause()
        errors = list(every_call(backend))
        server.kill()
        errors += every_call(backend)
        storage = StorageWorkers(backend, max_bytes_in_flight=100)
        finish(storage, storage.store(KEYS[:1], [[b"x"]], timeout_s=LONG_S))
        assert storage.close(timeout_s=LONG_S)
    texts = [*map(text_of, errors), repr(backend), str(backend), caplog.text]
    assert "store failed in the backend: BackendUnreachableError" in caplog.text
    assert not any(secret in text for text in texts for secret in (PASSWORD, IN_URL, "mallory"))
    assert repr(backend) == (
        f"RedisBackend(RedisAddress(host='127.0.0.1', port={server.port}, db=0, tls=False, "
        "unix_path=None))"
    )


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Return the file of a CA, and the settings of a server with its certificate."""
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    leaf = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    leaf.private_key_pem.write_to_path(folder / "key.pem")
    leaf.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    settings = [
        f"tls-cert-file {folder}/cert.pem",
        f"tls-key-file {folder}/key.pem",
        "tls-auth-clients no",
    ]
    return folder / "ca.pem", settings


def test_tls(certificates: tuple[Path, list[str]]) -> None:
    ca_file, settings = certificates
    with running(settings, tls=True) as server:
        options = replace(PATIENT, ca_file=str(ca_file))
        url = f"127.0.0.1:{server.port}"
        with closing(open_backend(f"rediss://{url}", options)) as backend:
            put(backend, KEYS[0], bytes(MIB))
            assert get(backend, KEYS[0], MIB) == (MIB, [bytes(MIB)])
        # A name that the certificate lacks, an untrusted CA, and no TLS.
        elsewhere = f"rediss://localhost:{server.port}"
        for backend in (
            open_backend(elsewhere, options),
            open_backend(f"rediss://{url}", PATIENT),
            open_backend(f"redis://{url}", PATIENT),
        ):
            with closing(backend), pytest.raises(BackendUnreachableError) as caught:
                backend.contains(KEYS)
            assert str(caught.value) == "looking up failed: no connection, or it was lost"


# -- URLs


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://host", RedisAddress("host")),
        ("redis://host/", RedisAddress("host")),
        ("redis://host:7000/3", RedisAddress("host", 7000, 3)),
        ("redis://host:0/0", RedisAddress("host", 0)),
        ("redis://[::1]:7000", RedisAddress("::1", 7000)),
        ("rediss://host", RedisAddress("host", tls=True)),
        (f"redis://ann:{IN_URL}@host", RedisAddress("host", username="ann", password=PASSWORD)),
        (f"redis://:{IN_URL}@host", RedisAddress("host", password=PASSWORD)),
        ("redis://a%40n:@host", RedisAddress("host", username="a@n")),
        ("rediss://ann@host:1/2", RedisAddress("host", 1, 2, "ann", tls=True)),
        ("unix:///run/redis.sock", RedisAddress(unix_path="/run/redis.sock")),
        ("unix:///run/a%20b?db=4", RedisAddress(unix_path="/run/a b", db=4)),
        ("unix:///run/x?db=", RedisAddress(unix_path="/run/x")),
        ("unix://:pw@/run/x", RedisAddress(unix_path="/run/x", password="pw")),
        ("unix://ann:pw@/x", RedisAddress(username="ann", password="pw", unix_path="/x")),
    ],
)
def test_addresses(url: str, address: RedisAddress) -> None:
    assert RedisAddress.from_url(url) == address


ESCAPES = "in a password, '/' is written %2F, '?' %3F, '#' %23 and '@' %40"
NO_HOST = f"the Redis URL has no valid host and port; {ESCAPES}"
NOT_SO = f"the Redis URL is not redis://HOST[:PORT][/DB]; {ESCAPES}"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis://", NOT_SO),
        ("redis://host?db=1", NOT_SO),
        ("redis://host:70000", NO_HOST),
        ("redis://[::1", NO_HOST),
        ("redis://ann:hunter2/x@host", NO_HOST),
        ("redis://:hunter2#x@host", NO_HOST),
        ("redis://host#hunter2", f"the Redis URL has a '#'; {ESCAPES}"),
        ("redis://host/hunter2", f"the Redis URL's database is not a number; {ESCAPES}"),
        ("redis://host/\u00b2", f"the Redis URL's database is not a number; {ESCAPES}"),
        ("redis://host/-1", f"the Redis URL's database is not a number; {ESCAPES}"),
        ("unix://host/path", "a Redis socket's URL is unix:///PATH or unix:///PATH?db=DB"),
        ("unix://", "a Redis socket's URL is unix:///PATH or unix:///PATH?db=DB"),
        ("unix:///path?password=hunter2", "the only option of a Redis socket's URL is db"),
        ("http://host", "a Redis URL starts with redis://, rediss:// or unix://"),
    ],
)
def test_malformed_addresses(url: str, message: str) -> None:
    with pytest.raises(StorageUrlError) as caught:
        RedisAddress.from_url(url)
    assert str(caught.value) == message
    assert "hunter2" not in text_of(caught.value).replace(url, "")
