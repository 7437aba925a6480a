"""The tiers of `radixkv generate`: what may go together, and the storage that is opened for it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

from ...kvcache.storage import (
    BackendError,
    BackendOptions,
    StorageNamespace,
    StorageStats,
    StorageWorkers,
    open_backend,
)
from ...kvcache.storage.keys import KEY_BYTES
from ...kvcache.storage.urls import directory_of, is_server_url
from .errors import BadInputError

_MAX_BYTES: Final = 16 * 2**30
_MAX_BYTES_IN_FLIGHT: Final = 2**30
_ANSWER_S: Final = 10.0
"""More than a server may take afterwards: one that is slow for a moment is no wrong one."""


def check_tiers(arguments: argparse.Namespace) -> None:
    """Refuse options that do not go together.

    Raises:
        BadInputError: which needs which.
    """
    preempt = getattr(arguments, "preempt", "recompute")  # a prefill node preempts nothing
    if arguments.host_blocks is None:
        for option in ("storage", "host_write"):
            if getattr(arguments, option) is not None:
                raise BadInputError(f"--{option.replace('_', '-')} needs --host-blocks")
        if preempt != "recompute":
            raise BadInputError(f"--preempt {preempt} needs --host-blocks")
    elif getattr(arguments, "no_prefix_cache", False):
        raise BadInputError("--host-blocks keeps the prefix cache, but --no-prefix-cache is given")
    if arguments.storage is None:
        if preempt == "storage":
            raise BadInputError("--preempt storage needs --storage")
        if arguments.storage_max_bytes is not None:
            raise BadInputError("--storage-max-bytes needs --storage")


def storage_of_node(arguments: argparse.Namespace, node: str) -> str | None:
    """Return the URL for one of several nodes: servers are for all, but a directory is for one
    process alone, so each has its own in it.
    """
    url: str | None = arguments.storage
    directory = None if url is None else directory_of(url)
    if directory is None:
        return url
    Path(directory).mkdir(mode=0o700, exist_ok=True)
    return f"{url}/{node}"


def check_server(arguments: argparse.Namespace) -> None:
    """Refuse a storage server that does not answer now: most likely its URL is wrong.

    One that goes away later costs hits, and nothing else.

    Raises:
        BadInputError: with what the server, or the way to it, said.
    """
    if arguments.storage is None or not is_server_url(arguments.storage):
        return
    options = BackendOptions(
        max_bytes=arguments.storage_max_bytes, timeout_s=_ANSWER_S, connect_timeout_s=_ANSWER_S
    )
    with closing(open_backend(arguments.storage, options)) as backend:
        try:
            backend.contains([bytes(KEY_BYTES)])
        except BackendError as error:
            raise BadInputError(f"the server of --storage is of no use: {error}") from None


@contextmanager
def open_storage(
    arguments: argparse.Namespace, namespace: StorageNamespace | None, *, node: str | None = None
) -> Iterator[StorageWorkers | None]:
    """Open the storage that was asked for, if any, and close it at the end."""
    url = arguments.storage if node is None else storage_of_node(arguments, node)
    if url is None:
        yield None
        return
    max_bytes = arguments.storage_max_bytes
    if max_bytes is None and url.startswith("file:"):
        max_bytes = _MAX_BYTES
    options = BackendOptions(max_bytes=max_bytes, namespace=namespace)
    backend = open_backend(url, options)
    storage = StorageWorkers(backend, max_bytes_in_flight=_MAX_BYTES_IN_FLIGHT)
    try:
        yield storage
    finally:
        storage.close()


def describe_storage(stats: StorageStats) -> dict[str, Any]:
    """Return the counts of a storage for JSON, with names for its statuses."""
    return {
        "blocks": {status.name.lower(): count for status, count in stats.blocks.items()},
        "stored_bytes": stats.stored_bytes,
        "loaded_bytes": stats.loaded_bytes,
        "dropped_bytes": stats.dropped_bytes,
        "errors": dict(stats.errors),
    }
