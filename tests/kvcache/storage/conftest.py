"""Servers shared by several test files; one per test process."""

from collections.abc import Iterator

import pytest

from . import mooncake_server
from .fake_s3 import FakeS3, serving
from .mooncake_server import MooncakeServer
from .redis_server import RedisServer, running


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[RedisServer]:
    """A server for tests that use a separate prefix and do not stop or configure it."""
    with running() as server:
        yield server


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A server for one test, which may stop or kill it."""
    with running() as server:
        yield server


@pytest.fixture(scope="session")
def shared_mooncake() -> Iterator[MooncakeServer]:
    """A store for tests that use a separate namespace and do not stop it."""
    with mooncake_server.running() as store:
        yield store


@pytest.fixture
def mooncake() -> Iterator[MooncakeServer]:
    """A store for one test, which may stop or kill it."""
    with mooncake_server.running() as store:
        yield store


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    """A server, with the environment variables that point to it."""
    with serving() as server:
        environment = {
            "AWS_ACCESS_KEY_ID": "an-access-key",
            "AWS_SECRET_ACCESS_KEY": "a-secret-key",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": server.url,
            "AWS_ALLOW_HTTP": "true",
            "NO_PROXY": "127.0.0.1",
        }
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield server
