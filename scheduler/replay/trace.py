"""Request traces in Mooncake's format: reading, validation, and prompts made from hash ids.

Each line is a JSON object::

    {"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 2353]}

`timestamp` is in milliseconds and the lengths are in tokens. `hash_ids` has one id per 512 input
tokens; the last block may be partial. Equal ids mean equal tokens from position 0 to the end of the
block. Other keys and blank lines are ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import NoReturn, TypeGuard

import numpy as np

from ...kvcache.errors import RadixKVError
from ...kvcache.tokens import Int32Array
from ..request import MAX_TOKENS

TOKENS_PER_HASH_ID = 512
MAX_HASH_ID = (2**31 - TOKENS_PER_HASH_ID) // TOKENS_PER_HASH_ID
"""The largest id whose last token, ``id * 512 + 511``, is an int32."""


class TraceError(RadixKVError, ValueError):
    """A trace that cannot be read.

    Attributes:
        path: The file.
        line: Number of the line, from 1; None if the error concerns the whole file.
        reason: Description of the error, without the place.
    """

    def __init__(self, path: Path, line: int | None, reason: str) -> None:
        place = f"{path}" if line is None else f"{path}, line {line}"
        super().__init__(f"{place}: {reason}")
        self.path = path
        self.line = line
        self.reason = reason


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace; see the module for the fields."""

    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SkippedLine:
    """A malformed line that was skipped, with its number from 1."""

    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in file order, and the lines that were skipped."""

    requests: tuple[TraceRequest, ...]
    skipped: tuple[SkippedLine, ...] = ()
    name: str = "trace"

    @property
    def num_input_tokens(self) -> int:
        """Number of input tokens of all requests."""
        return sum(request.input_length for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens of all requests."""
        return sum(request.output_length for request in self.requests)

    @property
    def num_out_of_order(self) -> int:
        """Number of requests with an earlier timestamp than the line above."""
        times = [request.timestamp_ms for request in self.requests]
        return sum(later < earlier for earlier, later in pairwise(times))


def bundled_trace_path() -> Path:
    """Return the bundled trace: the first 1,000 requests of Mooncake's conversation trace."""
    package = __name__.rsplit(".", 2)[0]
    return Path(str(resources.files(package).joinpath("data", "conversation_1000.jsonl")))


def read_trace(path: Path, limit: int | None = None, skip_malformed: bool = False) -> Trace:
    """Read a trace and validate every line.

    Args:
        path: A JSON Lines file.
        limit: Number of valid requests to read; None for all.
        skip_malformed: Skip and list malformed lines instead of rejecting the file.

    Raises:
        TraceError: The file cannot be read or has no request, a line is malformed (unless skipped),
            or limit is below 1.
    """
    if limit is not None and limit < 1:
        raise TraceError(path, None, f"the number of requests must be at least 1, got {limit}")
    requests: list[TraceRequest] = []
    skipped: list[SkippedLine] = []
    try:
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if limit is not None and len(requests) == limit:
                    break
                if not line.strip():
                    continue
                try:
                    requests.append(parse_line(line))
                except _MalformedLine as error:
                    if not skip_malformed:
                        raise TraceError(path, number, str(error)) from None
                    skipped.append(SkippedLine(number, str(error)))
    except OSError as error:
        raise TraceError(path, None, f"cannot be read: {error.strerror or error}") from None
    if not requests:
        malformed = f" ({len(skipped)} malformed lines were skipped)" if skipped else ""
        raise TraceError(path, None, f"has no requests{malformed}")
    return Trace(tuple(requests), tuple(skipped), path.name)


def tokens(request: TraceRequest) -> Int32Array:
    """Make the prompt of a request: token ``id * 512 + i`` at offset i of each block.

    Requests share exactly the tokens that their hash ids imply.

    Returns:
        int32[input_length].

    Raises:
        TraceError: An id is too large for int32; never for a request from `read_trace`.
    """
    ids = np.asarray(request.hash_ids, dtype=np.int64)
    if ids.size and int(ids.max()) > MAX_HASH_ID:
        raise TraceError(Path(), None, f"hash id {ids.max()} is above {MAX_HASH_ID}: {_OVERFLOW}")
    starts = (ids * TOKENS_PER_HASH_ID).astype(np.int32)
    offsets = np.arange(TOKENS_PER_HASH_ID, dtype=np.int32)
    return (starts[:, None] + offsets).reshape(-1)[: request.input_length]


# ----------------------------------------------------------------------------- one line

_OVERFLOW = "its tokens (id * 512 + offset) would not fit int32"


class _MalformedLine(Exception):
    """The error in a line; the reader adds the place."""


def parse_line(line: bytes) -> TraceRequest:
    """Parse one line, or raise `_MalformedLine` with the reason."""
    try:
        fields = json.loads(line.decode().rstrip(), parse_constant=_reject_constant)
    except UnicodeDecodeError:
        raise _MalformedLine("is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _MalformedLine(f"is not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise _MalformedLine("is not JSON: nested too deeply") from None
    except ValueError:  # an integer of thousands of digits
        raise _MalformedLine("is not JSON: a number has too many digits") from None
    if not isinstance(fields, dict):
        raise _MalformedLine(f"must be a JSON object, got {_show(fields)}")
    input_length = _length(fields, "input_length")
    request = TraceRequest(
        timestamp_ms=_timestamp(fields),
        input_length=input_length,
        output_length=_length(fields, "output_length"),
        hash_ids=_hash_ids(fields, input_length),
    )
    if input_length + request.output_length > MAX_TOKENS:
        raise _MalformedLine(
            f"output_length {_show(request.output_length)} is too large: input and output of a "
            f"request have at most {MAX_TOKENS} tokens"
        )
    return request


def _reject_constant(constant: str) -> NoReturn:
    raise _MalformedLine(f"is not JSON: {constant} is not a number")


def _field(fields: Mapping[str, object], name: str) -> object:
    if name not in fields:
        raise _MalformedLine(f"has no {name}")
    return fields[name]


def _timestamp(fields: Mapping[str, object]) -> float:
    value = _field(fields, "timestamp")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _MalformedLine(f"timestamp must be a number, got {_show(value)}")
    try:
        timestamp = float(value)
    except OverflowError:
        timestamp = math.inf
    if not math.isfinite(timestamp) or timestamp < 0:
        raise _MalformedLine(f"timestamp must be finite and at least 0, got {_show(value)}")
    return timestamp


def _length(fields: Mapping[str, object], name: str) -> int:
    value = _field(fields, name)
    if not _is_integer(value):
        raise _MalformedLine(f"{name} must be an integer, got {_show(value)}")
    if value < 1:
        raise _MalformedLine(f"{name} must be at least 1, got {_show(value)}")
    return value


def _hash_ids(fields: Mapping[str, object], input_length: int) -> tuple[int, ...]:
    value = _field(fields, "hash_ids")
    if not isinstance(value, list):
        raise _MalformedLine(f"hash_ids must be a list, got {_show(value)}")
    for position, hash_id in enumerate(value):
        if not _is_integer(hash_id):
            raise _MalformedLine(f"hash_ids[{position}] must be an integer, got {_show(hash_id)}")
        if hash_id < 0:
            raise _MalformedLine(f"hash_ids[{position}] must be at least 0, got {_show(hash_id)}")
        if hash_id > MAX_HASH_ID:
            raise _MalformedLine(
                f"hash_ids[{position}] is {_show(hash_id)}, above {MAX_HASH_ID}: {_OVERFLOW}"
            )
    expected = -(-input_length // TOKENS_PER_HASH_ID)
    if len(value) != expected:
        raise _MalformedLine(
            f"input_length {_show(input_length)} needs {_show(expected)} hash_ids "
            f"of {TOKENS_PER_HASH_ID} tokens, got {len(value)}"
        )
    return tuple(value)


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _show(value: object) -> str:
    """Format a value as in the file, cut to fit one line of a message."""
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
