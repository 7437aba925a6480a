"""What the backends that call a server share, against a naive model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kvcache.storage.errors import BackendError, BackendFullError
from radixkv.kvcache.storage.remote import RequestCounts, check_timeouts, scatter

from ...profiles import scaled


@scaled(50)
@given(st.binary(max_size=6), st.lists(st.integers(0, 4), max_size=4))
def test_a_value_is_scattered_over_the_buffers(value: bytes, sizes: list[int]) -> None:
    into = [bytearray(b"\xff" * size) for size in sizes]
    assert scatter(value, [memoryview(part) for part in into]) == len(value)
    room = sum(sizes)
    assert b"".join(into) == value[:room] + b"\xff" * (room - len(value))


def test_only_the_errors_of_backends_are_failed_requests() -> None:
    counts = RequestCounts()
    with counts.request():
        pass
    for error in (BackendError("x"), BackendFullError(1, 1), FileNotFoundError(), KeyError()):
        with pytest.raises(type(error)), counts.request():
            raise error
    assert counts.read() == {"requests": 5, "failed_requests": 2}


@pytest.mark.parametrize("name", ["timeout_s", "connect_timeout_s"])
def test_each_time_limit_is_positive(name: str) -> None:
    limits = {"timeout_s": 1e-9, "connect_timeout_s": 1e-9}
    check_timeouts(**limits)
    for value in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=rf"^{name} must be positive, got {value}$"):
            check_timeouts(**limits | {name: value})
