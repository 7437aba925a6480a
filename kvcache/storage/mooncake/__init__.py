"""The Mooncake backend: blocks in the pooled memory of several machines; needs ``mooncake``.

Public: `MooncakeBackend`, and `master_of`, which parses its URL. Mooncake's client runs in
subprocesses: `client_process` starts them, `client_main` is their program.
"""

from __future__ import annotations

from .backend import MooncakeBackend, master_of

__all__ = ["MooncakeBackend", "master_of"]
