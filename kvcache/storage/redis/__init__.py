"""The Redis backend: blocks in a Redis or Valkey server; needs the extra ``redis``.

Public: `RedisBackend`, and `RedisAddress`, which parses its URL.
"""

from __future__ import annotations

from .address import RedisAddress
from .backend import RedisBackend

__all__ = ["RedisAddress", "RedisBackend"]
