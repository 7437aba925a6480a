"""What each field of a message refuses, in its words."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.scheduler.nodes.channel.errors import DecodeError
from radixkv.scheduler.nodes.channel.schema import (
    Bool,
    Bytes,
    Field,
    Float,
    Int,
    Many,
    OneOf,
    Text,
)


@pytest.mark.parametrize(
    ("field", "packed", "text"),
    [
        (Int(), 1.0, "needs an integer, got float"),
        (Int(2, 3), 4, "needs 2 to 3, got 4"),
        (Float(0.0, 1.0), 1, "needs a float, got int"),
        (Float(0.0, 1.0), float("nan"), "needs 0.0 to 1.0, got nan"),
        (Bool(), 1, "needs a bool, got int"),
        (Text(3), b"abc", "needs a string, got bytes"),
        (Text(3), "abcd", "has 4 characters, the limit is 3"),
        (OneOf("a", "b"), "c", "needs one of a, b"),
        (Bytes(3), "abc", "needs bytes, got str"),
        (Bytes(3), b"abcd", "has 4 bytes, the limits are 0 to 3"),
        (Many(Int(), 2), (1, 2), "needs a list, got tuple"),
        (Many(Int(), 2), [1, 2, 3], "has 3 items, the limit is 2"),
    ],
)
def test_what_a_field_is_not(field: Field, packed: Any, text: str) -> None:
    with pytest.raises(DecodeError) as error:
        field.unpack(packed)
    assert str(error.value) == text
