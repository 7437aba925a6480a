"""Descriptors: supported arrays, comparison and digests."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.scheduler.nodes.transport import (
    Descriptor,
    PullInfo,
    TransportArgumentError,
    describe,
)
from radixkv.scheduler.nodes.transport.descriptors import (
    ArraySpec,
    digest_arrays,
    digest_namespace,
    make_digest_key,
)

from .conformance import part_id


def test_a_descriptor_describes_the_arrays() -> None:
    described = describe(
        [jnp.zeros((3, 4), jnp.bfloat16), np.zeros((2,), np.int8)],
        num_blocks=3,
        group=1,
        namespace=b"model",
    )
    assert described.arrays == (ArraySpec((3, 4), "bfloat16"), ArraySpec((2,), "int8"))
    assert (described.num_blocks, described.group, described.num_bytes) == (3, 1, 26)
    other = describe(
        [jnp.zeros((3, 4), jnp.bfloat16), np.zeros((2,), np.int8)],
        num_blocks=3,
        group=1,
        namespace=b"model2",
    )
    assert described != other


@pytest.mark.parametrize(
    "name",
    [
        *("bfloat16", "float16", "float32", "float64"),
        *("float8_e4m3fn", "float8_e5m2", "int8", "int32", "uint8"),
    ],
)
def test_arrays_of_each_dtype_of_a_pool_are_described(name: str) -> None:
    array = np.zeros((2, 3), jnp.dtype(name))
    described = describe([array], num_blocks=1)
    assert described.arrays == (ArraySpec((2, 3), name),)
    assert described.num_bytes == array.nbytes


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 0), np.int8), r"^an array of shape \(2, 0\) cannot be sent$"),
        (np.zeros((0, 2), np.int8), r"^an array of shape \(0, 2\) cannot be sent$"),
        (np.zeros((), np.int8), r"^an array of shape \(\) cannot be sent$"),
        (np.zeros(2, np.complex64), "^arrays of complex64 cannot be sent$"),
    ],
)
def test_unsupported_arrays_are_refused(array: np.ndarray, message: str) -> None:
    with pytest.raises(TransportArgumentError, match=message):
        describe([array], num_blocks=1)


def test_a_part_without_content_is_refused() -> None:
    one = (ArraySpec((1,), "int8"),)
    with pytest.raises(TransportArgumentError, match=r"^a part needs arrays, blocks and a group"):
        Descriptor((), 1, 0, bytes(16))
    with pytest.raises(TransportArgumentError, match=r"got 1 arrays, 0 blocks and group 0$"):
        Descriptor(one, 0, 0, bytes(16))
    with pytest.raises(TransportArgumentError, match=r"got 1 arrays, 1 blocks and group -1$"):
        Descriptor(one, 1, -1, bytes(16))
    for size in (3, 15, 17):
        reason = f"^a namespace digest has 16 bytes, got {size}$"
        with pytest.raises(TransportArgumentError, match=reason):
            Descriptor(one, 1, 0, bytes(size))


@given(st.binary(max_size=200), st.integers(0, 199), st.integers(1, 255))
def test_every_byte_of_a_namespace_counts(namespace: bytes, place: int, change: int) -> None:
    longer = digest_namespace(namespace + b"\0")
    assert len(longer) == 16 and longer != digest_namespace(namespace)
    if place < len(namespace):
        changed = bytearray(namespace)
        changed[place] ^= change
        assert digest_namespace(bytes(changed)) != digest_namespace(namespace)


def test_digests_are_of_the_bytes_and_of_each_array() -> None:
    one = np.arange(6, dtype=np.int32).reshape(2, 3)
    same = jnp.asarray(one)
    turned = np.ascontiguousarray(one.T)
    key = make_digest_key()
    assert digest_arrays([one], key) == digest_arrays([same], key)
    assert digest_arrays([one.T], key) == digest_arrays([turned], key) != digest_arrays([one], key)
    both = digest_arrays([one, turned], key)
    assert both == digest_arrays([one], key) + digest_arrays([turned], key, 1)


@given(
    st.binary(min_size=1, max_size=64),
    st.binary(min_size=16, max_size=16),
    st.binary(min_size=16, max_size=16),
    st.integers(0, 4096),
    st.data(),
)
def test_digests_are_of_the_key_and_the_index_too(
    content: bytes, key: bytes, other_key: bytes, index: int, data: st.DataObject
) -> None:
    """Nobody without the key can tell, change or move a digest."""
    array = np.frombuffer(content, np.uint8)
    [digest] = digest_arrays([array], key, index)
    assert len(digest) == 16
    assert digest != digest_arrays([array], key, index + 1)[0]
    assert (digest == digest_arrays([array], other_key, index)[0]) == (key == other_key)
    changed = array.copy()
    changed[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    assert digest != digest_arrays([changed], key, index)[0]


def test_each_part_has_a_key_that_nothing_prints() -> None:
    assert len({make_digest_key() for _ in range(100)}) == 100
    descriptor = describe([np.zeros(1, np.int8)], num_blocks=1)
    info = PullInfo(part_id(), descriptor, (), "jax", b"", b"a key that nobody")
    assert "a key" not in repr(info)
