import random

import pytest

from radixkv.kvcache.storage import (
    Sealed,
    Status,
    StorageKeyError,
)
from radixkv.kvcache.storage.envelope import (
    HEADER_BYTES,
    Fault,
    open_sealed,
    seal,
)

from .memory import MemoryBackend

KEY = bytes(range(32))
OTHER = bytes(32)


def sealed(payload: bytes, key: bytes = KEY) -> bytes:
    return seal(key, [memoryview(payload)]) + payload


def test_what_is_sealed_opens() -> None:
    for payload in (b"some bytes", b""):
        opened = open_sealed(KEY, sealed(payload))
        assert isinstance(opened, memoryview)
        assert opened.tobytes() == payload


def test_the_parts_make_no_difference() -> None:
    parts = [memoryview(b"some "), memoryview(b""), memoryview(b"bytes")]
    assert seal(KEY, parts) == sealed(b"some bytes")[:HEADER_BYTES]


def test_the_envelope_of_a_known_value_never_changes() -> None:
    assert sealed(b"abc")[:16].hex() == "52584b56020000000300000000000000"
    assert len(sealed(b"")) == HEADER_BYTES == 64


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (b"", Fault.SHORT),
        (sealed(b"abc")[:63], Fault.SHORT),
        (sealed(b"abc")[:-1], Fault.SHORT),
        (sealed(b"abc") + b"d", Fault.LONG),
        (b"X" + sealed(b"abc")[1:], Fault.WRONG_MAGIC),
        (b"X" + sealed(b"")[1:], Fault.WRONG_MAGIC),
        (sealed(b"abc")[:4] + b"\1" + sealed(b"abc")[5:], Fault.WRONG_VERSION),
        (sealed(b"abc")[:6] + b"\1" + sealed(b"abc")[7:], Fault.WRONG_VERSION),
        (sealed(b"abc", OTHER), Fault.WRONG_KEY),
        (sealed(b"abc")[:-1] + b"d", Fault.CHECKSUM),
        (sealed(b"abc")[:16] + b"\0" + sealed(b"abc")[17:], Fault.CHECKSUM),
    ],
)
def test_each_fault_has_its_reason(value: bytes, fault: Fault) -> None:
    assert open_sealed(KEY, value) is fault


def test_a_length_in_a_header_allocates_nothing() -> None:
    value = bytearray(sealed(b"abc"))
    value[8:16] = (2**63).to_bytes(8, "little")
    assert open_sealed(KEY, bytes(value)) is Fault.SHORT


def corrupted(values: dict[bytes, bytes], key: bytes, rng: random.Random) -> bytes:
    """The value of key after one accident: a flip, a cut, an exchange, or more at its end."""
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
        case _:  # a sector of another value, or of zeros: as after a power cut
            start = rng.randrange(0, len(value), 64)
            sector = rng.choice([bytes(64), *(v[start : start + 64] for v in values.values())])
            size = len(value[start : start + 64])
            return value[:start] + sector[:size].ljust(size, b"\0") + value[start + 64 :]


def test_ten_thousand_corruptions_are_all_misses() -> None:
    rng = random.Random(4)
    keys = [rng.randbytes(32) for _ in range(8)]
    values = {key: sealed(rng.randbytes(300), key) for key in keys}
    backend = MemoryBackend()
    storage = Sealed(backend)
    corruptions = 0
    while corruptions < 10_000:
        key = rng.choice(keys)
        value = corrupted(values, key, rng)
        if value == values[key]:
            continue
        corruptions += 1
        assert isinstance(open_sealed(key, value), Fault)
        backend.values[key] = value
        status, reason = storage.load(key, [memoryview(bytearray(300))])
        assert status is Status.CORRUPT
        assert reason in Fault.__members__
        assert key not in backend.values  # the next store repairs it


def test_a_key_must_be_one() -> None:
    with pytest.raises(StorageKeyError, match=r"^a key is 32 bytes, got 2 bytes$"):
        seal(b"ab", [])


@pytest.mark.parametrize("size", [2, 4])
def test_a_destination_of_another_size_is_not_loaded(
    size: int, caplog: pytest.LogCaptureFixture
) -> None:
    backend = MemoryBackend()
    backend.values[KEY] = sealed(b"abc")
    status, reason = Sealed(backend).load(KEY, [memoryview(bytearray(size))])
    fault = Fault.LONG if size < 3 else Fault.SHORT
    assert (status, reason) == (Status.CORRUPT, fault.name)
    assert caplog.messages == [f"block {KEY.hex()} is corrupt: {fault.value}"]
