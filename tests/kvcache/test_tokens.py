"""Validation of tokens, counts and namespaces, and the text of each error."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kvcache import (
    BlockPool,
    CacheManager,
    CountError,
    IdError,
    NamespaceError,
    RadixKVError,
    TokenError,
    as_tokens,
    make_namespace,
)

INT32 = st.integers(-(2**31), 2**31 - 1)
VALUES = st.one_of(st.text(max_size=4), st.binary(max_size=4), st.integers())
FIELDS = st.dictionaries(st.text(max_size=4), VALUES, max_size=3)


def two_different_of_so_many_fields(num_fields):
    """Draw two different namespaces' fields, as many in each."""
    fields = st.dictionaries(st.text(max_size=4), VALUES, min_size=num_fields, max_size=num_fields)
    return st.lists(fields, min_size=2, max_size=2, unique_by=lambda each: frozenset(each.items()))


# Tokens


def test_an_int32_array_is_taken_as_it_is():
    tokens = np.array([1, 2], np.int32)
    assert as_tokens(tokens) is tokens


@given(st.lists(INT32))
def test_any_int32_is_a_token(tokens):
    array = as_tokens(tokens)
    assert array.dtype == np.int32 and array.ndim == 1
    assert array.tolist() == tokens
    assert as_tokens(tuple(tokens)).tolist() == tokens
    assert as_tokens(list(np.array(tokens, np.int64))).tolist() == tokens


def test_no_tokens():
    assert as_tokens([]).tolist() == []
    assert as_tokens([]).dtype == np.int32


def test_a_strided_array_matches_like_a_contiguous_one():
    manager = CacheManager(8, 2)
    lease = manager.admit(manager.match([1, 2, 3, 4]))
    manager.publish(lease, np.array([1, 9, 2, 9, 3, 9, 4, 9], np.int32)[::2])
    assert manager.match(np.array([4, 3, 2, 1], np.int32)[::-1]).num_tokens == 4


REMEDY = ": convert it with astype(numpy.int32)"


class OnADevice:
    """What JAX and PyTorch call an array."""

    def __array__(self) -> np.ndarray:
        raise AssertionError("it was read")


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (
            OnADevice(),
            "tokens must be a NumPy array of int32 or a list, got another array, OnADevice: "
            "convert it with numpy.asarray",
        ),
        (np.array([1, 2], np.int64), f"tokens must be int32, got int64{REMEDY}"),
        (np.array([1.0], np.float32), "tokens must be int32, got float32"),
        (np.array([1], ">i4"), f"tokens must be int32, got >i4{REMEDY}"),
        (np.zeros((2, 3), np.int32), "tokens must have one dimension, got shape (2, 3)"),
        (np.zeros((), np.int32), "tokens must have one dimension, got shape ()"),
        ([1, 2.0], "token 1 must be an integer, got 2.0"),
        ([True], "token 0 must be an integer, got True"),
        ([[1]], "token 0 must be an integer, got [1]"),
        ("ab", "token 0 must be an integer, got 'a'"),
        ([0, 0, 2**31], "token 2 is 2147483648, outside int32"),
        ([-(2**31) - 1], "token 0 is -2147483649, outside int32"),
        (None, "tokens must be an int32 array or a list, got None"),
        (b"a", "tokens must be an int32 array or a list, got b'a'"),
        ({1}, "tokens must be an int32 array or a list, got {1}"),
    ],
)
def test_what_is_not_tokens_is_refused_at_every_door(tokens: Any, message: str):
    manager = CacheManager(8, 2)
    lease = manager.admit(manager.match([1, 2, 3]))
    for door in (
        as_tokens,
        manager.match,
        lambda bad: manager.publish(lease, bad),
        lambda bad: manager.next_block(lease, bad),
    ):
        with pytest.raises(TokenError) as caught:
            door(tokens)
        assert str(caught.value) == message
    assert isinstance(caught.value, RadixKVError) and isinstance(caught.value, ValueError)
    manager.check()


# Ids


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.array([1], np.int64), "{}s must be int32, got int64" + REMEDY),
        (np.array([1.5] * 9), "{}s must be int32, got float64"),
        (np.zeros((1, 1), np.int32), "{}s must have one dimension, got shape (1, 1)"),
        ([1, 0.5], "{} 1 must be an integer, got 0.5"),
        ([2**31], "{} 0 is 2147483648, outside int32"),
        (1, "{}s must be an int32 array or a list, got 1"),
    ],
)
def test_what_is_not_ids_is_refused_and_changes_nothing(ids: Any, message: str):
    manager, pool = CacheManager(8, 2), BlockPool(9)
    lease = manager.admit(manager.match([1]))
    pool.allocate(9)
    for door, name in ((pool.recycle, "block id"), (manager.extend_batch, "row")):
        with pytest.raises(IdError) as caught:
            door(ids)
        assert str(caught.value) == message.format(name)
        assert isinstance(caught.value, RadixKVError) and isinstance(caught.value, ValueError)
    assert (pool.num_free, lease.num_tokens) == (0, 1)
    pool.check()
    manager.check()


def test_a_list_of_ids_is_as_good_as_an_array():
    manager, pool = CacheManager(8, 2), BlockPool(9)
    lease = manager.admit(manager.match([1]))
    manager.extend_batch([lease.row])
    assert lease.num_tokens == 2
    pool.recycle(pool.allocate(9).tolist())
    assert pool.num_free == 9
    pool.check()


# Counts


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "num_blocks must be at least 1, got 0"),
        (-3, "num_blocks must be at least 1, got -3"),
        (2.0, "num_blocks must be an integer, got 2.0"),
        (True, "num_blocks must be an integer, got True"),
        (None, "num_blocks must be an integer, got None"),
    ],
)
def test_a_pool_needs_a_block(value: Any, message: str):
    for make in (BlockPool, lambda n: CacheManager(n, 2)):
        with pytest.raises(CountError) as caught:
            make(value)
        assert str(caught.value) == message
    assert isinstance(caught.value, RadixKVError) and isinstance(caught.value, ValueError)


def test_a_block_holds_a_token():
    with pytest.raises(CountError, match=r"^block_size must be at least 1, got 0$"):
        CacheManager(2, 0)


def test_numpy_counts_are_counts():
    manager = CacheManager(np.int64(4), np.int32(2))  # type: ignore[arg-type]
    lease = manager.admit(manager.match([1, 2]))
    manager.extend(lease, np.int64(1))  # type: ignore[arg-type]
    assert manager.evict(np.int64(1)) == 0  # type: ignore[arg-type]
    assert lease.num_tokens == 3


# Namespaces


@given(FIELDS, FIELDS)
def test_different_fields_never_give_equal_namespaces(one, other):
    assert (make_namespace(**one) == make_namespace(**other)) == (one == other)


@given(st.integers(1, 3).flatmap(two_different_of_so_many_fields))
def test_no_namespace_begins_another_with_as_many_fields(fields):
    # So that a namespace followed by tokens cannot be read as another namespace.
    one, other = fields
    assert not make_namespace(**one).startswith(make_namespace(**other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"lora": "a"}, {"salt": "a"}),
        ({"a": "bc"}, {"ab": "c"}),
        ({"a": "1"}, {"a": 1}),
        ({"a": "x"}, {"a": b"x"}),
        ({"a": b"1"}, {"a": 1}),
        ({"a": "", "b": ""}, {"a": ""}),
        ({"a": 0}, {}),
        ({"a": -1}, {"a": 1}),
    ],
)
def test_fields_that_look_alike_differ(one, other):
    assert make_namespace(**one) != make_namespace(**other)


def test_the_order_of_fields_does_not_matter_and_no_field_is_the_default_namespace():
    assert make_namespace(a=1, b="x") == make_namespace(b="x", a=1)
    assert make_namespace() == b""


@pytest.mark.parametrize("value", [None, True, 1.5, ["a"]])
def test_a_field_of_another_type_is_refused(value: Any):
    with pytest.raises(NamespaceError) as caught:
        make_namespace(ok=1, tenant=value)
    text = f"namespace field tenant must be str, bytes or int, got {value!r}"
    assert str(caught.value) == text
    assert isinstance(caught.value, RadixKVError) and isinstance(caught.value, ValueError)


@pytest.mark.parametrize("fields", [{"a": "\ud800"}, {"\ud800": "a"}])
def test_a_field_that_cannot_be_encoded_is_refused_with_our_error(fields):
    # A lone surrogate is a str, but has no UTF-8.
    with pytest.raises(NamespaceError) as caught:
        make_namespace(**fields)
    assert str(caught.value) == "namespace text '\\ud800' has no UTF-8 encoding"


@pytest.mark.parametrize("namespace", ["tenant", None, 3, bytearray(b"x")])
def test_a_namespace_that_is_not_bytes_is_refused(namespace: Any):
    manager = CacheManager(4, 2)
    with pytest.raises(NamespaceError) as caught:
        manager.match([1, 2], namespace)
    assert str(caught.value) == f"namespace must be bytes, got {namespace!r}"
