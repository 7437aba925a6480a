"""A change of any message changes the version of the protocol."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Annotated, Any, Final, Literal

import msgspec
import msgspec.inspect as types
from msgspec import defstruct

from radixkv.scheduler.handoff import PROTOCOL_VERSION, messages
from radixkv.scheduler.nodes.channel.schema import _CHECKS, PACKETS

SCHEMAS: Final = {1: "2c10dfcde38fb9be", 2: "c45a8a0e3a961b53", 3: "beec8c1bb3d8ea5d"}
"""Start of the digest of each version's wire types. Released versions never change."""

LIMITS: Final = ("MAX_PART_BLOCKS", "MAX_MISSING", "MAX_REASON_CHARS")


def described(kind: Any) -> Any:
    """A wire type's fields, types and limits as JSON values."""
    if isinstance(kind, types.StructType):
        fields = [[field.name, described(field.type)] for field in kind.fields]
        checks = [name for name, _ in fields if name in _CHECKS]
        return ["Struct", kind.cls.__name__, kind.tag, fields, checks]
    if isinstance(kind, types.Type):
        return [type(kind).__name__, described(msgspec.structs.asdict(kind))]
    if isinstance(kind, dict):
        return {key: described(value) for key, value in kind.items() if value is not None}
    if isinstance(kind, tuple):
        return [described(value) for value in kind]
    return kind


def described_types(*each: Any) -> str:
    return json.dumps([described(types.type_info(kind)) for kind in each])


def digest() -> str:
    limits = [[name, getattr(messages, name)] for name in LIMITS]
    schema = described_types(*PACKETS.values()) + json.dumps(limits)
    return sha256(schema.encode()).hexdigest()


def test_a_change_of_any_message_changes_the_version() -> None:
    expected = SCHEMAS[PROTOCOL_VERSION]
    assert digest().startswith(expected) and len(expected) == 16, (
        "messages have changed: raise PROTOCOL_VERSION, and add its digest "
        f"{digest()[:16]!r} (before the first release: write it anew)"
    )


def test_the_digest_is_of_names_types_and_limits() -> None:
    def int_from(minimum: int) -> Any:
        return Annotated[int, msgspec.Meta(ge=minimum)]

    some: Any = tuple[int_from(1), ...]  # type: ignore[misc]
    schemas = [
        defstruct("A", [("a", int_from(0)), ("b", int_from(1))]),
        defstruct("B", [("a", int_from(0)), ("b", int_from(1))]),
        defstruct("A", [("a", int_from(0)), ("b", int_from(1))], tag=1),
        defstruct("A", [("b", int_from(0)), ("a", int_from(1))]),
        defstruct("A", [("a", int_from(0)), ("b", int_from(2))]),
        defstruct("A", [("a", int_from(0)), ("b", int_from(1) | None)]),
        defstruct("A", [("a", int_from(0)), ("b", some)]),
        defstruct("A", [("a", int_from(0)), ("b", Literal["x"])]),
        defstruct("A", [("a", int_from(0)), ("b", Literal["y"])]),
        defstruct("A", [("a", int_from(0)), ("prompt", int_from(1))]),
        defstruct("A", [("a", int_from(0))]),
    ]
    assert len({described_types(each) for each in schemas}) == len(schemas)
