"""Checked access to the fields of JSON files in a checkpoint."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import CheckpointError, CheckpointFileError


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        CheckpointFileError: if it is missing, cannot be read, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointFileError(path, "no such file") from None
    except OSError as error:
        raise CheckpointFileError(path, f"cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointFileError(path, f"not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointFileError(path, f"expected a JSON object, got {type(content).__name__}")
    return content


def as_object(entries: Mapping[str, Any], path: Path, key: str) -> Mapping[str, Any]:
    """Return an entry that must be an object; an empty one if it is missing or falsy.

    Raises:
        CheckpointError: if it is something else.
    """
    value = entries.get(key) or {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: {key} must be an object, got {value!r}")
    return value


def as_count(entries: Mapping[str, Any], path: Path, key: str, default: int | None = None) -> int:
    """Return an entry that must be an integer of at least 1.

    Raises:
        CheckpointError: if it is not, or if it is missing and has no default.
    """
    value = entries.get(key)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"{path}: no entry {key!r}")
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{path}: {key} must be an integer of at least 1, got {value!r}")
    return value


def as_positive(entries: Mapping[str, Any], path: Path, key: str, default: float) -> float:
    """Return an entry that must be a finite number above 0, or the default if it is missing.

    Raises:
        CheckpointError: if it is not.
    """
    value = entries.get(key)
    if value is None:
        value = default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= sys.float_info.max:
        raise CheckpointError(f"{path}: {key} must be a number above 0, got {value!r}")
    return float(value)
