"""`radixkv storage`: what an operator does to the blocks that are kept outside the process."""

from __future__ import annotations

import argparse
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
from ...kvcache.storage.urls import names_server
from .errors import BadInputError
from .output import check_destination, emit, format_table


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
    blocks = num_bytes = 0
    keys: list[tuple[str, int]] = []
    for value in backend.list_values():
        blocks += 1
        num_bytes += value.num_bytes
        if arguments.keys:
            keys.append((value.key.hex(), value.num_bytes))
    results: dict[str, Any] = {"blocks": blocks, "bytes": num_bytes}
    if arguments.keys:
        results["keys"] = [{"key": key, "bytes": size} for key, size in keys]

    def describe() -> str:
        rows = format_table((key, f"{size:,}") for key, size in keys) + "\n" if keys else ""
        return f"{rows}{blocks:,} blocks, {num_bytes:,} bytes{_of_whom(arguments)}"

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
    if arguments.namespace is not None or not names_server(arguments.url):
        return ""
    return (
        "\nof the blocks without a namespace; those of generate and of nodes have one: --namespace"
    )
