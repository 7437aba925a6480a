import random

import pytest

from radixkv.kvcache.storage import ChecksummedBackend, Status, StorageKeyError
from radixkv.kvcache.storage.value_format import HEADER_BYTES, Corruption, make_header, payload_of

from .memory import MemoryBackend

KEY = bytes(range(32))
OTHER = bytes(32)


def checksummed(payload: bytes, key: bytes = KEY) -> bytes:
    return make_header(key, [memoryview(payload)]) + payload


def test_a_payload_comes_back() -> None:
    for payload in (b"some bytes", b""):
        opened = payload_of(KEY, checksummed(payload))
        assert isinstance(opened, memoryview)
        assert opened.tobytes() == payload


def test_parts_and_whole_have_the_same_header() -> None:
    parts = [memoryview(b"some "), memoryview(b""), memoryview(b"bytes")]
    assert make_header(KEY, parts) == checksummed(b"some bytes")[:HEADER_BYTES]


def test_the_header_of_a_known_value_never_changes() -> None:
    assert checksummed(b"abc")[:16].hex() == "52584b56020000000300000000000000"
    assert len(checksummed(b"")) == HEADER_BYTES == 64


@pytest.mark.parametrize(
    ("value", "corruption"),
    [
        (b"", Corruption.SHORT),
        (checksummed(b"abc")[:63], Corruption.SHORT),
        (checksummed(b"abc")[:-1], Corruption.SHORT),
        (checksummed(b"abc") + b"d", Corruption.LONG),
        (b"X" + checksummed(b"abc")[1:], Corruption.WRONG_MAGIC),
        (b"X" + checksummed(b"")[1:], Corruption.WRONG_MAGIC),
        (checksummed(b"abc")[:4] + b"\1" + checksummed(b"abc")[5:], Corruption.WRONG_VERSION),
        (checksummed(b"abc")[:6] + b"\1" + checksummed(b"abc")[7:], Corruption.WRONG_VERSION),
        (checksummed(b"abc", OTHER), Corruption.WRONG_KEY),
        (checksummed(b"abc")[:-1] + b"d", Corruption.CHECKSUM),
        (checksummed(b"abc")[:16] + b"\0" + checksummed(b"abc")[17:], Corruption.CHECKSUM),
    ],
)
def test_each_corruption_has_its_reason(value: bytes, corruption: Corruption) -> None:
    assert payload_of(KEY, value) is corruption


def test_a_length_in_a_header_allocates_nothing() -> None:
    value = bytearray(checksummed(b"abc"))
    value[8:16] = (2**63).to_bytes(8, "little")
    assert payload_of(KEY, bytes(value)) is Corruption.SHORT


def corrupted(values: dict[bytes, bytes], key: bytes, rng: random.Random) -> bytes:
    """Return a corrupted value: a flipped bit, a cut, an exchange, or appended bytes."""
    value = values[key]
    match rng.randrange(5):
        case 0:
            position = rng.randrange(len(value))
            flipped = value[position] ^ 1 << rng.randrange(8)
            return value[:position] + bytes([flipped]) + value[position + 1 :]
        case 1:
            return value[: rng.randrange(len(value))]
        case 2:
            return values[rng.choice([other for other in values if other != key])]
        case 3:
            return value + rng.randbytes(rng.randrange(1, 80))
        case _:  # a sector of another value or of zeros, as after a power cut
            start = rng.randrange(0, len(value), 64)
            sector = rng.choice([bytes(64), *(v[start : start + 64] for v in values.values())])
            size = len(value[start : start + 64])
            return value[:start] + sector[:size].ljust(size, b"\0") + value[start + 64 :]


def test_ten_thousand_corruptions_are_all_misses() -> None:
    rng = random.Random(4)
    keys = [rng.randbytes(32) for _ in range(8)]
    values = {key: checksummed(rng.randbytes(300), key) for key in keys}
    backend = MemoryBackend()
    storage = ChecksummedBackend(backend)
    corruptions = 0
    while corruptions < 10_000:
        key = rng.choice(keys)
        value = corrupted(values, key, rng)
        if value == values[key]:
            continue
        corruptions += 1
        assert isinstance(payload_of(key, value), Corruption)
        backend.values[key] = value
        status, reason = storage.load(key, [memoryview(bytearray(300))])
        assert status is Status.CORRUPT
        assert reason in Corruption.__members__
        assert key not in backend.values  # the next store repairs it


def test_an_invalid_key() -> None:
    with pytest.raises(StorageKeyError, match=r"^a key is 32 bytes, got 2 bytes$"):
        make_header(b"ab", [])


@pytest.mark.parametrize("size", [2, 4])
def test_a_destination_of_another_size_is_not_loaded(
    size: int, caplog: pytest.LogCaptureFixture
) -> None:
    backend = MemoryBackend()
    backend.values[KEY] = checksummed(b"abc")
    status, reason = ChecksummedBackend(backend).load(KEY, [memoryview(bytearray(size))])
    corruption = Corruption.LONG if size < 3 else Corruption.SHORT
    assert (status, reason) == (Status.CORRUPT, corruption.name)
    assert caplog.messages == [f"block {KEY.hex()} is corrupt: {corruption.value}"]
