"""`radixkv storage`: list, verify and remove the blocks in storage."""

from __future__ import annotations

import argparse
from collections import Counter
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...kvcache.storage import Backend, BackendOptions, open_existing, remove_values, verify_values
from ...kvcache.storage.interface import SharedBackend
from ...kvcache.storage.urls import is_server_url
from ..terminal.console import table
from .errors import BadInputError
from .shared.output import check_destination, emit


def run(arguments: argparse.Namespace) -> int:
    """Run the action, print its results, and return 1 if a block is corrupt or unreadable."""
    check_destination(arguments.json)
    if arguments.timeout_s == 0:
        raise BadInputError("--timeout-s must be more than 0, got 0")
    if arguments.ca_file is not None and not Path(arguments.ca_file).is_file():
        raise BadInputError(f"--ca-file {arguments.ca_file}: expected a file")
    options = BackendOptions(
        ca_file=arguments.ca_file,
        timeout_s=arguments.timeout_s,
        connect_timeout_s=arguments.timeout_s,
        namespace=arguments.namespace,
    )
    action = {"ls": _list, "verify": _verify, "gc": _collect}[arguments.action]
    with closing(open_existing(arguments.url, options)) as backend:
        return action(arguments, backend)


def _list(arguments: argparse.Namespace, backend: Backend) -> int:
    """Count the blocks; on a server without --namespace, also those of each namespace."""
    lists_namespaces = _skips_namespaces(arguments)
    if lists_namespaces and isinstance(backend, SharedBackend):
        listed = backend.list_namespaces()
    else:
        listed = (("", value) for value in backend.list_values())
    blocks: Counter[str] = Counter()
    num_bytes: Counter[str] = Counter()
    keys: list[tuple[str, int]] = []
    for namespace, value in listed:
        blocks[namespace] += 1
        num_bytes[namespace] += value.num_bytes
        if arguments.keys and not namespace:
            keys.append((value.key.hex(), value.num_bytes))
    results: dict[str, Any] = {"blocks": blocks[""], "bytes": num_bytes[""]}
    parts: list[Any] = [f"{key}  {size:,}" for key, size in keys]
    if arguments.keys:
        results["keys"] = [{"key": key, "bytes": size} for key, size in keys]
    if lists_namespaces:
        results["namespaces"] = [
            {"namespace": each, "blocks": blocks[each], "bytes": num_bytes[each]}
            for each in sorted(blocks)
            if each
        ]
        if results["namespaces"]:
            rows = [
                (each["namespace"], f"{each['blocks']:,} blocks", f"{each['bytes']:,} bytes")
                for each in results["namespaces"]
            ]
            parts.append(table((), rows))
    without = " without a namespace" if lists_namespaces else ""
    parts.append(f"{blocks['']:,} blocks, {num_bytes['']:,} bytes{without}")
    emit(arguments.json, results, *parts)
    return 0


def _verify(arguments: argparse.Namespace, backend: Backend) -> int:
    found = verify_values(backend, delete=arguments.delete)
    emit(
        arguments.json,
        asdict(found),
        f"{found.good:,} blocks good ({found.good_bytes:,} bytes), "
        f"{found.corrupt:,} corrupt ({found.deleted:,} of them removed), "
        f"{found.missing:,} missing, {found.unreadable:,} unreadable",
        *_scope(arguments),
    )
    return 1 if found.corrupt or found.unreadable else 0


def _collect(arguments: argparse.Namespace, backend: Backend) -> int:
    # Opening a directory has removed its unfinished files: no other process can be writing there.
    swept = backend.stats().get("swept_temporaries", 0)
    done = remove_values(backend, 0 if arguments.all else arguments.max_bytes)
    emit(
        arguments.json,
        {**asdict(done), "swept_temporaries": swept},
        f"{done.removed:,} blocks removed ({done.removed_bytes:,} bytes), "
        f"{done.left:,} left ({done.left_bytes:,} bytes), "
        f"{swept:,} unfinished files removed",
        *_scope(arguments),
    )
    return 0


def _scope(arguments: argparse.Namespace) -> list[str]:
    """Warn that most blocks of a server were skipped, as our own commands use namespaces."""
    if not _skips_namespaces(arguments):
        return []
    return [
        "Only blocks without a namespace were considered; use --namespace for those of generate "
        "and of nodes."
    ]


def _skips_namespaces(arguments: argparse.Namespace) -> bool:
    return arguments.namespace is None and is_server_url(arguments.url)
