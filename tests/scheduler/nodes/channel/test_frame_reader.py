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
from radixkv.scheduler.nodes.channel import Secret, SecretError, codec, load_secret
from radixkv.scheduler.nodes.channel.codec import (
    FORGET_S,
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


@given(
    st.lists(st.floats(0.0, FORGET_S / 8), max_size=8),
    st.integers(-(4 * 3600 * 10**9), -1),
)
def test_a_node_whose_clock_went_back_is_heard_when_its_earlier_process_is_forgotten(
    quiet_s: list[float], jump_ns: int
) -> None:
    now = 0.0
    reader = FrameReader("d", lambda: now)
    old = replace(ACK, epoch=10**18)
    for sequence, seconds in enumerate(quiet_s, 6):
        reader.read(encode_frame(replace(old, sequence=sequence)))
        now += seconds
    reader.read(encode_frame(replace(old, sequence=99)))
    new = replace(ACK, epoch=10**18 + jump_ns, sequence=0)
    now += FORGET_S * 0.999
    assert dropped(reader, encode_frame(new)) is DroppedFrame.OLD
    now += FORGET_S * 0.002  # what was dropped has prolonged nothing
    assert reader.read(encode_frame(new)) == new
    assert reader.read(encode_frame(replace(new, sequence=1))).sequence == 1
    assert dropped(reader, encode_frame(new)) is DroppedFrame.OLD


def test_senders_of_all_times_take_no_room() -> None:
    now = 0.0
    reader = FrameReader("d", lambda: now)
    for number in range(3000):
        now += FORGET_S / 500
        reader.read(encode_frame(replace(ACK, sender=str(number))))
    assert len(reader._last) == 500


def test_a_frame_for_another_node_is_dropped() -> None:
    assert dropped(FrameReader("p"), encode_frame(ACK)) is DroppedFrame.OTHER_RECEIVER


def test_a_frame_for_another_node_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes no other frame late, keeps no sender from being forgotten, and takes no room."""
    monkeypatch.setattr(codec, "MAX_SENDERS", 1)
    now = 0.0
    reader = FrameReader("d", lambda: now)
    for wrong in (replace(ACK, sequence=99), replace(ACK, sender="p2")):
        frame = encode_frame(replace(wrong, receiver="x"))
        assert dropped(reader, frame) is DroppedFrame.OTHER_RECEIVER
    assert reader.read(encode_frame(ACK)) == ACK
    now = FORGET_S - 1.0
    for wrong in (replace(ACK, sequence=99), replace(ACK, sender="p2")):
        frame = encode_frame(replace(wrong, receiver="x"))
        assert dropped(reader, frame) is DroppedFrame.OTHER_RECEIVER
    assert dropped(reader, encode_frame(ACK)) is DroppedFrame.OLD
    now = FORGET_S
    assert reader.read(encode_frame(replace(ACK, epoch=1))).epoch == 1


@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_are_dropped(data: bytes, is_framed: bool) -> None:
    frame = encode_frame(ACK)[:HEADER_BYTES] + data if is_framed else data
    reason = dropped(FrameReader("d"), frame)
    assert reason is (DroppedFrame.NOT_A_MESSAGE if is_framed else DroppedFrame.NOT_A_FRAME)


def test_a_frame_that_is_too_long_is_dropped() -> None:
    frame = encode_frame(ACK).ljust(MAX_FRAME_BYTES + 1, b"\0")
    assert dropped(FrameReader("d"), frame) is DroppedFrame.NOT_A_FRAME


def test_the_senders_heard_last_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_SENDERS", 3)
    reader, old = FrameReader("d"), dropped_as_old
    frames = {name: encode_frame(replace(ACK, sender=name)) for name in "abcde"}
    for name in "abc":
        reader.read(frames[name])
    assert all(old(reader, frames[name]) for name in "abc")  # being late is not being heard
    reader.read(encode_frame(replace(ACK, sender="a", sequence=7)))
    for name in "de":
        reader.read(frames[name])
    assert all(old(reader, frames[name]) for name in "ade")
    for name in "cb":  # not known any more
        assert reader.read(frames[name]).sender == name


def dropped_as_old(reader: FrameReader, frame: bytes) -> bool:
    return dropped(reader, frame) is DroppedFrame.OLD


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


def test_a_secret_may_be_any_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The file and the variable of the same bytes are the same secret."""
    secret = bytes(range(255, 127, -1))
    path = tmp_path / "secret"
    path.write_bytes(secret)
    path.chmod(0o600)
    monkeypatch.setenv("RADIXKV_SECRET", os.fsdecode(secret))
    keys = {found.key(b"x") for each in (path, None) if (found := load_secret(each)) is not None}
    assert keys == {Secret(secret).key(b"x")}


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


@pytest.mark.parametrize("num_bytes", [0, 15, 16, 17])
def test_a_secret_has_at_least_sixteen_bytes(num_bytes: int) -> None:
    if num_bytes < 16:
        with pytest.raises(SecretError, match=f"^a secret needs 16 bytes, got {num_bytes}$"):
            Secret(bytes(num_bytes))
    else:
        assert len(Secret(bytes(num_bytes)).key(b"x")) == 32


def test_white_space_around_a_secret_in_a_file_is_no_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b" \n a secret that is long enough \r\n\n")
    path.chmod(0o600)
    secret = load_secret(path)
    assert secret is not None and secret.key(b"x") == SECRET.key(b"x")


@pytest.mark.parametrize("mode", [0o640, 0o620, 0o610, 0o604, 0o602, 0o601])
def test_a_secret_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"a secret that is long enough\n")
    path.chmod(mode)
    with pytest.raises(SecretError, match=f" has mode 0{mode:o}: it must be a plain file"):
        load_secret(path)


def test_a_sender_is_forgotten_after_its_silence_and_not_before() -> None:
    now = 0.0
    reader = FrameReader("d", lambda: now)
    for sequence in (0, 1):
        reader.read(encode_frame(replace(ACK, sequence=sequence)))
    restarted = encode_frame(replace(ACK, epoch=1, sequence=0))
    now = FORGET_S - 0.001
    assert dropped(reader, restarted) is DroppedFrame.OLD
    now = FORGET_S
    assert reader.read(restarted).epoch == 1


def test_a_secret_is_in_a_plain_file(tmp_path: Path) -> None:
    """From a pipe that its owner alone can read, another process could be heard."""
    path = tmp_path / "pipe"
    os.mkfifo(path, 0o600)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(path, os.O_WRONLY)
    os.write(writer, b"a secret that is long enough")
    with pytest.raises(SecretError, match=r" has mode 0600: it must be a plain file"):
        load_secret(path)
    os.close(reader)
    os.close(writer)
