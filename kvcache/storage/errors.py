"""Everything that storage refuses or meets, as a tree of types; each error carries its numbers.

::

    RadixKVError
    └── StorageError
        ├── StorageKeyError      a key that is not 32 bytes, or fields that make no key
        ├── PayloadError         buffers that cannot be read or filled as they are
        ├── OperationError       an operation id that was never given out
        ├── StorageClosedError   a call after close
        ├── StorageInUseError    a directory that is open already
        ├── UnsupportedError     what this backend cannot do, whatever is in it
        └── BackendError         a backend could not do what it was asked: the block is FAILED
            ├── BackendFullError     no room for the value, even after eviction
            ├── BackendIOError       the system below said no; carries its errno
            └── OpenToOthersError    a directory that is not its owner's alone

None of them carries a URL, a password, a salt or the bytes of a value.
"""

from __future__ import annotations

import errno as errnos
import os

from ..errors import RadixKVError


class StorageError(RadixKVError):
    """Base of everything that storage raises on purpose."""


class StorageKeyError(StorageError, ValueError):
    """A key is not 32 bytes, or the fields of a namespace cannot make one."""


class PayloadError(StorageError, ValueError):
    """A buffer is not contiguous, not writable, or there are more or fewer than keys."""


class OperationError(StorageError, ValueError):
    """An operation id that this storage never gave out."""


class StorageClosedError(StorageError):
    """Storage was called after it was closed."""


class StorageInUseError(StorageError):
    """The directory is open already, here or in another process; it has one user at a time."""


class UnsupportedError(StorageError):
    """The backend of this scheme cannot do what was asked; the text says what can be done."""


class BackendError(StorageError):
    """A backend could not do what it was asked; at worst the block is a miss from now on."""


class BackendFullError(BackendError):
    """There is no room for a value, even when all others were evicted."""

    def __init__(self, num_bytes: int, max_bytes: int) -> None:
        super().__init__(f"a value of {num_bytes} bytes has no room: the budget is {max_bytes}")
        self.num_bytes = num_bytes
        self.max_bytes = max_bytes


class BackendIOError(BackendError):
    """The system below refused; `errno` says why (ENOSPC: full, EIO: broken)."""

    def __init__(self, doing: str, errno: int | None) -> None:
        number = errno if errno is not None else 0
        name = errnos.errorcode.get(number, "unknown")
        super().__init__(f"{doing} failed: {name} ({os.strerror(number)})")
        self.doing = doing
        self.errno = number


class OpenToOthersError(BackendError):
    """Users other than this one may read or write a directory, or own it."""

    def __init__(self, directory: str, mode: int) -> None:
        super().__init__(
            f"the directory {directory} has mode {mode:04o}, or another owner: it must be for this "
            "user alone (chmod 700)"
        )
        self.mode = mode


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
