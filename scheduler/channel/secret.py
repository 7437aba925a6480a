"""The secret that nodes share, which nothing prints."""

from __future__ import annotations

import hmac
import os
import stat
from pathlib import Path
from typing import Final

from .errors import SecretError

ENVIRONMENT: Final = "RADIXKV_SECRET"
MAC_BYTES: Final = 32
_MIN_BYTES: Final = 16


class Secret:
    """Signs bytes, and checks signatures: HMAC-SHA256."""

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

    def sign(self, data: bytes) -> bytes:
        """Return the code that only a holder of the secret can make of some bytes."""
        return hmac.digest(self._secret, data, "sha256")

    def verifies(self, code: bytes, data: bytes) -> bool:
        """Whether a code is that of some bytes; takes as long for any wrong one."""
        return hmac.compare_digest(code, self.sign(data))


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
