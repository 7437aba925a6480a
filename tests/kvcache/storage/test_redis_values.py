"""Unexpected answers of a Redis server; key names, expiry and stats."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from hashlib import sha256

import pytest
import redis
from redis import exceptions

from radixkv.kvcache.storage import (
    BackendError,
    ChecksummedBackend,
    Status,
    StoredValue,
    remove_values,
    verify_values,
)
from radixkv.kvcache.storage.errors import (
    BackendRefusedError,
    BackendUnreachableError,
    MissingPackageError,
)
from radixkv.kvcache.storage.maintenance import Verified
from radixkv.kvcache.storage.redis.address import RedisAddress
from radixkv.kvcache.storage.redis.backend import RedisBackend
from radixkv.kvcache.storage.redis.packer import Packer, Value, Word

from .conformance import KEYS, MIB, check_namespaces, get, keys_of, load, put, store
from .redis_calls import DOING, LONG_S, SOON_S, connected, every_call, raw
from .redis_server import MISSING, RedisServer, running


@contextmanager
def answering(reply: bytes) -> Iterator[int]:
    """Yield the port of a server that answers GETRANGE with reply and knows no other command."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, suppress(ConnectionError):  # the client may have left
            while request := connection.recv(1 << 16):
                connection.sendall(reply if b"GETRANGE" in request else b"-ERR\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()  # ends when the client closes its connection


def test_no_more_is_read_than_fits(server: RedisServer) -> None:
    with connected(server) as backend, raw(server) as client:
        put(backend, KEYS[0], bytes(4 * MIB))
        before = client.info("stats")["total_net_output_bytes"]
        assert get(backend, KEYS[0], 60, 40) == (4 * MIB, [bytes(60), bytes(40)])
        assert client.info("stats")["total_net_output_bytes"] - before < 20_000


@pytest.mark.parametrize(
    ("reply", "timeout_s", "message"),
    [
        (b"hello, is this the printer?\r\n", LONG_S, "reading failed: InvalidResponse"),
        (b":7\r\n", LONG_S, "reading failed: the answer is a int"),
        (b"*1\r\n$1\r\nx\r\n", LONG_S, "reading failed: the answer is a list"),
        (b"-BUSY a script runs\r\n", LONG_S, "reading was refused by the server: BUSY"),
        (b"-LOADING the data set\r\n", LONG_S, "reading was refused by the server: LOADING"),
        (b"$400000000\r\nand no more", SOON_S, "reading failed: no answer within 0.1 s"),
    ],
)
def test_invalid_answers(reply: bytes, timeout_s: float, message: str) -> None:
    with answering(reply) as port:
        address = RedisAddress("127.0.0.1", port)
        with closing(RedisBackend(address, timeout_s=timeout_s)) as backend:
            with pytest.raises(BackendError) as caught:
                get(backend, KEYS[0], 4)
            assert str(caught.value) == message
            assert backend.stats() == {"requests": 1, "failed_requests": 1}


def test_a_value_that_fits_takes_one_command(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(server) as backend:
        put(backend, KEYS[0], b"abc")
        commands: list[Word] = []
        original = backend._command

        def noted(*words: Word) -> object:
            commands.append(words[0])
            return original(*words)

        monkeypatch.setattr(backend, "_command", noted)
        get(backend, KEYS[0], 3)
        assert commands == ["GETRANGE"]
        get(backend, KEYS[0], 2)
        get(backend, KEYS[1], 3)
        assert commands[1:] == ["GETRANGE", "STRLEN", "GETRANGE", "EXISTS"]


def test_a_value_that_another_client_stores_meanwhile_is_not_empty(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(server) as backend, connected(server) as other:
        original = backend._command

        def late(*words: Word) -> object:
            if words[0] == "EXISTS":
                put(other, KEYS[0], b"abc")
            return original(*words)

        monkeypatch.setattr(backend, "_command", late)
        assert get(backend, KEYS[0], 3) == (3, [b"abc"])


def test_a_key_scanned_twice_is_listed_once(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"radixkv:{key.hex()}".encode() for key in KEYS[:2]]
    pages = {0: (7, names[:1]), 7: (8, names[1:]), 8: (0, names)}
    with connected(server) as backend:
        put(backend, KEYS[0], b"abc")
        put(backend, KEYS[1], b"de")
        monkeypatch.setattr(backend._client, "scan", lambda cursor, **_: pages[cursor])
        assert list(backend.list_values()) == [StoredValue(KEYS[0], 3), StoredValue(KEYS[1], 2)]


def test_namespaces_are_listed_without_foreign_names(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    space, key = "0123456789abcdef", KEYS[0].hex()
    foreign = [
        f"radixkv:{space.upper()}:{key}",
        f"radixkv:{space[1:]}:{key}",
        f"radixkv:{space}:{key[1:]}",
        f"radixkv:{space}:{space}:{key}",
        f"radixkv:{key}0",
        f"radixkv:{space}:{key}:old",
        f"radixkv::{key}",
        f"other:radixkv:{space}:{key}",
        "radixkv:",
    ]
    with (
        connected(server) as backend,
        connected(server, prefix=f"radixkv:{space}:") as inside,
        raw(server) as client,
    ):
        for name in foreign:
            client.set(name, b"theirs")
        check_namespaces(backend, inside, space)
        twice = f"radixkv:{space}:{key}".encode()
        pages = {0: (7, [twice]), 7: (0, [twice, twice])}
        monkeypatch.setattr(backend._client, "scan", lambda cursor, **_: pages[cursor])
        assert list(backend.list_namespaces()) == [(space, StoredValue(KEYS[0], 3))]


def test_a_refused_length_is_an_error(server: RedisServer) -> None:
    login = "+@all -strlen allkeys on nopass"
    with connected(server) as backend, raw(server) as client:
        put(backend, KEYS[0], b"abc")
        client.execute_command("ACL", "SETUSER", "ann", *login.split())
        address = RedisAddress(unix_path=server.socket, username="ann", password="x")
        with (
            closing(RedisBackend(address, timeout_s=LONG_S)) as limited,
            pytest.raises(BackendRefusedError, match=r"^listing was refused by the server: "),
        ):
            list(limited.list_values())


def test_a_key_of_another_type_is_corrupt_and_repaired(server: RedisServer) -> None:
    with connected(server) as backend, raw(server) as client:
        client.rpush(f"radixkv:{KEYS[0].hex()}", "an item of a list")
        assert get(backend, KEYS[0], 4) == (0, [bytes(4)])
        assert list(backend.list_values()) == [StoredValue(KEYS[0], 0)]
        assert verify_values(backend) == Verified(corrupt=1)
        checksummed = ChecksummedBackend(backend)
        assert load(checksummed, KEYS[0], 4) == (Status.CORRUPT, bytes(4))
        assert store(checksummed, KEYS[0], b"abcd") is Status.STORED
        assert load(checksummed, KEYS[0], 4) == (Status.LOADED, b"abcd")
        client.delete(f"radixkv:{KEYS[0].hex()}")
        client.sadd(f"radixkv:{KEYS[0].hex()}", "an item of a set")
        assert remove_values(backend, 0).removed == 1
        assert client.dbsize() == 0


def test_a_full_server_refuses_and_keeps_its_values() -> None:
    settings = ["maxmemory 4mb", "maxmemory-policy noeviction"]
    with running(settings) as server, connected(server) as backend:
        put(backend, KEYS[0], b"abc")
        with pytest.raises(BackendRefusedError) as caught:
            put(backend, KEYS[1], bytes(8 * MIB))
        assert str(caught.value) == "writing was refused by the server: OutOfMemoryError"
        assert get(backend, KEYS[0], 3) == (3, [b"abc"])


# -- names, expiry, stats


def test_prefixes_separate_backends(server: RedisServer) -> None:
    with connected(server, prefix="a*") as a, connected(server, prefix="ab") as b:
        put(a, KEYS[0], b"a")
        put(b, KEYS[1], b"b")
        assert a.contains(KEYS[:2]) == [True, False]
        assert keys_of(a) == [KEYS[0]]
        assert keys_of(b) == [KEYS[1]]


def test_a_prefix_is_no_pattern(server: RedisServer) -> None:
    for prefix in ("", *"*?[]^-\\", "[a]", "\\*", "a\\", "é:"):
        with connected(server, prefix=prefix) as backend:
            assert keys_of(backend) == []
            put(backend, KEYS[0], b"abc")
            assert list(backend.list_values()) == [StoredValue(KEYS[0], 3)]
            assert list(backend.list_namespaces()) == [("", StoredValue(KEYS[0], 3))]


@pytest.mark.parametrize("keys", [[KEYS[0]], [KEYS[1], KEYS[0]], [KEYS[0], KEYS[1]]], ids=len)
def test_a_touch_restarts_the_time_to_live(server: RedisServer, keys: list[bytes]) -> None:
    name = f"radixkv:{KEYS[0].hex()}"
    with connected(server, ttl_s=600) as backend, raw(server) as client:
        put(backend, KEYS[0], b"x")
        assert 500 <= client.ttl(name) <= 600
        client.expire(name, 100)
        backend.touch(keys)
        assert 500 <= client.ttl(name) <= 600
    with connected(server) as backend, raw(server) as client:
        put(backend, KEYS[0], b"x")
        assert client.ttl(name) == -1


@pytest.mark.parametrize("ttl_s", [None, 600])
def test_a_call_takes_any_number_of_keys(server: RedisServer, ttl_s: int | None) -> None:
    keys = [sha256(b"%d" % number).digest() for number in range(2500)]
    names = [f"radixkv:{key.hex()}" for key in keys]

    def uses(client: redis.Redis) -> list[int]:
        """Return how often each key was used, or how long it stays."""
        command = ["OBJECT", "FREQ"] if ttl_s is None else ["TTL"]
        pipeline = client.pipeline(transaction=False)
        for name in names:
            pipeline.execute_command(*command, name)
        return pipeline.execute()

    with connected(server, ttl_s=ttl_s) as backend, raw(server) as client:
        # Count each use, and forget none.
        client.config_set("maxmemory-policy", "allkeys-lfu", "lfu-log-factor", 0)
        client.config_set("lfu-decay-time", 0)
        client.mset(dict.fromkeys(names, b"x"))
        if ttl_s is not None:
            for name in names:
                client.expire(name, 100)
        before = uses(client)
        backend.touch(keys)
        assert all(now > then for now, then in zip(uses(client), before, strict=True))
        assert backend.contains(keys) == [True] * len(keys)
        assert backend.delete(keys[-1])
        assert backend.contains(keys) == [True] * (len(keys) - 1) + [False]


@pytest.mark.parametrize("ttl_s", [None, 600])
def test_a_call_sends_no_more_commands_than_it_needs(
    server: RedisServer, ttl_s: int | None
) -> None:
    """No transactions, no greeting of a connection, and a scan in large steps."""
    keys = [sha256(b"%d" % number).digest() for number in range(2500)]
    with connected(server, ttl_s=ttl_s) as backend, raw(server) as client:
        client.mset({f"radixkv:{key.hex()}": b"x" for key in keys})
        client.config_resetstat()
        assert all(backend.contains(keys))
        backend.touch(keys)
        assert sorted(keys_of(backend)) == sorted(keys)
        put(backend, keys[0], b"y")
        assert backend.delete(keys[0])
        stats: dict[str, dict[str, int]] = client.info("commandstats")
        calls = {name.removeprefix("cmdstat_"): each["calls"] for name, each in stats.items()}
    assert calls.pop("scan") <= 4
    for name in [name for name in calls if name.startswith(("client|", "config|", "select"))]:
        del calls[name]  # of the connections
    touches = {"touch": 1} if ttl_s is None else {"expire": 2500}
    assert calls == {"exists": 2500, "strlen": 2500, "set": 1, "unlink": 1, **touches}


def test_a_large_part_of_a_value_is_sent_without_a_copy() -> None:
    small, large = (memoryview(bytes([tag]) * size) for tag, size in ((1, 16383), (2, 16384)))
    value = Value([small, large, small, small, large])
    pieces = Packer().pack("SET", b"key", value, "EX", 60)
    total = sum(map(len, value))
    before = b"*5\r\n$3\r\nSET\r\n$3\r\nkey\r\n$%d\r\n" % total + small
    after = b"\r\n$2\r\nEX\r\n$2\r\n60\r\n"
    assert pieces == [before, large, bytes(small) * 2, large, after]
    assert pieces[1] is large and pieces[3] is large
    assert Packer().pack("GET", "\u00e9") == ["*2\r\n$3\r\nGET\r\n$2\r\n\u00e9\r\n".encode()]


@pytest.mark.parametrize("now", [None, b"", b"a", b"abcdef"])
def test_a_value_that_another_client_replaces_meanwhile_is_no_whole_one(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, now: bytes | None
) -> None:
    """More than fits was read, so it is longer than the buffers, whatever its length is then."""
    with connected(server) as backend, connected(server) as other:
        put(backend, KEYS[0], b"abcd")
        original = backend._command

        def late(*words: Word) -> object:
            if words[0] == "STRLEN":
                assert other.delete(KEYS[0])
                if now is not None:
                    put(other, KEYS[0], now)
            return original(*words)

        monkeypatch.setattr(backend, "_command", late)
        assert get(backend, KEYS[0], 3) == (max(4, len(now or b"")), [b"abc"])


def test_an_interrupted_call_leaves_its_answer_to_no_other(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(server) as backend:
        put(backend, KEYS[0], b"abc")
        pool = backend._client.connection_pool
        others = pool.get_connection()  # as of another thread in a call
        others.send_command("CLIENT", "ID")
        others_id = others.read_response()
        original = redis.Connection.read_response

        def interrupted(*arguments: object, **options: object) -> None:
            raise KeyboardInterrupt

        def late(connection: redis.UnixDomainSocketConnection, **options: bool) -> object:
            server.go_on()
            return original(connection, **options)

        server.pause()
        with monkeypatch.context() as patched:
            patched.setattr(redis.UnixDomainSocketConnection, "read_response", interrupted)
            with pytest.raises(KeyboardInterrupt):
                get(backend, KEYS[0], 3)
        monkeypatch.setattr(redis.UnixDomainSocketConnection, "read_response", late)
        assert backend.contains(KEYS[1:2]) == [False]
        others.send_command("CLIENT", "ID")
        assert others.read_response() == others_id
        pool.release(others)


def test_a_connection_has_the_options_of_the_backend() -> None:
    """None has the place of another, and each has the default that is documented."""
    address = RedisAddress("host", 7, 3, "ann", "pw")

    def options(backend: RedisBackend) -> dict[str, object]:
        backend.close()
        kept = ("host", "port", "path", "db", "username", "password")
        limits = ("socket_timeout", "socket_connect_timeout")
        given = backend._client.connection_pool.connection_kwargs
        return {name: given[name] for name in (*kept, *limits) if name in given}

    login = {"db": 3, "username": "ann", "password": "pw"}
    tcp = {"host": "host", "port": 7, **login}
    assert options(RedisBackend(address)) == {
        **tcp,
        "socket_timeout": 1.0,
        "socket_connect_timeout": 1.0,
    }
    for where, place in (
        (address, tcp),
        (replace(address, tls=True), tcp),
        (replace(address, unix_path="/run/x"), {"path": "/run/x", **login}),
    ):
        limits = {"socket_timeout": 2.0, "socket_connect_timeout": 3.0}
        backend = RedisBackend(where, timeout_s=2.0, connect_timeout_s=3.0)
        assert options(backend) == {**place, **limits}


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (exceptions.TimeoutError(), BackendUnreachableError, "no answer within 60 s"),
        (TimeoutError(), BackendUnreachableError, "no answer within 60 s"),
        (exceptions.ConnectionError(), BackendUnreachableError, "no connection, or it was lost"),
        (OSError(), BackendUnreachableError, "no connection, or it was lost"),
        (exceptions.AuthenticationError(), BackendRefusedError, "wrong or no username or password"),
        (exceptions.AuthorizationError(), BackendRefusedError, "wrong or no username or password"),
        (exceptions.BusyLoadingError(), BackendRefusedError, "LOADING"),
        (exceptions.ResponseError("OOM command"), BackendRefusedError, "OOM"),
        (exceptions.ResponseError("Oom command"), BackendRefusedError, "ResponseError"),
        (exceptions.ReadOnlyError("pw"), BackendRefusedError, "ReadOnlyError"),
        (exceptions.DataError("pw"), BackendError, "DataError"),
    ],
    ids=repr,
)
def test_each_error_of_the_client_has_a_type_and_none_its_text(
    server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    kind: type[BackendError],
    text: str,
) -> None:
    def broken(*words: Word) -> None:
        raise error

    with connected(server) as backend:
        monkeypatch.setattr(backend, "_command", broken)
        with pytest.raises(BackendError) as caught:
            backend.delete(KEYS[0])
        assert type(caught.value) is kind
        was = " was refused by the server" if kind is BackendRefusedError else " failed"
        assert str(caught.value) == f"deleting{was}: {text}"
        assert caught.value.__cause__ is None and caught.value.__suppress_context__
        assert backend.stats() == {"requests": 1, "failed_requests": 1}


def test_close_closes_the_connections(server: RedisServer) -> None:
    with connected(server) as backend, raw(server) as client:
        before = len(client.client_list())
        put(backend, KEYS[0], b"abc")
        assert len(client.client_list()) == before + 1
        backend.close()
        while len(client.client_list()) > before:
            pass
        assert get(backend, KEYS[0], 3) == (3, [b"abc"])


def test_requests_are_counted_and_need_no_server(server: RedisServer) -> None:
    with connected(server) as backend:
        assert backend.stats() == {"requests": 0, "failed_requests": 0}
        put(backend, KEYS[0], b"x")
        server.kill()
        assert len(list(every_call(backend))) == len(DOING)
        failed = len(DOING)
        assert backend.stats() == {"requests": 1 + failed, "failed_requests": failed}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout_s": 0}, "timeout_s must be positive, got 0"),
        ({"connect_timeout_s": float("nan")}, "connect_timeout_s must be positive, got nan"),
        ({"ttl_s": 0}, "ttl_s must be at least 1, got 0"),
    ],
)
def test_invalid_time_limits(options: dict, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        RedisBackend(RedisAddress(), **options)
    assert str(caught.value) == message


def test_the_shortest_time_to_live(server: RedisServer) -> None:
    with connected(server, ttl_s=1) as backend:
        put(backend, KEYS[0], b"x")


@pytest.mark.parametrize("package", ["redis", "hiredis"])
def test_a_missing_package(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError) as caught:
        RedisBackend(RedisAddress())
    assert str(caught.value) == f"{package} is not installed: pip install 'radixkv[redis]'"
    assert (caught.value.package, caught.value.extra) == (package, "redis")


def test_a_missing_server_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(AssertionError) as caught:
        RedisServer("", 1)
    assert str(caught.value).startswith(MISSING)
