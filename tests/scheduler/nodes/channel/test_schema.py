"""Limits of every kind of field, with the errors of msgspec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import pytest

from radixkv.scheduler.nodes.channel import schema
from radixkv.scheduler.nodes.channel.schema import wire_type


@pytest.mark.parametrize(
    ("field", "packed", "text"),
    [
        (schema._int(), 1.0, "Expected `int`, got `float`"),
        (schema._int(2, 3), 4, "Expected `int` <= 3"),
        (schema._int(2, 3), 1, "Expected `int` >= 2"),
        (schema._U64, -1, "Expected `int` >= 0"),
        (schema._float(0.0, 1.0), 2, "Expected `float` <= 1.0"),
        (schema._float(0.0, 1.0), "1", "Expected `float`, got `str`"),
        (schema._float(0.0, 1.0), float("nan"), "Expected `float` >= 0.0"),
        (schema._float(0.0, 1.0), float("inf"), "Expected `float` <= 1.0"),
        (bool, 1, "Expected `bool`, got `int`"),
        (schema._text(3), b"abc", "Expected `str`, got `bytes`"),
        (schema._text(3), "abcd", "Expected `str` of length <= 3"),
        (Literal["a", "b"], "c", "Invalid enum value 'c'"),
        (schema._bytes(3), "abc", "Expected `bytes`, got `str`"),
        (schema._bytes(3), b"abcd", "Expected `bytes` of length <= 3"),
        (schema._tuple(schema._int(), 2), 1, "Expected `array`, got `int`"),
        (schema._tuple(schema._int(), 2), [1, 2, 3], "Expected `array` of length <= 2"),
    ],
)
def test_a_field_refuses_other_values(field: Any, packed: Any, text: str) -> None:
    with pytest.raises(msgspec.ValidationError) as error:
        msgspec.msgpack.decode(msgspec.msgpack.encode(packed), type=field)
    assert str(error.value) == text


def test_a_field_without_a_limit_has_no_wire_type() -> None:
    @dataclass
    class New:
        attempt: int
        unlimited: int

    with pytest.raises(KeyError, match="unlimited"):
        wire_type(New)
