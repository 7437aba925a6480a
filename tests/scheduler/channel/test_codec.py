"""Every message comes back as it went; nothing else does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.scheduler.handoff import (
    Abort,
    Ack,
    Ask,
    Commit,
    Head,
    Hits,
    Key,
    Renew,
    Send,
    messages,
)
from radixkv.scheduler.handoff.gateway_messages import ClientMessage
from radixkv.scheduler.nodes.channel import (
    DecodeError,
    EncodeError,
    RunPrefill,
)
from radixkv.scheduler.nodes.channel.codec import (
    MAX_FRAME_BYTES,
    MAX_PROMPT_TOKENS,
    MESSAGES,
    Packet,
    decode,
    encode,
)
from radixkv.scheduler.request import GREEDY

from .strategies import any_packet, packets

HEAD = Head(Key("r", 1), 2, 3, 4)


def packet(message: Any) -> Packet:
    return Packet("p", "d", 5, 6, message)


def run_prefill(stops: tuple[Any, ...] = ()) -> RunPrefill:
    return RunPrefill(Key("r", 1), 2, b"1234", 1, 0, GREEDY, stops, b"", "d", "127.0.0.1:1")


def test_every_message_has_an_encoding() -> None:
    makers = [record.make for record in MESSAGES]
    assert len(set(makers)) == len(makers)
    peers = {
        each
        for each in vars(messages).values()
        if isinstance(each, type) and issubclass(each, messages.Message)
    } - {messages.Message}
    assert peers | set(get_args(ClientMessage)) == set(makers)


@pytest.mark.parametrize("code", range(len(MESSAGES)))
def test_every_message_comes_back_as_it_went(code: int) -> None:
    @given(packets(code))
    def check(sent: Packet) -> None:
        assert decode(encode(sent)) == sent

    check()


def test_the_longest_prompt_fits() -> None:
    prompt = bytes(range(256)) * (4 * MAX_PROMPT_TOKENS // 256)
    sent = packet(Ask(HEAD, prompt, b"", 16, 1, 4))
    assert decode(encode(sent)) == sent


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (
            Ask(HEAD, bytes(4 * MAX_PROMPT_TOKENS + 4), b"", 16, 1, 4),
            "^Ask: prompt: has 4194308 bytes, the limits are 4 to 4194304$",
        ),
        (Ask(HEAD, b"", b"", 16, 1, 4), "^Ask: prompt: has 0 bytes, the limits are 4 to 4194304$"),
        (Ask(HEAD, b"12345", b"", 16, 1, 4), "^Ask: prompt: has 5 bytes, no multiple of 4$"),
        (Ask(HEAD, b"1234", b"", 0, 1, 4), "^Ask: block_size: needs 1 to 2147483647, got 0$"),
        (
            Ack(Head(Key("r" * 257, 1), 1)),
            "^Ack: head: key: request_id: has 257 characters, the limit is 256$",
        ),
        (Ack(Head(Key("\ud800", 1), 1)), "^Ack: head: key: request_id: has half of a character$"),
        (
            Ask(HEAD, b"1234", b"", 16, 1, 2**17 + 1),
            "^Ask: max_new_tokens: needs 1 to 131072, got 131073$",
        ),
        (Abort(HEAD, "x", 1), "^Abort: fenced: needs a bool, got int$"),  # type: ignore[arg-type]
        (Renew(HEAD, (-1,)), "^Renew: missing: needs 0 to 2147483647, got -1$"),
        (Ack(Head(Key("r", True), 1)), "^Ack: head: key: attempt: needs an integer, got bool$"),
        (Commit(HEAD, 1, 2**31, 3, Hits()), "^Commit: first_token: needs -2147483648 to "),
        (run_prefill((1.5,)), "^RunPrefill: stop_token_ids: needs an integer, got float$"),
        (Send(HEAD, 0, 0, 1, 0), "^a wire ticket goes with SEND, and with nothing else$"),
        ("hello", "^str is no message$"),
    ],
)
def test_what_has_no_encoding_is_refused(message: Any, error: str) -> None:
    with pytest.raises(EncodeError, match=error):
        encode(packet(message))


def test_a_reason_is_cut_to_what_can_be_sent() -> None:
    sent = packet(Abort(HEAD, "\ud800" + "x" * 5000, True))
    assert decode(encode(sent)) == packet(Abort(HEAD, "?" + "x" * 4095, True))


@given(st.binary(max_size=300))
def test_random_bytes_are_no_message(data: bytes) -> None:
    with pytest.raises(DecodeError):
        decode(data)


@given(any_packet, st.data())
def test_what_was_cut_or_grew_is_no_message(sent: Packet, data: st.DataObject) -> None:
    encoded = encode(sent)
    with pytest.raises(DecodeError):
        decode(encoded[: data.draw(st.integers(0, len(encoded) - 1))])
    with pytest.raises(DecodeError):
        decode(encoded + data.draw(st.binary(min_size=1, max_size=9)))


@given(any_packet, st.data())
def test_flipped_bytes_are_refused_or_another_message(sent: Packet, data: st.DataObject) -> None:
    encoded = bytearray(encode(sent))
    for _ in range(data.draw(st.integers(1, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    accepted_or_refused(bytes(encoded))


simple = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=9),
    st.just([]),
    st.just([[[]]]),
    st.just({"a": 1}),
    st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=4)),
)


@given(any_packet, simple, st.data())
def test_values_of_other_types_are_refused_or_another_message(
    sent: Packet, value: object, data: st.DataObject
) -> None:
    fields = msgpack.unpackb(encode(sent))
    at = fields
    while True:
        place = data.draw(st.integers(0, len(at) - 1))
        if not (isinstance(at[place], list) and at[place] and data.draw(st.booleans())):
            break
        at = at[place]
    at[place] = value
    accepted_or_refused(msgpack.packb(fields))


def accepted_or_refused(data: bytes) -> None:
    """Bytes are a message, which can be sent again, or a DecodeError: nothing else is raised."""
    try:
        found = decode(data)
    except DecodeError as error:
        assert str(error)
    else:
        assert decode(encode(found)) == found


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (bytes(MAX_FRAME_BYTES + 1), f"^{MAX_FRAME_BYTES + 1} bytes, the limit is"),
        (b"\xdd\xff\xff\xff\xff", "^no msgpack: ValueError$"),  # a list of 2**32 - 1
        (b"\xc6\xff\xff\xff\xff", "^no msgpack: ValueError$"),  # as many bytes
        (b"\xdb\xff\xff\xff\xff", "^no msgpack: ValueError$"),  # a string
        (b"\xdf\xff\xff\xff\xff", "^no msgpack: ValueError$"),  # a map
        (b"\x91" * 100_000, "^no msgpack: "),  # lists in lists
        (b"\x93\x01", "^no msgpack: ValueError$"),
        (b"\xc0", "^needs a list of 7$"),
        (b"\x90", "^needs a list of 7$"),
    ],
)
def test_what_would_take_much_memory_is_refused_first(data: bytes, error: str) -> None:
    with pytest.raises(DecodeError, match=error):
        decode(data)


def test_an_unknown_code_is_refused() -> None:
    fields = msgpack.unpackb(encode(packet(Ack(HEAD))))
    fields[4] = len(MESSAGES)
    with pytest.raises(DecodeError, match=f"^needs 0 to {len(MESSAGES) - 1}, got {len(MESSAGES)}$"):
        decode(msgpack.packb(fields))


def test_what_a_class_refuses_is_refused() -> None:
    sent = packet(run_prefill())
    fields = msgpack.unpackb(encode(sent))
    fields[5][5][2] = 0.0  # top_p
    with pytest.raises(DecodeError, match=r"^sampling: top_p must be above 0"):
        decode(msgpack.packb(fields))


def test_a_wire_ticket_comes_with_send_alone() -> None:
    fields = msgpack.unpackb(encode(packet(Ack(HEAD))))
    send = replace(packet(Ack(HEAD)))
    assert decode(msgpack.packb(fields)) == send
    fields[6] = []
    with pytest.raises(DecodeError, match=r"^needs a list of 6$"):
        decode(msgpack.packb(fields))
