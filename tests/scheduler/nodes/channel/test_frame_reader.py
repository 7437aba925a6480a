"""FrameReader and secrets: accepted and dropped frames."""

from __future__ import annotations

import copy
import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.scheduler.handoff import Ack, AttemptKey, Header
from radixkv.scheduler.nodes.channel import Secret, SecretError, load_secret
from radixkv.scheduler.nodes.channel.codec import (
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    DroppedFrame,
    FrameDroppedError,
    FrameReader,
    Packet,
    encode_frame,
)

SECRET = Secret(b"a secret that is long enough")
ACK = Packet("p", "d", 5, 6, Ack(Header(AttemptKey("r", 1), 2)))


def dropped(reader: FrameReader, frame: bytes) -> DroppedFrame:
    with pytest.raises(FrameDroppedError) as caught:
        reader.read(frame)
    return caught.value.reason


def test_a_frame_is_accepted_once() -> None:
    reader = FrameReader("d")
    frame = encode_frame(ACK)
    assert reader.read(frame) == ACK
    assert dropped(reader, frame) is DroppedFrame.OLD
    assert reader.read(encode_frame(replace(ACK, sequence=7))).sequence == 7
    assert dropped(reader, frame) is DroppedFrame.OLD


def test_frames_of_an_earlier_epoch_are_dropped() -> None:
    reader = FrameReader("d")
    reader.read(encode_frame(ACK))
    reader.read(encode_frame(replace(ACK, epoch=6, sequence=0)))
    assert dropped(reader, encode_frame(replace(ACK, sequence=99))) is DroppedFrame.OLD
    other = replace(ACK, sender="p2", epoch=1, sequence=0)
    assert reader.read(encode_frame(other)) == other


def test_a_frame_for_another_node_is_dropped() -> None:
    assert dropped(FrameReader("p"), encode_frame(ACK)) is DroppedFrame.OTHER_RECEIVER


@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_are_dropped(data: bytes, is_framed: bool) -> None:
    frame = encode_frame(ACK)[:HEADER_BYTES] + data if is_framed else data
    reason = dropped(FrameReader("d"), frame)
    assert reason is (DroppedFrame.NOT_A_MESSAGE if is_framed else DroppedFrame.NOT_A_FRAME)


def test_a_frame_that_is_too_long_is_dropped() -> None:
    frame = encode_frame(ACK).ljust(MAX_FRAME_BYTES + 1, b"\0")
    assert dropped(FrameReader("d"), frame) is DroppedFrame.NOT_A_FRAME


def test_the_number_of_senders_is_limited() -> None:
    reader = FrameReader("d")
    for number in range(1000):
        reader.read(encode_frame(replace(ACK, sender=str(number))))
    assert dropped(reader, encode_frame(ACK)) is DroppedFrame.TOO_MANY_SENDERS
    assert reader.read(encode_frame(replace(ACK, sender="0", sequence=7))).sender == "0"


def test_a_secret_is_neither_printed_nor_copied() -> None:
    assert repr(SECRET) == str(SECRET) == "Secret(...)"
    for leave in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match=r"^a secret stays in its process$"):
            leave(SECRET)
    with pytest.raises(SecretError, match=r"^a secret needs 16 bytes, got 6$"):
        Secret(b"secret")


def test_a_secret_is_read_from_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"a secret that is long enough\n")
    path.chmod(0o600)
    secret = load_secret(path)
    assert secret is not None
    assert secret.key(b"x") == SECRET.key(b"x")
    path.chmod(0o640)
    with pytest.raises(SecretError, match=r"^the secret file .*/secret has mode 0640: it must be"):
        load_secret(path)
    with pytest.raises(SecretError, match=r"/nowhere cannot be read: No such file or directory$"):
        load_secret(tmp_path / "nowhere")
    with pytest.raises(SecretError, match=r" cannot be read: Is a directory$"):
        load_secret(tmp_path)


def test_a_secret_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RADIXKV_SECRET", raising=False)
    assert load_secret() is None
    monkeypatch.setenv("RADIXKV_SECRET", "a secret that is long enough")
    secret = load_secret()
    assert secret is not None
    assert secret.key(b"x") == SECRET.key(b"x")
    monkeypatch.setenv("RADIXKV_SECRET", "short")
    with pytest.raises(SecretError, match=r"^a secret needs 16 bytes, got 5$"):
        load_secret()
    assert os.environ["RADIXKV_SECRET"] == "short"
