import re
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kvcache import NamespaceError, TokenError, make_namespace
from radixkv.kvcache.storage import StorageKeyError, StorageNamespace, block_keys

NAMESPACE = StorageNamespace(
    model="m", weights_revision="r1", kv_dtype="bfloat16", block_size=4, layers=(0, 2), heads=(0, 8)
)
OTHERS: dict[str, Any] = {
    "model": "n",
    "weights_revision": "r2",
    "kv_dtype": "float8_e4m3fn",
    "block_size": 8,
    "layers": (0, 3),
    "heads": (8, 16),
    "tp_rank": 1,
    "tp_size": 3,
    "layout": "layer,kv,token,head,dim",
    "salt": b"x",
    "schema": 2,
}


def test_the_keys_of_a_known_input_never_change() -> None:
    # Stored values outlive a release: if this fails, change SCHEMA.
    assert NAMESPACE.digest().hex()[:16] == "f01102e48efae428"
    assert [key.hex()[:16] for key in block_keys(NAMESPACE, range(8))] == [
        "48d7590926bec75a",
        "66b61e284ae0b75d",
    ]


@pytest.mark.parametrize("name", OTHERS)
def test_every_field_changes_the_digest(name: str) -> None:
    base = replace(NAMESPACE, tp_size=2)
    assert replace(base, **{name: OTHERS[name]}).digest() != base.digest()


def test_every_field_is_covered() -> None:
    assert set(OTHERS) == {field.name for field in fields(StorageNamespace)}


def test_the_salt_is_not_shown() -> None:
    assert "hidden" not in repr(replace(NAMESPACE, salt=b"hidden"))


def test_only_whole_blocks_have_keys() -> None:
    assert [len(block_keys(NAMESPACE, range(n))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]
    assert len(block_keys(replace(NAMESPACE, block_size=1), range(3))) == 3


@given(
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40),
    st.integers(0, 40),
    st.sampled_from([b"", b"lora"]),
)
def test_keys_are_a_chain(tokens: list[int], cut: int, extras: bytes) -> None:
    before = list(tokens)
    keys = block_keys(NAMESPACE, tokens, extras)
    assert tokens == before
    assert keys == block_keys(NAMESPACE, np.array(tokens, np.int32), extras)
    assert keys == NAMESPACE.block_keys(tokens, extras)
    assert keys[: cut // 4] == block_keys(NAMESPACE, tokens[:cut], extras)
    assert len(set(keys)) == len(keys)
    for done in range(1, len(keys)):
        rest = block_keys(NAMESPACE, tokens[4 * done :], extras, keys[done - 1])
        assert rest == keys[done:]


@given(st.integers(0, 11), st.integers(1, 2**31 - 1))
def test_a_token_changes_its_key_and_all_after_it(position: int, change: int) -> None:
    tokens = np.arange(12, dtype=np.int32)
    changed = tokens.copy()
    changed[position] ^= change
    pairs = zip(block_keys(NAMESPACE, tokens), block_keys(NAMESPACE, changed), strict=True)
    assert [a == b for a, b in pairs] == [block < position // 4 for block in range(3)]


def test_an_array_is_not_changed_and_may_be_strided() -> None:
    tokens = np.arange(16, dtype=np.int32)[::2]
    tokens.flags.writeable = False
    assert block_keys(NAMESPACE, tokens) == block_keys(NAMESPACE, [0, 2, 4, 6, 8, 10, 12, 14])


def test_extras_change_every_key() -> None:
    plain = block_keys(NAMESPACE, range(8))
    lora = block_keys(NAMESPACE, range(8), make_namespace(lora="sql"))
    assert not set(plain) & set(lora)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": (2, 2)}, "layers must be a range of at least one, got 2:2"),
        ({"heads": (-1, 2)}, "heads must be a range of at least one, got -1:2"),
        ({"tp_rank": 2, "tp_size": 2}, "tp_rank is 2, of a group of 2"),
        ({"tp_rank": -1}, "tp_rank is -1, of a group of 1"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"salt": "text"}, "salt must be bytes, got str"),
        ({"layers": 2}, "layers must be a tuple of two integers, got 2"),
        ({"layers": [0, 2]}, "layers must be a tuple of two integers, got [0, 2]"),
        ({"heads": (0, 1, 2)}, "heads must be a tuple of two integers, got (0, 1, 2)"),
        ({"heads": (0, True)}, "heads must be a tuple of two integers, got (0, True)"),
        ({"block_size": 4.0}, "block_size must be an integer, got 4.0"),
        ({"tp_rank": "0"}, "tp_rank must be an integer, got '0'"),
        ({"tp_size": True}, "tp_size must be an integer, got True"),
    ],
)
def test_an_invalid_namespace_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(StorageKeyError, match=rf"^{re.escape(message)}$"):
        replace(NAMESPACE, **changes)


def test_a_dtype_in_place_of_its_name_is_refused() -> None:
    kind: Any = np.float32
    text = f"namespace field kv_dtype must be str, bytes or int, got {kind!r}"
    with pytest.raises(NamespaceError, match=f"^{re.escape(text)}$"):
        replace(NAMESPACE, kv_dtype=kind)


def test_invalid_input_is_refused() -> None:
    with pytest.raises(StorageKeyError, match=r"^a key is 32 bytes, got 3 bytes$"):
        block_keys(NAMESPACE, [1], parent=b"abc")
    with pytest.raises(StorageKeyError, match=r"^extras must be bytes, got str$"):
        block_keys(NAMESPACE, [1], "sql")  # type: ignore[arg-type]
    with pytest.raises(TokenError, match=r"^tokens must be int32, got float64$"):
        block_keys(NAMESPACE, np.zeros(4))
