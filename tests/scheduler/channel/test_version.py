"""A change of any message changes the version of the protocol."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any, Final

from radixkv.scheduler.handoff import PROTOCOL_VERSION, messages
from radixkv.scheduler.nodes.channel import codec
from radixkv.scheduler.nodes.channel.codec import MESSAGES
from radixkv.scheduler.nodes.channel.schema import (
    Field,
    Int,
    Maybe,
    Record,
)

SCHEMAS: Final = {1: "2c10dfcde38fb9be"}
"""How the digest of each version's messages begins; what was released is never written anew."""

LIMITS: Final = ("MAX_PART_BLOCKS", "MAX_MISSING", "MAX_REASON_CHARS")


def described(field: Any) -> Any:
    """Type, limits and fields of an encoding, in order, as JSON has them."""
    if isinstance(field, Field):
        name = field.make.__name__ if isinstance(field, Record) else ""
        return [type(field).__name__, name, described(vars(field))]
    if isinstance(field, dict):
        return [[key, described(value)] for key, value in field.items() if key != "make"]
    return field


def digest() -> str:
    schema = [described(each) for each in (*MESSAGES, codec._WIRE)]
    schema += [[name, getattr(messages, name)] for name in LIMITS]
    return sha256(json.dumps(schema).encode()).hexdigest()


def test_a_change_of_any_message_changes_the_version() -> None:
    expected = SCHEMAS[PROTOCOL_VERSION]
    assert digest().startswith(expected) and len(expected) == 16, (
        "messages have changed: raise PROTOCOL_VERSION, and add its digest "
        f"{digest()[:16]!r} (before the first release: write it anew)"
    )


def test_the_digest_is_of_names_types_and_limits() -> None:
    schemas = [
        Record(dict, {"a": Int(), "b": Int(1)}),
        Record(list, {"a": Int(), "b": Int(1)}),
        Record(dict, {"b": Int(), "a": Int(1)}),
        Record(dict, {"a": Int(), "b": Int(2)}),
        Record(dict, {"a": Int(), "b": Maybe(Int(1))}),
        Record(dict, {"a": Int()}),
    ]
    texts = {json.dumps(described(each)) for each in schemas}
    assert len(texts) == len(schemas)
