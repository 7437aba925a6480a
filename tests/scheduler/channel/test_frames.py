"""Which frames a node takes in, and which it does not."""

from __future__ import annotations

import copy
import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.scheduler.channel import Secret, SecretError, load_secret
from radixkv.scheduler.channel.codec import Packet
from radixkv.scheduler.channel.frames import (
    HEADER_BYTES,
    MAX_BYTES,
    Dropped,
    DroppedError,
    FrameReader,
    seal,
)
from radixkv.scheduler.handoff import Ack, Head, Key

SECRET = Secret(b"a secret that is long enough")
ACK = Packet("p", "d", 5, 6, Ack(Head(Key("r", 1), 2)))


def dropped(reader: FrameReader, frame: bytes) -> Dropped:
    with pytest.raises(DroppedError) as caught:
        reader.open(frame)
    return caught.value.reason


@pytest.mark.parametrize("secret", [None, SECRET], ids=["open", "signed"])
def test_a_frame_is_taken_in_once(secret: Secret | None) -> None:
    reader = FrameReader("d", secret)
    frame = seal(ACK, secret)
    assert reader.open(frame) == ACK
    assert dropped(reader, frame) is Dropped.OLD
    assert reader.open(seal(replace(ACK, sequence=7), secret)).sequence == 7
    assert dropped(reader, frame) is Dropped.OLD


def test_a_restarted_sender_starts_anew_and_its_earlier_life_is_over() -> None:
    reader = FrameReader("d", SECRET)
    reader.open(seal(ACK, SECRET))
    reader.open(seal(replace(ACK, epoch=6, sequence=0), SECRET))
    assert dropped(reader, seal(replace(ACK, sequence=99), SECRET)) is Dropped.OLD
    other = replace(ACK, sender="p2", epoch=1, sequence=0)
    assert reader.open(seal(other, SECRET)) == other


def test_a_frame_for_another_node_is_not_for_us() -> None:
    assert dropped(FrameReader("p", SECRET), seal(ACK, SECRET)) is Dropped.NOT_FOR_US


def test_who_has_no_secret_or_another_is_not_heard() -> None:
    other = Secret(b"another secret, as long as it must be")
    for ours, theirs in [(SECRET, None), (None, SECRET), (SECRET, other)]:
        assert dropped(FrameReader("d", ours), seal(ACK, theirs)) is Dropped.BAD_MAC


@given(st.integers(0, 8 * len(seal(ACK, SECRET)) - 1))
def test_every_flipped_bit_is_found(bit: int) -> None:
    frame = bytearray(seal(ACK, SECRET))
    frame[bit // 8] ^= 1 << bit % 8
    reader = FrameReader("d", SECRET)
    assert dropped(reader, bytes(frame)) in (Dropped.BAD_MAC, Dropped.NO_FRAME)
    assert reader.open(seal(ACK, SECRET)) == ACK


@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_are_dropped(data: bytes, is_framed: bool) -> None:
    frame = seal(ACK, None)[:HEADER_BYTES] + data if is_framed else data
    reason = dropped(FrameReader("d", None), frame)
    assert reason is (Dropped.NO_MESSAGE if is_framed else Dropped.NO_FRAME)


def test_what_is_too_long_is_not_looked_at() -> None:
    frame = seal(ACK, None).ljust(MAX_BYTES + 1, b"\0")
    assert dropped(FrameReader("d", None), frame) is Dropped.NO_FRAME


def test_the_number_of_senders_is_limited() -> None:
    reader = FrameReader("d", None)
    for number in range(1000):
        reader.open(seal(replace(ACK, sender=str(number)), None))
    assert dropped(reader, seal(ACK, None)) is Dropped.TOO_MANY_SENDERS
    assert reader.open(seal(replace(ACK, sender="0", sequence=7), None)).sender == "0"


def test_a_secret_shows_itself_nowhere() -> None:
    assert repr(SECRET) == str(SECRET) == "Secret(...)"
    for leave in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match=r"^a secret stays in its process$"):
            leave(SECRET)
    with pytest.raises(SecretError, match=r"^a secret needs 16 bytes, got 6$"):
        Secret(b"secret")


def test_a_secret_comes_from_a_file_of_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"a secret that is long enough\n")
    path.chmod(0o600)
    secret = load_secret(path)
    assert secret is not None
    assert secret.sign(b"x") == SECRET.sign(b"x")
    path.chmod(0o640)
    with pytest.raises(SecretError, match=r"^the secret file .*/secret has mode 0640: it must be"):
        load_secret(path)
    with pytest.raises(SecretError, match=r"/nowhere cannot be read: No such file or directory$"):
        load_secret(tmp_path / "nowhere")
    with pytest.raises(SecretError, match=r" cannot be read: Is a directory$"):
        load_secret(tmp_path)


def test_a_secret_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RADIXKV_SECRET", raising=False)
    assert load_secret() is None
    monkeypatch.setenv("RADIXKV_SECRET", "a secret that is long enough")
    secret = load_secret()
    assert secret is not None
    assert secret.sign(b"x") == SECRET.sign(b"x")
    monkeypatch.setenv("RADIXKV_SECRET", "short")
    with pytest.raises(SecretError, match=r"^a secret needs 16 bytes, got 5$"):
        load_secret()
    assert os.environ["RADIXKV_SECRET"] == "short"
