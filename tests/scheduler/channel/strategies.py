"""Values for every field of every message, drawn from the schema itself."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from radixkv.scheduler.handoff import Send
from radixkv.scheduler.nodes.channel.codec import (
    _WIRE,
    MESSAGES,
    Packet,
    _Address,
)
from radixkv.scheduler.nodes.channel.schema import (
    Bool,
    Bytes,
    Field,
    Float,
    Int,
    Many,
    Maybe,
    OneOf,
    Record,
    Text,
)
from radixkv.scheduler.nodes.transport import ArraySpec
from radixkv.scheduler.request import SamplingParams


def values(field: Field) -> st.SearchStrategy[Any]:
    """Any value of a field; long ones are rare, as they are slow."""
    match field:
        case Int():
            return st.integers(field._minimum, field._maximum)
        case Float():
            return st.floats(field._minimum, field._maximum, allow_nan=False)
        case Bool():
            return st.booleans()
        case OneOf():
            return st.sampled_from(field._choices)
        case _Address():
            ports = st.integers(1, 2**16 - 1)
            return ports.map(lambda port: f"10.0.0.1:{port}") | ports.map(
                lambda port: f"[fe80::1]:{port}"
            )
        case Text():
            return st.text(max_size=min(field._max_chars, 20))
        case Bytes():
            step = field._multiple_of
            low, high = -(-field._min_bytes // step), min(field._max_bytes // step, 40)
            lengths = st.integers(low, max(low, high))
            return lengths.flatmap(lambda n: st.binary(min_size=n * step, max_size=n * step))
        case Maybe():
            return st.none() | values(field._field)
        case Many():
            return st.lists(values(field._field), max_size=4).map(tuple)
        case Record() if field.make is SamplingParams:
            return st.builds(
                SamplingParams,
                temperature=st.floats(0, 100),
                top_k=st.integers(0, 1000),
                top_p=st.floats(0, 1, exclude_min=True),
                seed=st.integers(0, 2**32 - 1),
            )
        case Record() if field.make is ArraySpec:
            shapes = st.lists(st.integers(1, 2**31 - 1), min_size=1, max_size=8).map(tuple)
            return st.builds(ArraySpec, shapes, st.sampled_from(["bfloat16", "int8"]))
        case Record():
            parts = [
                values(each).filter(lambda value: value != ()) if name == "arrays" else values(each)
                for name, each in field._fields.items()
            ]
            return st.tuples(*parts).map(lambda drawn: field.make(*drawn))
    raise AssertionError(field)


def packets(code: int) -> st.SearchStrategy[Packet]:
    """Packets with messages of one kind."""
    record = MESSAGES[code]
    wire = values(_WIRE) if record.make is Send else st.none()
    return st.builds(
        Packet,
        sender=st.text(max_size=8),
        receiver=st.text(max_size=8),
        epoch=st.integers(0, 2**64 - 1),
        sequence=st.integers(0, 2**64 - 1),
        message=values(record),
        wire=wire,
    )


any_packet = st.integers(0, len(MESSAGES) - 1).flatmap(packets)
