"""`radixkv storage`: what an operator does to the blocks that are kept outside the process."""

from __future__ import annotations

import argparse
from collections import Counter
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...kvcache.storage import (
    Backend,
    BackendOptions,
    open_existing,
    remove_values,
    verify_values,
)
from ...kvcache.storage.interface import SharedBackend
from ...kvcache.storage.urls import is_server_url
from .errors import BadInputError
from .output import (
    check_destination,
    emit,
    format_table,
)


def run(arguments: argparse.Namespace) -> int:
    """Do what was asked, print what was found, and return 1 if a block is not what was stored."""
    check_destination(arguments.json)
    if arguments.timeout_s == 0:
        raise BadInputError("--timeout-s must be positive")
    if arguments.ca_file is not None and not Path(arguments.ca_file).is_file():
        raise BadInputError(f"--ca-file {arguments.ca_file}: is not a file")
    options = BackendOptions(
        ca_file=arguments.ca_file,
        timeout_s=arguments.timeout_s,
        connect_timeout_s=arguments.timeout_s,
        namespace=arguments.namespace,
    )
    with closing(open_existing(arguments.url, options)) as backend:
        match arguments.action:
            case "ls":
                return _list(arguments, backend)
            case "verify":
                return _verify(arguments, backend)
            case _:
                return _collect(arguments, backend)


def _list(arguments: argparse.Namespace, backend: Backend) -> int:
    """Count what is meant; where that is what has no namespace, also what each namespace has."""
    apart = _means_no_namespace(arguments)
    if apart and isinstance(backend, SharedBackend):
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
    namespaces = [(each, blocks[each], num_bytes[each]) for each in sorted(blocks) if each]
    results: dict[str, Any] = {"blocks": blocks[""], "bytes": num_bytes[""]}
    if arguments.keys:
        results["keys"] = [{"key": key, "bytes": size} for key, size in keys]
    if apart:
        columns = ("namespace", "blocks", "bytes")
        results["namespaces"] = [dict(zip(columns, each, strict=True)) for each in namespaces]

    def describe() -> str:
        rows = [format_table((key, f"{size:,}") for key, size in keys)] if keys else []
        if namespaces:
            cells = ((each, f"{n:,} blocks", f"{size:,} bytes") for each, n, size in namespaces)
            rows.append(format_table(cells))
        whose = " without a namespace" if apart else ""
        return "\n".join([*rows, f"{blocks['']:,} blocks, {num_bytes['']:,} bytes{whose}"])

    emit(arguments.json, results, describe)
    return 0


def _verify(arguments: argparse.Namespace, backend: Backend) -> int:
    found = verify_values(backend, delete=arguments.delete)
    results = asdict(found)
    emit(
        arguments.json,
        results,
        lambda: (
            f"{found.good:,} blocks good ({found.good_bytes:,} bytes), "
            f"{found.corrupt:,} corrupt ({found.deleted:,} of them removed), "
            f"{found.missing:,} missing, {found.unreadable:,} unreadable{_of_whom(arguments)}"
        ),
    )
    return 1 if found.corrupt or found.unreadable else 0


def _collect(arguments: argparse.Namespace, backend: Backend) -> int:
    # Opening a directory has swept it already: nobody else can be writing there.
    swept = backend.stats().get("swept_temporaries", 0)
    done = remove_values(backend, 0 if arguments.all else arguments.max_bytes)
    results = {**asdict(done), "swept_temporaries": swept}
    emit(
        arguments.json,
        results,
        lambda: (
            f"{done.removed:,} blocks removed ({done.removed_bytes:,} bytes), "
            f"{done.left:,} left ({done.left_bytes:,} bytes), "
            f"{swept:,} unfinished files removed{_of_whom(arguments)}"
        ),
    )
    return 0


def _of_whom(arguments: argparse.Namespace) -> str:
    """Say which blocks of a server were not meant: nearly all, as our own commands name theirs."""
    if not _means_no_namespace(arguments):
        return ""
    return (
        "\nof the blocks without a namespace; those of generate and of nodes have one: --namespace"
    )


def _means_no_namespace(arguments: argparse.Namespace) -> bool:
    return arguments.namespace is None and is_server_url(arguments.url)
