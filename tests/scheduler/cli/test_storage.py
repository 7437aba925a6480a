"""`radixkv storage`: what an operator sees, and what he is told when it does not work."""

from __future__ import annotations

import errno
import json
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from radixkv.kvcache.storage import (
    Backend,
    BackendOptions,
    ChecksummedBackend,
    FileBackend,
    open_backend,
)
from radixkv.kvcache.storage import object_storage as objects
from radixkv.kvcache.storage.files.system_calls import OsFiles
from radixkv.kvcache.storage.object_storage.backend import memory_store
from radixkv.scheduler.cli import storage

from ...kvcache.storage.mooncake_server import needs_wheels
from ...kvcache.storage.redis_server import RedisServer, running

KEYS = [sha256(b"%d" % number).digest() for number in range(4)]
NAMESPACE = "0123456789abcdef"


def fill(backend: Backend, num_values: int = 3) -> None:
    """Blocks of 100 bytes each, with their envelopes."""
    for key in KEYS[:num_values]:
        ChecksummedBackend(backend).store(key, [memoryview(bytes(36))])


def damage(backend: Backend, key: bytes) -> None:
    backend.put(key, [memoryview(b"not what was stored")])


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Three blocks, which nobody has open."""
    path = tmp_path / "blocks"
    with closing(FileBackend(path, max_bytes=1000)) as backend:
        fill(backend)
    return path


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with running(["requirepass hunter2"]) as server:
        yield server


# -- ls


def test_ls_counts(radixkv: Any, directory: Path) -> None:
    assert radixkv("storage", "ls", directory.as_uri()) == (0, "3 blocks, 300 bytes\n", "")
    outcome = radixkv("storage", "ls", directory.as_uri(), "--json", "-")
    assert json.loads(outcome.stdout) == {"blocks": 3, "bytes": 300}


def test_ls_shows_keys(radixkv: Any, directory: Path) -> None:
    outcome = radixkv("storage", "ls", "--keys", directory.as_uri())
    lines = [f"{key.hex()}  100" for key in KEYS[:3]]
    assert outcome.stdout.splitlines() == [*lines, "3 blocks, 300 bytes"]
    outcome = radixkv("storage", "ls", "--keys", directory.as_uri(), "--json", "-")
    keys = json.loads(outcome.stdout)["keys"]
    assert keys == [{"key": key.hex(), "bytes": 100} for key in KEYS[:3]]


def test_a_url_from_the_environment(
    radixkv: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KV_STORAGE", directory.as_uri())
    assert radixkv("storage", "ls", "env:KV_STORAGE") == (0, "3 blocks, 300 bytes\n", "")
    monkeypatch.setenv("KV_STORAGE", "")
    outcome = radixkv("storage", "ls", "env:KV_STORAGE")
    message = (
        "argument URL: the environment variable KV_STORAGE is not set "
        "(see `radixkv storage ls --help`)"
    )
    assert outcome == (2, "", f"radixkv: {message}\n")


def test_ls_of_nothing(radixkv: Any) -> None:
    assert radixkv("storage", "ls", "--keys", "memory://") == (0, "0 blocks, 0 bytes\n", "")


# -- verify


def test_verify_of_good_blocks(radixkv: Any, directory: Path) -> None:
    outcome = radixkv("storage", "verify", directory.as_uri())
    text = "3 blocks good (300 bytes), 0 corrupt (0 of them removed), 0 missing, 0 unreadable\n"
    assert outcome == (0, text, "")


def test_verify_finds_and_removes_what_is_corrupt(radixkv: Any, directory: Path) -> None:
    with closing(FileBackend(directory, max_bytes=1000)) as backend:
        damage(backend, KEYS[1])
    url = directory.as_uri()
    outcome = radixkv("storage", "verify", url, "--json", "-")
    found = {"good": 2, "corrupt": 1, "missing": 0, "unreadable": 0, "deleted": 0}
    assert (outcome.status, json.loads(outcome.stdout)) == (1, found | {"good_bytes": 200})
    outcome = radixkv("storage", "verify", "--delete", url)
    text = "2 blocks good (200 bytes), 1 corrupt (1 of them removed), 0 missing, 0 unreadable\n"
    assert outcome == (1, text, "")
    assert radixkv("storage", "verify", url).status == 0


def test_verify_of_what_cannot_be_read_fails(
    radixkv: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = OsFiles.read

    def broken(files: OsFiles, path: str, into: Sequence[memoryview]) -> int:
        if path.endswith(KEYS[0].hex()):
            raise OSError(errno.EIO, "the disk is broken there")
        return read(files, path, into)

    monkeypatch.setattr(OsFiles, "read", broken)
    outcome = radixkv("storage", "verify", directory.as_uri())
    assert outcome.status == 1
    assert outcome.stdout.endswith("0 missing, 1 unreadable\n")


# -- gc


def test_gc_removes_the_least_recently_used_and_sweeps(radixkv: Any, directory: Path) -> None:
    (directory / KEYS[0].hex()[:2] / ".tmp-7").write_bytes(b"half")
    outcome = radixkv("storage", "gc", directory.as_uri(), "--max-bytes", 250)
    text = "1 blocks removed (100 bytes), 2 left (200 bytes), 1 unfinished files removed\n"
    assert outcome == (0, text, "")
    assert not list(directory.glob("*/.tmp-*"))
    outcome = radixkv("storage", "gc", directory.as_uri(), "--all", "--json", "-")
    assert json.loads(outcome.stdout) == {
        "removed": 2,
        "removed_bytes": 200,
        "left": 0,
        "left_bytes": 0,
        "swept_temporaries": 0,
    }


def test_gc_without_an_order_is_refused(radixkv: Any) -> None:
    outcome = radixkv("storage", "gc", "memory://", "--max-bytes", 250)
    message = (
        "radixkv: object storage keeps no LRU order: give the bucket a rule that expires "
        "objects, or remove all\n"
    )
    assert outcome == (2, "", message)
    assert radixkv("storage", "gc", "memory://", "--all").status == 0


# -- a server


def test_a_redis_server_by_namespace(radixkv: Any, server: RedisServer) -> None:
    url = f"redis://:hunter2@127.0.0.1:{server.port}/1"
    patient = BackendOptions(timeout_s=30.0, connect_timeout_s=30.0, namespace=NAMESPACE)
    with closing(open_backend(url, patient)) as backend:
        fill(backend)
        damage(backend, KEYS[0])
    here = [url, "--namespace", NAMESPACE, "--timeout-s", 30]
    assert radixkv("storage", "ls", *here).stdout == "3 blocks, 219 bytes\n"
    for action, text in (
        (("verify",), "0 missing, 0 unreadable"),
        (("gc", "--all"), "0 unfinished files removed"),
    ):
        assert radixkv("storage", *action, url, "--timeout-s", 30).stdout.endswith(
            f"{text}\nOnly blocks without a namespace were considered; use --namespace for those "
            "of generate and of nodes.\n"
        )
    assert radixkv("storage", "verify", *here).status == 1
    refused = radixkv("storage", "gc", *here, "--max-bytes", 1)
    message = (
        "radixkv: a Redis server does not report LRU order: let its maxmemory-policy evict "
        "values, or remove all\n"
    )
    assert refused == (2, "", message)
    outcome = radixkv("storage", "gc", *here, "--all", "--json", "-")
    assert json.loads(outcome.stdout)["removed"] == 3
    assert radixkv("storage", "ls", *here).stdout == "0 blocks, 0 bytes\n"


def test_ls_of_a_redis_server_lists_its_namespaces(radixkv: Any, server: RedisServer) -> None:
    url = f"redis://:hunter2@127.0.0.1:{server.port}/2"
    ls = ["storage", "ls", url, "--timeout-s", 30]
    assert radixkv(*ls) == (0, "0 blocks, 0 bytes without a namespace\n", "")
    patient = BackendOptions(timeout_s=30.0, connect_timeout_s=30.0)
    for namespace, num_values in (("f" * 16, 2), (NAMESPACE, 3)):
        with closing(open_backend(url, replace(patient, namespace=namespace))) as backend:
            fill(backend, num_values)
    last = "0 blocks, 0 bytes without a namespace\n"
    rows = f"{NAMESPACE}  3 blocks  300 bytes\n{'f' * 16}  2 blocks  200 bytes\n"
    assert radixkv(*ls).stdout == rows + last
    with closing(open_backend(url, patient)) as backend:
        fill(backend, 1)
    last = "1 blocks, 100 bytes without a namespace\n"
    outcome = radixkv(*ls, "--keys")
    assert outcome.stdout == f"{KEYS[0].hex()}  100\n" + rows + last
    found = {
        "blocks": 1,
        "bytes": 100,
        "namespaces": [
            {"namespace": NAMESPACE, "blocks": 3, "bytes": 300},
            {"namespace": "f" * 16, "blocks": 2, "bytes": 200},
        ],
    }
    assert json.loads(radixkv(*ls, "--json", "-").stdout) == found
    outcome = radixkv(*ls, "--namespace", "f" * 16, "--json", "-")
    assert json.loads(outcome.stdout) == {"blocks": 2, "bytes": 200}
    outcome = radixkv(*ls, "--namespace", "0" * 16)
    assert outcome == (0, "0 blocks, 0 bytes\n", "")


def test_ls_of_a_bucket_lists_its_namespaces(radixkv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = memory_store()  # in the place of the bucket
    monkeypatch.setattr(objects, "s3_store", lambda *_, **__: store)
    with closing(open_backend("s3://bucket/kv", BackendOptions(namespace=NAMESPACE))) as backend:
        fill(backend)
    text = f"{NAMESPACE}  3 blocks  300 bytes\n0 blocks, 0 bytes without a namespace\n"
    assert radixkv("storage", "ls", "s3://bucket/kv") == (0, text, "")
    text = "0 blocks, 0 bytes without a namespace\n"
    assert radixkv("storage", "ls", "s3://bucket") == (0, text, "")


@pytest.mark.parametrize("action", [["ls"], ["verify"], ["gc", "--all"]], ids=str)
def test_a_wrong_password(radixkv: Any, server: RedisServer, action: list[str]) -> None:
    url = f"redis://:sesame@127.0.0.1:{server.port}"
    outcome = radixkv("storage", *action, url, "--timeout-s", 30)
    message = "listing was refused by the server: wrong or no username or password"
    assert outcome == (2, "", f"radixkv: {message}\n")


@needs_wheels
@pytest.mark.parametrize("action", [["ls"], ["verify"], ["gc", "--all"]], ids=str)
def test_a_store_that_lists_nothing(radixkv: Any, action: list[str]) -> None:
    message = "a Mooncake store does not list its keys; to remove all, restart its master"
    assert radixkv("storage", *action, "mooncake://host") == (2, "", f"radixkv: {message}\n")


@pytest.mark.parametrize("action", [["ls"], ["verify"], ["gc", "--all"]], ids=str)
def test_a_server_that_is_not_there(radixkv: Any, tmp_path: Path, action: list[str]) -> None:
    outcome = radixkv("storage", *action, f"unix://:hunter2@{tmp_path}/none.sock")
    message = "radixkv: listing failed: no connection, or it was lost\n"
    assert outcome == (2, "", message)


def test_a_server_that_never_answers(radixkv: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"redis://127.0.0.1:{listener.getsockname()[1]}"
        outcome = radixkv("storage", "ls", url, "--timeout-s", 0.05)
    assert outcome == (2, "", "radixkv: listing failed: no answer within 0.05 s\n")


@pytest.mark.parametrize("action", [["ls"], ["verify"], ["gc", "--all"]], ids=str)
def test_options_reach_the_backend_which_is_closed(
    radixkv: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: list[str]
) -> None:
    ca_file, opened, closed = tmp_path / "ca.pem", list[tuple[str, BackendOptions]](), list[str]()
    ca_file.touch()

    def open_existing(url: str, options: BackendOptions) -> Backend:
        opened.append((url, options))
        backend = open_backend("memory://", BackendOptions())
        monkeypatch.setattr(backend, "close", lambda: closed.append(url), raising=False)
        return backend

    monkeypatch.setattr(storage, "open_existing", open_existing)
    url = "rediss://host"
    given = ("--ca-file", ca_file, "--timeout-s", 3, "--namespace", NAMESPACE)
    for options in ((), given):
        assert radixkv("storage", *action, url, *options).status == 0
    wanted = BackendOptions(
        ca_file=str(ca_file), timeout_s=3.0, connect_timeout_s=3.0, namespace=NAMESPACE
    )
    assert opened == [(url, BackendOptions()), (url, wanted)]
    assert closed == [url, url]


# -- what is refused


def test_a_directory_that_another_process_has_open(radixkv: Any, directory: Path) -> None:
    with closing(FileBackend(directory, max_bytes=1000)):
        outcome = radixkv("storage", "ls", directory.as_uri())
    message = f"radixkv: the directory {directory} is open already, here or in another process\n"
    assert outcome == (2, "", message)


def test_a_directory_that_is_not_there_is_not_made(radixkv: Any, tmp_path: Path) -> None:
    outcome = radixkv("storage", "ls", (tmp_path / "none").as_uri())
    what = f"opening the directory {tmp_path / 'none'}"
    message = f"radixkv: {what} failed: ENOENT (No such file or directory)\n"
    assert outcome == (2, "", message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "package", "extra"),
    [
        ("redis://:hunter2@host", "redis", "redis"),
        ("s3://bucket", "obstore", "objects"),
        ("mooncake://host", "mooncake", "mooncake"),
    ],
)
def test_a_missing_extra(
    radixkv: Any, monkeypatch: pytest.MonkeyPatch, url: str, package: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    if package == "redis":
        monkeypatch.setitem(sys.modules, "hiredis", sys)  # it is asked for first
    message = f"radixkv: {package} is not installed: pip install 'radixkv[{extra}]'\n"
    assert radixkv("storage", "ls", url) == (2, "", message)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["ls", "http://:hunter2@host"], "a storage URL starts with one of "),
        (["ls", "redis://:hunter2@host:x"], "the Redis URL has no valid host and port"),
        (["ls", "redis://:hunter2@host", "redis://:hunter2@b"], "unrecognized arguments: "),
        (["redis://user:hunt/er2@host"], "argument ACTION: invalid choice: 'redis://...@host'"),
        (["ls", "--timeout-s", "redis://:hunter2@host"], "argument --timeout-s: expected a number"),
        *(
            (
                ["ls", url, "--timeout-s", given],
                "argument --timeout-s: expected a number of seconds from 0 to 2000000, got ",
            )
            for url in ("redis://127.0.0.1:1", "s3://b/p")
            for given in ("2000001", "1e12", "1e300", "inf", "nan", "-1")
        ),
        (["ls", "redis://127.0.0.1:1", "--timeout-s", "2000000"], "listing failed: no connection"),
        (["ls", "env:"], "argument URL: expected the name of an environment variable"),
        (["ls"], "the following arguments are required: URL"),
        (["gc", "memory://"], "one of the arguments --max-bytes --all is required"),
        (["gc", "--max-bytes", "0", "memory://"], "expected an integer of at least 1, got '0'"),
        (["gc", "--max-bytes", "1g", "memory://"], "expected an integer of at least 1, got '1g'"),
        (["gc", "--max-bytes", "1", "--all", "memory://"], "argument --all: not allowed with"),
        (["ls", "memory://", "--timeout-s", "0"], "--timeout-s must be more than 0, got 0"),
        (["ls", "file:///x", "--timeout-s", "1"], "opening the directory /x failed: ENOENT"),
        (["ls", "memory://", "--timeout-s", "1"], "memory:// has no option timeout_s"),
        (["ls", "redis://h", "--ca-file", "/none"], "--ca-file /none: expected a file"),
        (
            ["ls", "redis://h", "--namespace", "llama"],
            "a namespace is the first 16 digits of its digest",
        ),
        (
            ["gc", "file:///x", "--all", "--namespace", NAMESPACE],
            "a directory does not separate namespaces",
        ),
        (["ls", "memory://", "--json", "/none/x"], "the directory /none does not exist"),
    ],
)
def test_wrong_usage_is_one_line_without_secrets(
    radixkv: Any, argv: list[str], message: str
) -> None:
    status, stdout, stderr = radixkv("storage", *argv)
    assert (status, stdout, stderr.count("\n")) == (2, "", 1)
    assert stderr.startswith("radixkv: ")
    assert message in stderr
    assert not any(secret in stderr for secret in ("hunter2", "hunt/er2"))
