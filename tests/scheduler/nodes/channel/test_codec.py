"""The codec: round trips, limits of fields, and hostile bytes."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.scheduler.handoff import (
    Abort,
    Ack,
    Ask,
    AttemptKey,
    Commit,
    Header,
    Hits,
    Refuse,
    Renew,
    Send,
    messages,
)
from radixkv.scheduler.handoff.gateway_messages import (
    CancelAttempt,
    DecodeFailed,
    Finished,
    GatewayMessage,
    NewTokens,
    PrefillFailed,
    Progress,
    RunPrefill,
)
from radixkv.scheduler.nodes.channel import DecodeError, EncodeError, codec
from radixkv.scheduler.nodes.channel.codec import MAX_PACKET_BYTES, Packet, decode, encode
from radixkv.scheduler.nodes.channel.schema import MAX_PROMPT_TOKENS, MESSAGES
from radixkv.scheduler.request import GREEDY, MAX_STOP_TOKEN_IDS

from .strategies import any_packet, packets

HEAD = Header(AttemptKey("r", 1), 2, 3, 4)


def packet(message: Any) -> Packet:
    return Packet("p", "d", 5, 6, message)


def run_prefill(stops: tuple[Any, ...] = ()) -> RunPrefill:
    return RunPrefill(AttemptKey("r", 1), 2, b"1234", 1, 0, GREEDY, stops, b"", "d", "127.0.0.1:1")


def test_every_message_has_an_encoding() -> None:
    assert len(set(MESSAGES)) == len(MESSAGES)
    peers = {
        each
        for each in vars(messages).values()
        if isinstance(each, type) and issubclass(each, messages.Message)
    } - {messages.Message}
    assert peers | set(get_args(GatewayMessage)) == set(MESSAGES)


@pytest.mark.parametrize("message", MESSAGES)
def test_every_message_survives_a_round_trip(message: type) -> None:
    @given(packets(message))
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
            "Ask: Expected `bytes` of length <= 4194304 - at `$.message.prompt`",
        ),
        (
            Ask(HEAD, b"", b"", 16, 1, 4),
            "Ask: Expected `bytes` of length >= 4 - at `$.message.prompt`",
        ),
        (
            Ask(HEAD, b"12345", b"", 16, 1, 4),
            "Ask: prompt: 5 bytes are not a multiple of 4 - at `$.message`",
        ),
        (
            Ask(HEAD, b"1234", b"", 0, 1, 4),
            "Ask: Expected `int` >= 1 - at `$.message.block_size`",
        ),
        (
            Ack(Header(AttemptKey("r" * 257, 1), 1)),
            "Ack: Expected `str` of length <= 256 - at `$.message.header.key[0]`",
        ),
        (
            Ack(Header(AttemptKey("\ud800", 1), 1)),
            r"Ack: 'utf-8' codec can't encode character '\ud800' in position 0: surrogates not "
            "allowed",
        ),
        (
            Ack(Header(AttemptKey("r", 1), 2**64)),
            "Ack: can't serialize ints < -2**63 or > 2**64 - 1",
        ),
        (
            Ask(HEAD, b"1234", b"", 16, 1, 2**17 + 1),
            "Ask: Expected `int` <= 131072 - at `$.message.max_new_tokens`",
        ),
        (
            Abort(HEAD, "x", 1),  # type: ignore[arg-type]
            "Abort: Expected `bool`, got `int` - at `$.message.fenced`",
        ),
        (Renew(HEAD, (-1,)), "Renew: Expected `int` >= 0 - at `$.message.missing[0]`"),
        (
            Renew(HEAD, (0,) * (2**17 + 1)),
            "Renew: Expected `array` of length <= 131072 - at `$.message.missing`",
        ),
        (
            Ack(Header(AttemptKey("r", True), 1)),
            "Ack: Expected `int`, got `bool` - at `$.message.header.key[1]`",
        ),
        (
            Commit(HEAD, 1, 2**31, 3, Hits()),
            "Commit: Expected `int` <= 2147483647 - at `$.message.first_token`",
        ),
        (
            Commit(HEAD, 1, 2, 3, Hits(), first_record=bytes(12)),
            "Commit: 12 bytes of records are not a multiple of 8 - at `$.message`",
        ),
        (
            Commit(HEAD, 1, 2, 3, Hits(), first_record=bytes(176)),
            "Commit: Expected `bytes` of length <= 168 - at `$.message.first_record`",
        ),
        (
            replace(run_prefill(), logprobs=21),
            "RunPrefill: Expected `int` <= 20 - at `$.message.logprobs`",
        ),
        (
            Finished(AttemptKey("r", 1), (1,), Hits(), 0, bytes(2**22 + 8)),
            "Finished: Expected `bytes` of length <= 4194304 - at `$.message.records`",
        ),
        (
            Progress((NewTokens(AttemptKey("r", 1), 0, (1,), bytes(2**16 + 8)),)),
            "Progress: Expected `bytes` of length <= 65536 - at `$.message.attempts[0][3]`",
        ),
        (
            run_prefill((1.5,)),
            "RunPrefill: Expected `int`, got `float` - at `$.message.stop_token_ids[0]`",
        ),
        (
            run_prefill(tuple(range(MAX_STOP_TOKEN_IDS + 1))),
            "RunPrefill: Expected `array` of length <= 1024 - at `$.message.stop_token_ids`",
        ),
        (
            replace(run_prefill(), decode_address="0.0.0.0:1"),
            "RunPrefill: nobody can connect to 0.0.0.0:1: it must be one address of a machine, with"
            " a port - at `$.message`",
        ),
        (Send(HEAD, 0, 0, 1, 0), "Send: Expected `array`, got `null` - at `$.pull_info`"),
        ("hello", "str is not a message"),
    ],
)
def test_invalid_fields_are_not_encoded(message: Any, error: str) -> None:
    with pytest.raises(EncodeError) as caught:
        encode(packet(message))
    assert str(caught.value) == error


@given(st.binary(max_size=9), st.binary(max_size=9))
def test_encode_checks_what_decode_checks(prompt: bytes, namespace: bytes) -> None:
    ask = Ask(HEAD, prompt, namespace, 16, 1, 4)
    try:
        data = encode(packet(ask))
    except EncodeError:
        assert not prompt or len(prompt) % 4
    else:
        assert decode(data).message == ask


def test_a_long_reason_is_cut() -> None:
    """As are all texts of which a node does not choose the words itself."""
    long, short = "\ud800" + "x" * 5000, "?" + "x" * 4095
    key = HEAD.key
    for sent, expected in (
        (Abort(HEAD, long, True), Abort(HEAD, short, True)),
        (Refuse(HEAD, "malformed", 0, 0, long), Refuse(HEAD, "malformed", 0, 0, short)),
        (CancelAttempt(key, long), CancelAttempt(key, short)),
        (DecodeFailed(key, long), DecodeFailed(key, short)),
        (PrefillFailed(key, long, is_busy=True), PrefillFailed(key, short, is_busy=True)),
    ):
        assert decode(encode(packet(sent))) == packet(expected)


@given(st.binary(max_size=300))
def test_random_bytes_are_not_a_message(data: bytes) -> None:
    with pytest.raises(DecodeError):
        decode(data)


@given(any_packet, st.data())
def test_truncated_or_extended_bytes_are_not_a_message(sent: Packet, data: st.DataObject) -> None:
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
    st.builds(msgspec.msgpack.Ext, st.integers(0, 127), st.binary(max_size=4)),
)


@given(any_packet, simple, st.data())
def test_values_of_other_types_are_refused_or_another_message(
    sent: Packet, value: object, data: st.DataObject
) -> None:
    fields = msgspec.msgpack.decode(encode(sent))
    at = fields
    while True:
        place = data.draw(st.integers(0, len(at) - 1))
        if not (isinstance(at[place], list) and at[place] and data.draw(st.booleans())):
            break
        at = at[place]
    at[place] = value
    accepted_or_refused(msgspec.msgpack.encode(fields))


def accepted_or_refused(data: bytes) -> None:
    """Decode bytes to a message that can be encoded again, or raise only a DecodeError."""
    try:
        found = decode(data)
    except DecodeError as error:
        assert str(error)
    else:
        assert decode(encode(found)) == found


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (bytes(MAX_PACKET_BYTES + 1), f"{MAX_PACKET_BYTES + 1} bytes, the limit is"),
        (b"\xdd\xff\xff\xff\xff", "Input data was truncated"),  # a list of 2**32 - 1
        (b"\xc6\xff\xff\xff\xff", "Input data was truncated"),  # as many bytes
        (b"\xdb\xff\xff\xff\xff", "Input data was truncated"),  # a string
        (b"\xdf\xff\xff\xff\xff", "Expected `array`, got `object`"),  # a map
        (b"\x91" * 100_000, "Expected `int`, got `array` - at `$[0]`"),  # lists in lists
        (b"\x93\x01", "Expected `array` of at least length 7, got 3"),
        (b"\x97\x00", "Input data was truncated"),
        (b"\xc0", "Expected `array`, got `None`"),
        (b"\x90", "Expected `array` of at least length 1, got 0"),
        (b"\x91\x05", "Expected `array` of at least length 7, got 1"),
    ],
)
def test_malformed_bytes_are_refused(data: bytes, error: str) -> None:
    with pytest.raises(DecodeError) as caught:
        decode(data)
    assert str(caught.value).startswith(error)


@pytest.mark.parametrize("place", range(6))
@pytest.mark.parametrize(
    "lie",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdd\x00\x01\xff\xff",
        b"\xdb\x7f\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
    ],
)
def test_a_false_length_allocates_nothing(place: int, lie: bytes) -> None:
    fields = msgspec.msgpack.decode(encode(packet(Renew(HEAD, (1, 2)))))
    message = [msgspec.Raw(msgspec.msgpack.encode(each)) for each in fields[5]]
    message[1] = msgspec.Raw(lie)
    fields[5] = message
    if place < 5:
        fields[place] = msgspec.Raw(lie)
    data = msgspec.msgpack.encode(fields)
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError):
            decode(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 16
    finally:
        tracemalloc.stop()


def test_an_unknown_code_is_refused() -> None:
    fields = msgspec.msgpack.decode(encode(packet(Ack(HEAD))))
    fields[0] = len(MESSAGES)
    with pytest.raises(DecodeError, match=rf"^Invalid value {len(MESSAGES)} - at `\$\[0\]`$"):
        decode(msgspec.msgpack.encode(fields))


def test_an_unknown_field_is_refused() -> None:
    fields = msgspec.msgpack.decode(encode(packet(Ack(HEAD))))
    with pytest.raises(DecodeError, match=r"^Expected `array` of at most length 6, got 7$"):
        decode(msgspec.msgpack.encode([*fields, None]))
    fields[5].append(None)
    with pytest.raises(DecodeError, match=r"^Expected `array` of at most length 1, got 2 - at "):
        decode(msgspec.msgpack.encode(fields))


def test_a_value_that_its_class_refuses_is_refused() -> None:
    sent = packet(run_prefill())
    fields = msgspec.msgpack.decode(encode(sent))
    fields[5][5][2] = 0.0  # top_p
    with pytest.raises(DecodeError, match=r"^top_p must be above 0"):
        decode(msgspec.msgpack.encode(fields))


def test_only_send_has_pull_info() -> None:
    fields = msgspec.msgpack.decode(encode(packet(Ack(HEAD))))
    assert decode(msgspec.msgpack.encode(fields)) == packet(Ack(HEAD))
    fields[6] = []
    with pytest.raises(DecodeError, match=r"^Expected `null`, got `array` - at `\$\[6\]`$"):
        decode(msgspec.msgpack.encode(fields))


def test_a_packet_has_a_limit_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = packet(Ask(HEAD, bytes(400), b"", 16, 1, 4))
    data = encode(sent)
    monkeypatch.setattr(codec, "MAX_PACKET_BYTES", len(data))
    assert decode(encode(sent)) == sent
    monkeypatch.setattr(codec, "MAX_PACKET_BYTES", len(data) - 1)
    text = f"{len(data)} bytes, the limit is {len(data) - 1}"
    with pytest.raises(EncodeError, match=f"^Ask has {text}$"):
        encode(sent)
    with pytest.raises(DecodeError, match=f"^{text}$"):
        decode(data)
