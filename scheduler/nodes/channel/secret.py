"""The secret that all nodes of a deployment share."""

from __future__ import annotations

import hmac
import os
import stat
from pathlib import Path
from typing import Final

from .errors import SecretError

ENVIRONMENT: Final = "RADIXKV_SECRET"
_MIN_BYTES: Final = 16


class Secret:
    """A shared secret, from which keys are derived. Nothing prints or copies it."""

    def __init__(self, secret: bytes) -> None:
        """Wrap a secret.

        Raises:
            SecretError: if it is too short.
        """
        if len(secret) < _MIN_BYTES:
            raise SecretError(f"a secret needs {_MIN_BYTES} bytes, got {len(secret)}")
        self._secret = secret

    def __repr__(self) -> str:
        return "Secret(...)"

    def __reduce__(self) -> str:
        raise TypeError("a secret stays in its process")

    def key(self, label: bytes) -> bytes:
        """Derive a key of 32 bytes for one purpose; all holders derive the same.

        The key is the HMAC-SHA256 of the label, so it reveals neither the secret nor other keys.
        """
        return hmac.digest(self._secret, label, "sha256")


def load_secret(path: str | os.PathLike[str] | None = None) -> Secret | None:
    """Read the secret from a file or the environment.

    Args:
        path: a file that only its owner can read (mode 0600). None: read RADIXKV_SECRET.

    Returns:
        The secret, or None if path is None and the variable is unset or empty.

    Raises:
        SecretError: for a file that cannot be read or that others can read, and for a secret that
            is too short.
    """
    if path is None:
        secret = os.environb.get(ENVIRONMENT.encode())
        return Secret(secret) if secret else None
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
