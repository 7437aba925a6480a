"""What a block is called in storage: a chain of sha256 digests that starts at a namespace.

::

    namespace digest = sha256(schema, model, weights, dtype, block size, layers, heads, TP, ...)
            │
    key 0 = sha256(namespace digest | tokens of block 0, little-endian int32 | extras)
    key 1 = sha256(key 0            | tokens of block 1                      | extras)

So equal keys mean: equal tokens from the first on, under equal weights, in an equal layout. Each
part has a fixed length (32 bytes, 4 x block size) but the last, so no two inputs run together.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property
from hashlib import sha256
from typing import Final

import numpy as np

from ..ids import KEY_BYTES as KEY_BYTES
from ..tokens import (
    Tokens,
    as_tokens,
    make_namespace,
)
from .errors import StorageKeyError

SCHEMA: Final = 1
"""Changes when the meaning of a key or of a value does."""
NAMESPACE_DIGITS: Final = 16
"""So many of a namespace's digest, in hex, name it in a server or bucket that others share."""


def check_key(key: bytes) -> bytes:
    """Return key if it is one.

    Raises:
        StorageKeyError: if it is not 32 bytes.
    """
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        what = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
        raise StorageKeyError(f"a key is {KEY_BYTES} bytes, got {what}")
    return key


@dataclass(frozen=True)
class StorageNamespace:
    """All that makes the KV of equal tokens differ, and the shape of a block's bytes.

    Attributes:
        model: which model, as its users name it.
        weights_revision: which weights of it: a commit or a digest.
        kv_dtype: what the blocks hold, such as "bfloat16".
        block_size: tokens per block.
        layers: first layer, and one past the last.
        heads: first KV head, and one past the last.
        tp_rank: which part of a tensor-parallel group wrote it.
        tp_size: of how many parts.
        layout: the order of the axes in a block, such as "kv,layer,head,token,dim".
        salt: a secret that keeps tenants apart; not shown.
        schema: version of keys and values.
    """

    model: str
    weights_revision: str
    kv_dtype: str
    block_size: int
    layers: tuple[int, int]
    heads: tuple[int, int]
    tp_rank: int = 0
    tp_size: int = 1
    layout: str = "kv,layer,head,token,dim"
    salt: bytes = field(default=b"", repr=False)
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            StorageKeyError: for an empty range, a rank outside its group, no tokens per block, or a
                field of the wrong kind, such as a salt that is not bytes.
            NamespaceError: for a name that is no text, or has no UTF-8 encoding.
        """
        if not isinstance(self.salt, bytes):
            raise StorageKeyError(f"salt must be bytes, got {type(self.salt).__name__}")
        for name in ("layers", "heads"):
            value = getattr(self, name)
            if not (isinstance(value, tuple) and len(value) == 2 and all(map(_is_int, value))):
                raise StorageKeyError(f"{name} must be a tuple of two integers, got {value!r}")
            first, end = value
            if not 0 <= first < end:
                raise StorageKeyError(f"{name} must be a range of at least one, got {first}:{end}")
        for name in ("block_size", "tp_rank", "tp_size"):
            if not _is_int(value := getattr(self, name)):
                raise StorageKeyError(f"{name} must be an integer, got {value!r}")
        if not 0 <= self.tp_rank < self.tp_size:
            raise StorageKeyError(f"tp_rank is {self.tp_rank}, of a group of {self.tp_size}")
        if self.block_size < 1:
            raise StorageKeyError(f"block_size must be at least 1, got {self.block_size}")
        self.digest()  # refuses what it cannot encode

    def digest(self) -> bytes:
        """Return 32 bytes that differ between any two different namespaces."""
        return self._digest

    @cached_property
    def _digest(self) -> bytes:
        values: dict[str, str | bytes | int] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, tuple):
                values[f"{each.name}_first"], values[f"{each.name}_end"] = value
            else:
                values[each.name] = value
        # Each with its name, type and length in front, sorted by name.
        return sha256(b"radixkv storage namespace\0" + make_namespace(**values)).digest()

    def block_keys(
        self, tokens: Tokens, extras: bytes = b"", parent: bytes | None = None
    ) -> list[bytes]:
        """Return the keys of the whole blocks of tokens: the function `block_keys`."""
        return block_keys(self, tokens, extras, parent)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def block_keys(
    namespace: StorageNamespace, tokens: Tokens, extras: bytes = b"", parent: bytes | None = None
) -> list[bytes]:
    """Return the keys of the whole blocks of tokens, which are only read.

    Args:
        namespace: whose blocks; its block_size says how long they are.
        tokens: int32, from the start of the sequence, or from where parent ends. The rest that
            fills no block has no key.
        extras: the request's own namespace, from `make_namespace`: LoRA, tenant, images.
        parent: the key of the block before, to go on with a chain; None at the start.

    Raises:
        TokenError: if tokens are not int32.
        StorageKeyError: if parent is not a key, or extras are not bytes.
    """
    if not isinstance(extras, bytes):
        raise StorageKeyError(f"extras must be bytes, got {type(extras).__name__}")
    key = namespace.digest() if parent is None else check_key(parent)
    tokens = as_tokens(tokens)
    whole = tokens[: len(tokens) - len(tokens) % namespace.block_size]
    data = whole.astype("<i4", copy=False).tobytes()
    # Of the ways to cut it, this is the quickest: as so many opaque items, each a bytes object.
    blocks = np.frombuffer(data, f"V{4 * namespace.block_size}").tolist()
    return [key := sha256(key + block + extras).digest() for block in blocks]
