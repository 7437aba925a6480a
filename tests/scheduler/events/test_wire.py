"""The wire of KV events, beside bytes that vLLM and SGLang wrote."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kvcache import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from radixkv.scheduler.events import EventFormatError, decode_batch, encode_batch
from radixkv.scheduler.events.wire import Cleared, Removed, Stored, WireEvent

# Of the classes of vLLM 0.33 and SGLang 0.5.23, and of the form that vLLM had up to 0.11.
VLLM = bytes.fromhex(
    "93cb3ff800000000000093de0008a474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573"
    "9201cfffffffffffffffffb1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f69647394050607"
    "08aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0"
    "83a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739101a66d656469756da34750"
    "5581a474797065b0416c6c426c6f636b73436c656172656400"
)
VLLM_SALTED = bytes.fromhex(
    "93cb3ff800000000000091de0009a474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573"
    "9103b1706172656e745f626c6f636b5f6861736802a9746f6b656e5f69647392090aaa626c6f636b5f73697a"
    "6502a76c6f72615f6964c0a66d656469756da3435055a96c6f72615f6e616d65c0aa65787472615f6b657973"
    "9191a473616c7400"
)
SGLANG = bytes.fromhex(
    "93cb3ff80000000000009387a474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739101"
    "b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473920506aa626c6f636b5f73697a6502"
    "a76c6f72615f6964c0a66d656469756da347505583a474797065ac426c6f636b52656d6f766564ac626c6f63"
    "6b5f6861736865739101a66d656469756daa4350555f50494e4e454481a474797065b0416c6c426c6f636b73"
    "436c656172656403"
)
OLD_VLLM = bytes.fromhex(
    "93cb3ff80000000000009397ab426c6f636b53746f7265649101c092050602c0a347505593ac426c6f636b52"
    "656d6f7665649101a347505591b0416c6c426c6f636b73436c6561726564c0"
)

EVENTS: list[KVEvent] = [
    BlockStored("GPU", (1, 2**64 - 1), None, np.array([5, 6, 7, 8], np.int32), 2, b""),
    BlockRemoved("GPU", (1,)),
    AllBlocksCleared(),
]


def plain(payload: bytes) -> tuple[Any, list[list[str]]]:
    """What a payload says, with the order of the fields; a map's size has several encodings."""
    batch = msgspec.msgpack.decode(payload)
    return batch, [list(event) for event in batch[1]]


def test_our_messages_are_those_of_vllm() -> None:
    assert plain(encode_batch(1.5, EVENTS)) == plain(VLLM)


def test_a_namespace_is_a_digest_for_each_block() -> None:
    digest = "73044d8e514cbbae83ad1c0d27a5ce02"
    event = BlockStored("CPU", (3,), 2, np.array([9, 10], np.int32), 2, b"tenant")
    payload = encode_batch(1.5, [event])
    salted = VLLM_SALTED.replace(b"\xa4salt", b"\xd9\x20" + digest.encode())
    assert plain(payload) == plain(salted)
    assert b"tenant" not in payload


@pytest.mark.parametrize(
    ("payload", "events", "rank"),
    [
        (
            VLLM,
            [
                Stored([1, 2**64 - 1], None, [5, 6, 7, 8], 2, None, "GPU", None),
                Removed([1], "GPU"),
                Cleared(),
            ],
            0,
        ),
        (VLLM_SALTED, [Stored([3], 2, [9, 10], 2, None, "CPU", None, [["salt"]])], 0),
        (
            SGLANG,
            [
                Stored([1], None, [5, 6], 2, None, "GPU", None),
                Removed([1], "CPU_PINNED"),
                Cleared(),
            ],
            3,
        ),
        (
            OLD_VLLM,
            [Stored([1], None, [5, 6], 2, None, "GPU", None), Removed([1], "GPU"), Cleared()],
            None,
        ),
    ],
)
def test_each_engine_is_read(payload: bytes, events: list[WireEvent], rank: int | None) -> None:
    batch = decode_batch(payload)
    assert (batch.ts, batch.events, batch.data_parallel_rank) == (1.5, events, rank)


@pytest.mark.parametrize("event", [Stored, Removed])
def test_every_field_of_another_engine_is_read(event: type[Stored | Removed]) -> None:
    fields: dict[str, Any] = {
        "block_hashes": [1],
        "parent_block_hash": 2,
        "token_ids": [5, 6],
        "block_size": 2,
        "lora_id": 3,
        "medium": "CPU",
        "lora_name": "adapter",
        "extra_keys": [["key"]],
        "cache_salt": "salt",
        "group_idx": 4,
    }
    fields = {name: fields[name] for name in event.__struct_fields__}
    tagged = {"type": f"Block{event.__name__}"} | fields
    batch = decode_batch(msgspec.msgpack.encode([1.5, [tagged], 0]))
    assert batch.events == [event(**fields)]


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"\x90", b"\xc0", VLLM[:-1], VLLM + b"\x00", VLLM.replace(b"Stored", b"Sorted")],
)
def test_what_is_no_batch_is_refused_with_its_size(payload: bytes) -> None:
    with pytest.raises(EventFormatError, match=f"^{len(payload)} bytes are no batch of KV events:"):
        decode_batch(payload)


@given(st.binary(max_size=40))
def test_any_bytes_are_refused_or_read(payload: bytes) -> None:
    with suppress(EventFormatError):
        decode_batch(payload)


@given(st.integers(0, len(VLLM) - 1), st.integers(0, 255))
def test_one_wrong_byte_is_refused_or_read(place: int, byte: int) -> None:
    with suppress(EventFormatError):
        decode_batch(VLLM[:place] + bytes([byte]) + VLLM[place + 1 :])
