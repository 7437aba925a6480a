"""The object storage backend: S3 and compatible services, a directory, or memory.

Public: `ObjectStorageBackend`, and `s3_store` and `memory_store`, which make its stores. Needs the
extra ``objects``.
"""

from __future__ import annotations

from .backend import ObjectStorageBackend, memory_store, s3_store

__all__ = ["ObjectStorageBackend", "memory_store", "s3_store"]
