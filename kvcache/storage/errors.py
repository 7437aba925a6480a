"""Storage errors, as a tree of types. Each error carries its numbers.

::

    RadixKVError
    └── StorageError
        ├── StorageKeyError              a key that is not 32 bytes, or invalid namespace fields
        ├── StorageUrlError              a URL that names no storage
        ├── PayloadError                 buffers that cannot be read or filled
        ├── OperationError               an unknown operation id
        ├── StorageClosedError           a call after close
        ├── StorageInUseError            a directory that is already open
        ├── UnsupportedError             a request that this kind of backend cannot serve
        ├── MissingPackageError          an extra of radixkv is not installed
        ├── MissingLibraryError          a system library is not installed
        └── BackendError                 a failed backend call: the block is FAILED
            ├── BackendFullError         no room for the value, even after eviction
            ├── BackendIOError           a system call failed; carries its errno
            ├── OpenToOthersError        a directory that other users can access
            ├── BackendUnreachableError  no connection, or no answer in time
            └── BackendRefusedError      the server refused the request

No error carries a URL, a password, a salt or the bytes of a value. The texts never quote a client
library, whose errors may hold a password. For the same reason its error is not kept as the cause.
"""

from __future__ import annotations

import errno as errnos
import os

from ..errors import RadixKVError


class StorageError(RadixKVError):
    """Base class of all storage errors."""


class StorageKeyError(StorageError, ValueError):
    """A key is not 32 bytes, or the fields of a namespace are invalid."""


class StorageUrlError(StorageError, ValueError):
    """A URL is malformed, its scheme is unknown, or an option does not fit its scheme."""


class PayloadError(StorageError, ValueError):
    """A buffer is not contiguous or not writable, or buffers and keys differ in number."""


class OperationError(StorageError, ValueError):
    """An operation id that this storage never returned."""


class StorageClosedError(StorageError):
    """Storage was called after it was closed."""


class StorageInUseError(StorageError):
    """The directory is already open, in this process or another. It has one user at a time."""


class UnsupportedError(StorageError):
    """This kind of backend cannot serve the request; the text names an alternative."""


class MissingPackageError(StorageError, ImportError):
    """A Python package that a backend needs is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed: pip install 'radixkv[{extra}]'")
        self.package = package
        self.extra = extra


class MissingLibraryError(StorageError, ImportError):
    """A system library that a backend needs is not installed."""

    def __init__(self, library: str, debian_package: str) -> None:
        super().__init__(f"{library} is not installed: apt-get install {debian_package}")
        self.library = library
        self.debian_package = debian_package


class BackendError(StorageError):
    """A backend call failed; at worst the block is a miss from now on."""


class BackendFullError(BackendError):
    """There is no room for a value, even after evicting all others."""

    def __init__(self, num_bytes: int, max_bytes: int) -> None:
        super().__init__(f"a value of {num_bytes} bytes has no room: the budget is {max_bytes}")
        self.num_bytes = num_bytes
        self.max_bytes = max_bytes


class BackendIOError(BackendError):
    """A system call failed; ``errno`` says why (ENOSPC: disk full, EIO: disk broken)."""

    def __init__(self, doing: str, errno: int | None) -> None:
        number = errno if errno is not None else 0
        name = errnos.errorcode.get(number, "unknown")
        super().__init__(f"{doing} failed: {name} ({os.strerror(number)})")
        self.doing = doing
        self.errno = number


class OpenToOthersError(BackendError):
    """Other users can read or write a directory, or own it."""

    def __init__(self, directory: str, mode: int) -> None:
        super().__init__(
            f"the directory {directory} has mode {mode:04o}, or another owner: it must be for this "
            "user alone (chmod 700)"
        )
        self.mode = mode


class BackendUnreachableError(BackendError):
    """The server cannot be reached, closed the connection, or did not answer in time."""

    def __init__(self, doing: str, reason: str) -> None:
        super().__init__(f"{doing} failed: {reason}")
        self.doing = doing
        self.reason = reason


class BackendRefusedError(BackendError):
    """The server refused the request; ``reply`` gives the reason in one word."""

    def __init__(self, doing: str, reply: str) -> None:
        super().__init__(f"{doing} was refused by the server: {reply}")
        self.doing = doing
        self.reply = reply
