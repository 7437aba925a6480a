"""Validation of tokens, counts and namespaces, and the text of each error."""

import warnings
from array import array
from collections import UserList
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kvcache import (
    BlockPool,
    CacheManager,
    CountError,
    HostConfig,
    IdError,
    NamespaceError,
    RadixKVError,
    TokenError,
    as_tokens,
    make_namespace,
)
from radixkv.kvcache.storage.keys import StorageNamespace, block_keys

NAMESPACE = StorageNamespace("m", "w", "float32", 2, (0, 1), (0, 1))
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


class OnADevice:
    """An array of another library, which may fail to read it."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        if isinstance(self.values, Exception):
            raise self.values
        return self.values


FORMS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "UserList": UserList,
    "array.array": lambda tokens: array("q", tokens),
    "list of np.int64": lambda tokens: [np.int64(token) for token in tokens],
    "int64": lambda tokens: np.array(tokens, np.int64),
    "big-endian": lambda tokens: np.array(tokens, ">i4"),
    "strided": lambda tokens: np.repeat(np.array(tokens, np.int64), 2)[::2],
    "read-only": lambda tokens: np.frombuffer(np.array(tokens, np.int64).tobytes(), np.int64),
    "another library": lambda tokens: OnADevice(np.array(tokens, np.int64)),
    "JAX": lambda tokens: jnp.array(tokens, jnp.int32),
}
"""Every form of tokens but an int32 array, by name."""

SMALL_FORMS = {
    **FORMS,
    "uint64": lambda tokens: np.array(tokens, np.uint64),
    "uint32": lambda tokens: np.array(tokens, np.uint32),
    "int8": lambda tokens: np.array(tokens, np.int8),
    "JAX uint8": lambda tokens: jnp.array(tokens, jnp.uint8),
    "bytearray": bytearray,
}
"""Those of tokens that fit 7 bits too."""


@pytest.mark.parametrize("form", FORMS)
@given(tokens=st.lists(INT32, max_size=9))
def test_every_form_gives_the_same_tokens(form: str, tokens: list[int]):
    given_tokens = FORMS[form](tokens)
    converted = as_tokens(given_tokens)
    assert converted.dtype == np.int32 and converted.ndim == 1 and converted.tolist() == tokens
    if not isinstance(given_tokens, OnADevice):
        assert [int(token) for token in given_tokens] == tokens, "it was changed"


@pytest.mark.parametrize("form", SMALL_FORMS)
def test_a_request_may_use_every_form_at_every_door(form: str):
    manager = CacheManager(8, 2, host=HostConfig(8), storage=NAMESPACE)
    assert manager.tiers is not None
    make = SMALL_FORMS[form]
    prompt, tokens = make([1, 2, 3, 4, 5]), make([1, 2, 3, 4, 5, 6])
    assert block_keys(NAMESPACE, prompt) == block_keys(NAMESPACE, [1, 2, 3, 4, 5])
    assert manager.tiers.prefetch(prompt) is not None
    lease = manager.admit(manager.match(prompt))
    manager.publish(lease, prompt)
    manager.extend(lease, 1)
    assert manager.next_block(lease, tokens) == (lease.node, np.array([5, 6], np.int32).tobytes())
    other = manager.tiers.fork(lease, prompt)
    assert other.num_shared_blocks == 2 and other.loading is not None
    assert manager.tiers.park(lease, tokens) is not None
    assert manager.match([1, 2, 3, 4, 5, 6]).num_tokens == 6
    manager.check()


@pytest.mark.parametrize("form", ["list", "int64", "strided", "another library", "array.array"])
def test_the_cache_keeps_no_reference_to_what_was_converted(form: str):
    manager = CacheManager(8, 2)
    tokens = FORMS[form]([1, 2, 3, 4])
    match = manager.match(tokens)
    written: Any = tokens.values if isinstance(tokens, OnADevice) else tokens
    for position in range(4):
        written[position] = 9
    lease = manager.admit(match)
    again = FORMS[form]([1, 2, 3, 4])
    manager.publish(lease, again)
    written = again.values if isinstance(again, OnADevice) else again
    for position in range(4):
        written[position] = 9
    assert manager.match([1, 2, 3, 4]).num_tokens == 4
    assert manager.match([9, 9]).num_tokens == 0
    manager.check()


@pytest.mark.parametrize("value", [-(2**31) - 1, -(2**31), 2**31 - 1, 2**31, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("position", [0, 1, 4])
def test_the_edges_of_int32(value: int, position: int):
    tokens = [7] * 5
    tokens[position] = value
    forms: Sequence[Any] = (tokens, tuple(tokens), np.array(tokens), OnADevice(np.array(tokens)))
    for form in forms:
        if -(2**31) <= value < 2**31:
            assert as_tokens(form).tolist() == tokens
            continue
        with pytest.raises(TokenError) as caught:
            as_tokens(form)
        assert str(caught.value) == f"token {position} is {value}, outside int32"


def test_the_first_fault_is_named():
    tokens: Any = [1, 2**31, 2.0]
    with pytest.raises(TokenError, match=r"^token 1 is 2147483648, outside int32$"):
        as_tokens(tokens)
    with pytest.raises(TokenError, match=r"^token 0 must be an integer, got 2.0$"):
        as_tokens(tokens[::-1])


def test_a_bool_among_integers_is_one_of_them():
    # To look for it would cost as much as the conversion.
    assert as_tokens([5, True, False]).tolist() == [5, 1, 0]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (
            OnADevice(RuntimeError("the array was deleted")),
            "tokens cannot be read from OnADevice: the array was deleted",
        ),
        (
            OnADevice(TypeError("it is on cuda:0")),
            "tokens cannot be read from OnADevice: it is on cuda:0",
        ),
        (OnADevice(np.array([1.0], np.float16)), "tokens must be int32, got float16"),
        (np.array([1, 2**40], np.int64), "token 1 is 1099511627776, outside int32"),
        (np.array([1, 2**32 - 1], np.uint32), "token 1 is 4294967295, outside int32"),
        (np.array([2**64 - 1], np.uint64), "token 0 is 18446744073709551615, outside int32"),
        (np.array([1.0], np.float32), "tokens must be int32, got float32"),
        (np.array([]), "tokens must be int32, got float64"),
        (np.array([True]), "tokens must be int32, got bool"),
        (np.array([1], object), "tokens must be int32, got object"),
        (np.array(["1"]), "tokens must be int32, got <U1"),
        (jnp.ones(2, jnp.bfloat16), "tokens must be int32, got bfloat16"),
        (jnp.ones((1, 2), jnp.int32), "tokens must have one dimension, got shape (1, 2)"),
        (np.zeros((2, 0), np.int64), "tokens must have one dimension, got shape (2, 0)"),
        (np.int64(5), "tokens must have one dimension, got shape ()"),
        (np.zeros((2, 3), np.int32), "tokens must have one dimension, got shape (2, 3)"),
        (np.zeros((), np.int32), "tokens must have one dimension, got shape ()"),
        ([1, 2.0], "token 1 must be an integer, got 2.0"),
        ([True], "token 0 must be an integer, got True"),
        ((False, 1), "token 0 must be an integer, got False"),
        ([1, np.float32(2)], "token 1 must be an integer, got np.float32(2.0)"),
        ([1, None], "token 1 must be an integer, got None"),
        ([1, "2"], "token 1 must be an integer, got '2'"),
        ([[1]], "token 0 must be an integer, got [1]"),
        ("ab", "token 0 must be an integer, got 'a'"),
        ([0, 0, 2**31], "token 2 is 2147483648, outside int32"),
        ([1, 10**30], f"token 1 is {10**30}, outside int32"),
        ([-(2**31) - 1], "token 0 is -2147483649, outside int32"),
        (None, "tokens must be an int32 array or a list, got None"),
        (b"a", "tokens must be an int32 array or a list, got b'a'"),
        ({1}, "tokens must be an int32 array or a list, got {1}"),
    ],
)
def test_what_is_not_tokens_is_refused_at_every_door(tokens: Any, message: str):
    manager = CacheManager(8, 2, host=HostConfig(8), storage=NAMESPACE)
    assert manager.tiers is not None
    lease = manager.admit(manager.match([1, 2, 3]))
    for door in (
        as_tokens,
        manager.match,
        lambda bad: manager.publish(lease, bad),
        lambda bad: manager.next_block(lease, bad),
        manager.tiers.prefetch,
        lambda bad: manager.tiers.fork(lease, bad),
        lambda bad: manager.tiers.park(lease, bad),
        lambda bad: block_keys(NAMESPACE, bad),
    ):
        with pytest.raises(TokenError) as caught:
            door(tokens)
        assert str(caught.value) == message
    assert isinstance(caught.value, RadixKVError) and isinstance(caught.value, ValueError)
    assert manager.stats().live_leases == 1 and not manager.tiers.take_operations()
    manager.check()


# Ids


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.array([2**31], np.int64), "{} 0 is 2147483648, outside int32"),
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


@pytest.mark.parametrize("form", SMALL_FORMS)
def test_ids_may_have_every_form(form: str):
    manager, pool = CacheManager(8, 2), BlockPool(9)
    lease = manager.admit(manager.match([1]))
    manager.extend_batch(SMALL_FORMS[form]([lease.row]))
    assert lease.num_tokens == 2
    pool.recycle(SMALL_FORMS[form](pool.allocate(9).tolist()))
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


@pytest.mark.parametrize("number", [np.int64, np.int32, np.uint8])
@pytest.mark.parametrize(("num_blocks", "added"), [(4, 3), (254, 200), (255, 200)])
def test_numpy_counts_are_counts(number: Any, num_blocks: int, added: int) -> None:
    """Whatever their width: 255 + 1 is 0 in uint8."""
    with warnings.catch_warnings(action="error"):
        manager = CacheManager(number(num_blocks), number(2), host=HostConfig(number(num_blocks)))
        lease = manager.admit(manager.match([1, 2]))
        for _ in range(2):
            manager.extend(lease, number(added))
        assert lease.num_tokens == 2 + 2 * added
        manager.check()
        assert manager.evict(number(1)) == 0
        assert len(BlockPool(number(num_blocks)).allocate(number(num_blocks))) == num_blocks
    config = HostConfig(number(num_blocks), write="through", hits=number(3))
    assert repr(config) == f"HostConfig(num_blocks={num_blocks}, write='through', hits=3)"


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
