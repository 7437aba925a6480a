"""The secret that nodes share, which nothing prints."""

from __future__ import annotations

import hmac
import os
import stat
from pathlib import Path
from typing import Final

from .errors import SecretError

ENVIRONMENT: Final = "RADIXKV_SECRET"
KEY_BYTES: Final = 32
_MIN_BYTES: Final = 16


class Secret:
    """What all nodes know and nobody else does; keys are made of it."""

    def __init__(self, secret: bytes) -> None:
        """Take a secret.

        Raises:
            SecretError: if it is short.
        """
        if len(secret) < _MIN_BYTES:
            raise SecretError(f"a secret needs {_MIN_BYTES} bytes, got {len(secret)}")
        self._secret = secret

    def __repr__(self) -> str:
        return "Secret(...)"

    def __reduce__(self) -> str:
        raise TypeError("a secret stays in its process")

    def key(self, label: bytes) -> bytes:
        """Return the key of KEY_BYTES for one purpose, the same for all holders.

        It is HMAC-SHA256 of the label: no key says anything about the secret, or another key.
        """
        return hmac.digest(self._secret, label, "sha256")


def load_secret(path: str | os.PathLike[str] | None = None) -> Secret | None:
    """Read the secret from a file, or else from the environment; None if neither has one.

    Args:
        path: of a file that only its owner can read (0600); without it, the variable
            RADIXKV_SECRET is used.

    Raises:
        SecretError: for a file that is not there, or others can read, and for a short secret.
    """
    if path is None:
        text = os.environ.get(ENVIRONMENT)
        return Secret(text.encode()) if text else None
    try:
        with Path(path).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode) or mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise SecretError(
                    f"the secret file {os.fspath(path)} has mode {stat.S_IMODE(mode):04o}: it must "
                    "be a plain file that only its owner can read (chmod 600)"
                )
            return Secret(file.read(1 << 16).strip())
    except OSError as error:
        raise SecretError(
            f"the secret file {os.fspath(path)} cannot be read: {error.strerror}"
        ) from None
