"""Address and login of a Redis server, parsed from a URL; it does not show secrets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

from ..errors import StorageUrlError

DEFAULT_PORT: Final = 6379
_ESCAPES: Final = "in a password, '/' is written %2F, '?' %3F, '#' %23 and '@' %40"


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """Address of a Redis server.

    Attributes:
        host: name or IP address; unused with unix_path.
        port: TCP port; unused with unix_path.
        db: number of the database.
        username: user name, not shown; None for the default user.
        password: password, not shown; None if the server needs none.
        tls: whether to encrypt, and to verify the server's certificate and name.
        unix_path: path of a local socket, instead of host and port.
    """

    host: str = "localhost"
    port: int = DEFAULT_PORT
    db: int = 0
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    unix_path: str | None = None

    @classmethod
    def from_url(cls, url: str) -> RedisAddress:
        """Parse a URL.

        Args:
            url: ``redis://[[USER]:PASSWORD@]HOST[:PORT][/DB]``, the same with ``rediss`` for TLS,
                or ``unix://[[USER]:PASSWORD@]/PATH[?db=DB]``. USER and PASSWORD are
                percent-encoded.

        Raises:
            StorageUrlError: for any other URL. The text shows no part of it.
        """
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:  # its text quotes the URL
            raise StorageUrlError(f"the Redis URL has no valid host and port; {_ESCAPES}") from None
        if parts.fragment:
            raise StorageUrlError(f"the Redis URL has a '#'; {_ESCAPES}")
        username = unquote(parts.username) if parts.username else None
        password = unquote(parts.password) if parts.password else None
        if parts.scheme == "unix":
            if host or not parts.path:
                raise StorageUrlError("a Redis socket's URL is unix:///PATH or unix:///PATH?db=DB")
            path = unquote(parts.path)
            db = _socket_db(parts)
            return cls(db=db, username=username, password=password, unix_path=path)
        if parts.scheme not in ("redis", "rediss"):
            raise StorageUrlError("a Redis URL starts with redis://, rediss:// or unix://")
        if not host or parts.query:
            raise StorageUrlError(f"the Redis URL is not redis://HOST[:PORT][/DB]; {_ESCAPES}")
        return cls(
            host=host,
            port=DEFAULT_PORT if port is None else port,
            db=_db(parts.path.removeprefix("/")),
            username=username,
            password=password,
            tls=parts.scheme == "rediss",
        )


def _socket_db(parts: SplitResult) -> int:
    if not parts.query:
        return 0
    name, _, value = parts.query.partition("=")
    if name != "db":
        raise StorageUrlError("the only option of a Redis socket's URL is db")
    return _db(value)


def _db(text: str) -> int:
    if not text:
        return 0
    if not (text.isascii() and text.isdigit()):
        raise StorageUrlError(f"the Redis URL's database is not a number; {_ESCAPES}")
    return int(text)
