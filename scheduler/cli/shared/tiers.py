"""The storage tier of `radixkv generate` and of nodes: opening it, and checking that it answers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from ....kvcache.storage import (
    BackendError,
    BackendOptions,
    StorageNamespace,
    StorageWorkers,
    open_backend,
    open_storage,
)
from ....kvcache.storage.keys import KEY_BYTES
from ....kvcache.storage.urls import directory_of, is_server_url
from ..errors import BadInputError

_ANSWER_S: Final = 10.0
"""Timeout of the check at the start, longer than later ones: a slow server is not a wrong one."""


def storage_of_node(arguments: argparse.Namespace, node: str) -> str | None:
    """Return the storage URL of one of several nodes, or None.

    Nodes share a server. A directory serves one process, so each node has its own subdirectory.
    """
    url: str | None = arguments.storage
    directory = None if url is None else directory_of(url)
    if directory is None:
        return url
    Path(directory).mkdir(mode=0o700, exist_ok=True)
    return f"{url}/{node}"


def check_server(arguments: argparse.Namespace) -> None:
    """Reject a storage server that does not answer: its URL is probably wrong.

    A server that goes away later only costs hits.

    Raises:
        BadInputError: With the reason that the server or the network gave.
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
            raise BadInputError(f"the server of --storage cannot be used: {error}") from None


@contextmanager
def storage_of_options(
    arguments: argparse.Namespace, namespace: StorageNamespace | None, *, node: str | None = None
) -> Iterator[StorageWorkers | None]:
    """Open the storage that the options name, or that of a node, and close it at the end."""
    url = arguments.storage if node is None else storage_of_node(arguments, node)
    if url is None:
        yield None
        return
    with closing(open_storage(url, namespace, max_bytes=arguments.storage_max_bytes)) as storage:
        yield storage
