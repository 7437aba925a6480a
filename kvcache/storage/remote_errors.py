"""What storage on another machine adds to the errors of storage.

::

    StorageError
    ├── MissingPackageError          an extra of radixkv is not installed
    ├── MissingLibraryError          a library of the system is not installed
    ├── StorageUrlError              a URL that names no storage
    └── BackendError
        ├── BackendUnreachableError  no connection, or no answer in time
        └── BackendRefusedError      the server answered, and said no

The texts are made here, and hold nothing of a URL or of a client's own text: both may have a
password in them. For the same reason the client's error is not kept as the cause.
"""

from __future__ import annotations

from .errors import BackendError, StorageError


class MissingPackageError(StorageError, ImportError):
    """A package that a backend needs is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed: pip install 'radixkv[{extra}]'")
        self.package = package
        self.extra = extra


class MissingLibraryError(StorageError, ImportError):
    """A library of the system that a backend's package needs is not installed."""

    def __init__(self, library: str, debian_package: str) -> None:
        super().__init__(f"{library} is not installed: apt-get install {debian_package}")
        self.library = library
        self.debian_package = debian_package


class StorageUrlError(StorageError, ValueError):
    """A URL is malformed, or of no scheme that is known, or an option is not for its scheme."""


class BackendUnreachableError(BackendError):
    """The server cannot be reached, went away, or did not answer in time."""

    def __init__(self, doing: str, reason: str) -> None:
        super().__init__(f"{doing} failed: {reason}")
        self.doing = doing
        self.reason = reason


class BackendRefusedError(BackendError):
    """The server answered that it will not; `reply` says why in one word."""

    def __init__(self, doing: str, reply: str) -> None:
        super().__init__(f"{doing} was refused by the server: {reply}")
        self.doing = doing
        self.reply = reply
