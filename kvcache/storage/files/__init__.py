"""The file backend: a directory with one file per block.

Public: `FileBackend`, and `Sync`, the choice of what survives a power cut.
"""

from __future__ import annotations

from .backend import FileBackend, Sync

__all__ = ["FileBackend", "Sync"]
