"""Values for every field of every message, drawn from the wire types themselves."""

from __future__ import annotations

from typing import Any

import msgspec.inspect as types
from hypothesis import strategies as st

from radixkv.scheduler.handoff import Send
from radixkv.scheduler.nodes.channel.codec import Packet
from radixkv.scheduler.nodes.channel.schema import MESSAGES, from_wire, wire_type
from radixkv.scheduler.nodes.transport import ArraySpec, PullInfo
from radixkv.scheduler.request import MAX_FACTOR, MIN_FACTOR, SamplingParams

PORTS = st.integers(1, 2**16 - 1)
ADDRESSES = PORTS.map(lambda port: f"10.0.0.1:{port}") | PORTS.map(lambda port: f"[fe80::1]:{port}")
SPECIAL = {  # what their classes allow of their fields
    "SamplingParams": st.builds(
        SamplingParams,
        temperature=st.just(0.0) | st.floats(MIN_FACTOR, MAX_FACTOR),
        top_k=st.integers(0, 1000),
        top_p=st.floats(0, 1, exclude_min=True),
        seed=st.integers(0, 2**32 - 1),
        min_p=st.floats(0, 1),
        repetition_penalty=st.floats(MIN_FACTOR, MAX_FACTOR),
        presence_penalty=st.floats(-2, 2),
        frequency_penalty=st.floats(-2, 2),
        min_tokens=st.integers(0, 2**31 - 1),
        num_continued=st.integers(0, 2**31 - 1),
    ),
    "ArraySpec": st.builds(
        ArraySpec,
        st.lists(st.integers(1, 2**31 - 1), min_size=1, max_size=8).map(tuple),
        st.sampled_from(["bfloat16", "int8"]),
    ),
}


def values(kind: types.Type, name: str = "") -> st.SearchStrategy[Any]:
    """Values of a field's type; only short ones, because long ones are slow."""
    match kind:
        case types.IntType():
            return st.integers(kind.ge, 2**64 - 1 if kind.le is None else kind.le)
        case types.FloatType():
            return st.floats(kind.ge, kind.le, allow_nan=False)
        case types.BoolType():
            return st.booleans()
        case types.LiteralType():
            return st.sampled_from(kind.values)
        case types.StrType() if name.endswith("address"):
            return ADDRESSES
        case types.StrType(max_length=int(most)):
            return st.text(max_size=min(most, 20))
        case types.BytesType(min_length=int(low), max_length=int(most)):
            step = (
                4
                if name == "prompt"
                else 8
                if name.endswith(("_stored", "_removed", "record", "records"))
                else 1
            )
            lengths = st.integers(-(-low // step), max(low, min(most, 40)) // step)
            return lengths.flatmap(lambda n: st.binary(min_size=n * step, max_size=n * step))
        case types.NoneType():
            return st.none()
        case types.UnionType():
            return st.one_of([values(each) for each in kind.types])
        case types.VarTupleType():
            few = 1 if name == "arrays" else 0
            return st.lists(values(kind.item_type), min_size=few, max_size=4).map(tuple)
        case types.StructType():
            if kind.cls.__name__ in SPECIAL:
                return SPECIAL[kind.cls.__name__]
            fields = st.tuples(*[values(field.type, field.name) for field in kind.fields])
            return fields.map(lambda drawn: from_wire(kind.cls(*drawn)))
    raise AssertionError(kind)


def of_class(cls: type) -> st.SearchStrategy[Any]:
    """Objects of a class, with any fields that can be sent."""
    return values(types.type_info(wire_type(cls)))


def packets(message: type) -> st.SearchStrategy[Packet]:
    """Packets with messages of one class."""
    return st.builds(
        Packet,
        sender=st.text(max_size=8),
        receiver=st.text(max_size=8),
        epoch=st.integers(0, 2**64 - 1),
        sequence=st.integers(0, 2**64 - 1),
        message=of_class(message),
        pull_info=of_class(PullInfo) if message is Send else st.none(),
    )


any_packet = st.sampled_from(MESSAGES).flatmap(packets)
