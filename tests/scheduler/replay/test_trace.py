"""Traces: every error by its text, and the tokens of a prompt."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from radixkv.kvcache.errors import RadixKVError
from radixkv.scheduler.replay.trace import (
    MAX_HASH_ID,
    Trace,
    TraceError,
    TraceRequest,
    bundled_trace_path,
    read_trace,
    tokens,
)

WriteLines = Callable[..., Path]
GOOD = {"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 2353]}


def good(**changes: object) -> dict[str, object]:
    return {**GOOD, **changes}


def test_the_bundled_trace_is_the_first_1000_conversation_requests(bundled_trace: Trace) -> None:
    digest = hashlib.sha256(bundled_trace_path().read_bytes()).hexdigest()
    notice = (bundled_trace_path().parent / "NOTICE").read_text(encoding="utf-8")
    assert digest in notice and "Apache License, Version 2.0" in notice
    assert len(bundled_trace.requests) == 1000
    assert bundled_trace.num_input_tokens == 13_732_944
    assert bundled_trace.num_output_tokens == 349_357
    assert bundled_trace.skipped == ()
    assert bundled_trace.name == "conversation_1000.jsonl"


def test_requests_at_the_same_time_are_in_order() -> None:
    """Those that are earlier than the line above cut the trace into parts that are sorted."""
    for times in product([0.0, 0.5, 1.0], repeat=4):
        parts: list[list[float]] = [[]]
        for time in times:
            if sorted([*parts[-1], time]) != [*parts[-1], time]:
                parts.append([])
            parts[-1].append(time)
        trace = Trace(tuple(TraceRequest(time, 1, 1, (0,)) for time in times))
        assert trace.num_out_of_order == len(parts) - 1, times


def test_a_good_line(write_lines: WriteLines) -> None:
    trace = read_trace(write_lines(good(extra="ignored")))
    assert trace.requests == (TraceRequest(27482.0, 1100, 52, (46, 47, 2353)),)


def test_blank_lines_are_skipped_but_counted(write_lines: WriteLines) -> None:
    path = write_lines(b"", GOOD, b"  ", b"{}")
    with pytest.raises(TraceError, match="line 4: has no input_length"):
        read_trace(path)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "is not JSON: Expecting property name enclosed in double quotes at column 2"),
        (b"\xff", "is not UTF-8"),
        (b"[" * 100_000, "is not JSON: nested too deeply"),
        (b'{"timestamp": ' + b"1" * 5000 + b"}", "is not JSON: a number has too many digits"),
        (b'{"timestamp": NaN}', "is not JSON: NaN is not a number"),
        (b'{"timestamp": -Infinity}', "is not JSON: -Infinity is not a number"),
        ([1, 2], "must be a JSON object, got [1, 2]"),
        (["x" * 60], 'must be a JSON object, got ["' + "x" * 35 + "..."),
        (None, "must be a JSON object, got null"),
        ({}, "has no input_length"),
        ({"input_length": 5}, "has no timestamp"),
        ({"input_length": 5, "timestamp": 0}, "has no output_length"),
        ({"input_length": 5, "timestamp": 0, "output_length": 1}, "has no hash_ids"),
        (good(timestamp="1"), 'timestamp must be a number, got "1"'),
        (good(timestamp=True), "timestamp must be a number, got true"),
        (good(timestamp=-1), "timestamp must be finite and at least 0, got -1"),
        (
            json.dumps(GOOD).replace("27482", "1e999").encode(),
            "timestamp must be finite and at least 0, got Infinity",
        ),
        (
            good(timestamp=10**400),
            f"timestamp must be finite and at least 0, got {'1' + '0' * 36}...",
        ),
        (good(input_length=True), "input_length must be an integer, got true"),
        (good(input_length=1100.0), "input_length must be an integer, got 1100.0"),
        (good(input_length="1100"), 'input_length must be an integer, got "1100"'),
        (good(input_length=0), "input_length must be at least 1, got 0"),
        (good(input_length=-5), "input_length must be at least 1, got -5"),
        (good(output_length=None), "output_length must be an integer, got null"),
        (good(output_length=0), "output_length must be at least 1, got 0"),
        (
            good(output_length=2**31 - 1100),
            "output_length 2147482548 is too large: input and output of a request have at most "
            "2147483647 tokens",
        ),
        (good(hash_ids=7), "hash_ids must be a list, got 7"),
        (good(hash_ids=[1, 2.0, 3]), "hash_ids[1] must be an integer, got 2.0"),
        (good(hash_ids=[1, 2, False]), "hash_ids[2] must be an integer, got false"),
        (good(hash_ids=[-1, 2, 3]), "hash_ids[0] must be at least 0, got -1"),
        (
            good(hash_ids=[1, 4194304, 3]),
            "hash_ids[1] is 4194304, above 4194303: "
            "its tokens (id * 512 + offset) would not fit int32",
        ),
        (good(hash_ids=[1, 2]), "input_length 1100 needs 3 hash_ids of 512 tokens, got 2"),
        (good(hash_ids=[1, 2, 3, 4]), "input_length 1100 needs 3 hash_ids of 512 tokens, got 4"),
        (good(hash_ids=[]), "input_length 1100 needs 3 hash_ids of 512 tokens, got 0"),
    ],
)  # fmt: skip
def test_a_malformed_line_is_refused_or_skipped_by_its_number(
    write_lines: WriteLines, line: object, reason: str
) -> None:
    path = write_lines(GOOD, line, GOOD)
    with pytest.raises(TraceError) as refused:
        read_trace(path)
    assert str(refused.value) == f"{path}, line 2: {reason}"
    assert (refused.value.path, refused.value.line, refused.value.reason) == (path, 2, reason)

    trace = read_trace(path, skip_malformed=True)
    assert len(trace.requests) == 2
    assert [(skipped.line, skipped.reason) for skipped in trace.skipped] == [(2, reason)]


def test_a_limit_counts_good_requests_and_reads_no_further(write_lines: WriteLines) -> None:
    path = write_lines(b"{", GOOD, GOOD, b"{")
    trace = read_trace(path, limit=2, skip_malformed=True)
    assert len(trace.requests) == 2
    assert [skipped.line for skipped in trace.skipped] == [1]


def test_errors_of_the_whole_file(tmp_path: Path, write_lines: WriteLines) -> None:
    missing = tmp_path / "missing.jsonl"
    with pytest.raises(RadixKVError, match=r"cannot be read: No such file or directory$") as error:
        read_trace(missing)
    assert isinstance(error.value, TraceError)
    assert (error.value.path, error.value.line) == (missing, None)
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)
    with pytest.raises(TraceError, match=r"trace\.jsonl: has no requests$"):
        read_trace(write_lines(b""))
    with pytest.raises(TraceError, match=r"has no requests \(2 malformed lines were skipped\)"):
        read_trace(write_lines(b"{", b"{"), skip_malformed=True)
    with pytest.raises(TraceError, match="the number of requests must be at least 1, got 0"):
        read_trace(write_lines(GOOD), limit=0)


def test_tokens_are_id_times_512_plus_offset() -> None:
    prompt = tokens(TraceRequest(0.0, 515, 1, (3, MAX_HASH_ID)))
    assert prompt.dtype == np.int32 and prompt.shape == (515,)
    assert prompt[:3].tolist() == [1536, 1537, 1538]
    assert prompt[511:].tolist() == [2047, 2**31 - 512, 2**31 - 511, 2**31 - 510]


def test_tokens_refuse_an_id_that_would_overflow() -> None:
    with pytest.raises(TraceError, match="hash id 4194304 is above 4194303"):
        tokens(TraceRequest(0.0, 512, 1, (MAX_HASH_ID + 1,)))


def test_requests_share_exactly_the_blocks_of_equal_ids(bundled_trace: Trace) -> None:
    first, second = (tokens(request) for request in bundled_trace.requests[:2])
    assert (first[:512] == second[:512]).all()
    assert not set(first[512:].tolist()) & set(second[512:].tolist())
