"""The Mooncake backend: blocks in the pooled memory of several machines; needs ``mooncake``.

Public: `MooncakeBackend`. Mooncake's client runs in processes of its own (`client_main`).
"""

from __future__ import annotations

from .backend import MooncakeBackend

__all__ = ["MooncakeBackend"]
