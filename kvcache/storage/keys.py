"""Storage keys: a chain of SHA-256 digests over the tokens, starting at a namespace.

::

    namespace digest = sha256(schema, model, weights, dtype, block size, layers, heads, TP, ...)
            │
    key 0 = sha256(namespace digest | tokens of block 0, little-endian int32 | extras)
    key 1 = sha256(key 0            | tokens of block 1                      | extras)

Equal keys mean equal tokens from the first one on, the same weights and the same layout. Every part
except the last has a fixed length (32 bytes, 4 x block size), so different inputs never collide by
concatenation.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property
from hashlib import sha256
from typing import Final

import numpy as np

from ..ids import KEY_BYTES as KEY_BYTES
from ..tokens import Tokens, as_tokens, make_namespace
from .errors import StorageKeyError

SCHEMA: Final = 1
"""Version of the meaning of keys and values."""
NAMESPACE_DIGITS: Final = 16
"""Number of hex digits of a namespace's digest that name it in a shared server or bucket."""


def check_key(key: bytes) -> bytes:
    """Return key unchanged.

    Raises:
        StorageKeyError: if it is not 32 bytes.
    """
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        got = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
        raise StorageKeyError(f"a key is {KEY_BYTES} bytes, got {got}")
    return key


@dataclass(frozen=True)
class StorageNamespace:
    """Everything besides the tokens that determines a block's bytes and their layout.

    Attributes:
        model: name of the model.
        weights_revision: revision of its weights: a commit or a digest.
        kv_dtype: dtype of the blocks, such as "bfloat16".
        block_size: tokens per block.
        layers: first layer, and one past the last.
        heads: first KV head, and one past the last.
        tp_rank: rank of a writer that stores a part of the heads; an engine stores all of them,
            whatever its devices.
        tp_size: number of such writers.
        layout: order of the axes in a block, such as "kv,layer,head,token,dim".
        salt: secret that separates tenants; not shown.
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
        """Validate the fields.

        Raises:
            StorageKeyError: for an empty range, a rank outside its group, a block size below 1, or
                a field of the wrong type, such as a salt that is not bytes.
            NamespaceError: for a name that is not text or has no UTF-8 encoding.
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
        self.digest()  # raises NamespaceError for names that cannot be encoded

    def digest(self) -> bytes:
        """Return the 32-byte digest of the namespace; different namespaces have different ones."""
        return self._digest

    @property
    def digits(self) -> str:
        """The digits that separate the namespace's blocks in a shared server or bucket."""
        return self.digest().hex()[:NAMESPACE_DIGITS]

    @cached_property
    def _digest(self) -> bytes:
        values: dict[str, str | bytes | int] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, tuple):
                values[f"{each.name}_first"], values[f"{each.name}_end"] = value
            else:
                values[each.name] = value
        # make_namespace sorts the fields and writes name, type and length before each value.
        return sha256(b"radixkv storage namespace\0" + make_namespace(**values)).digest()

    def block_keys(
        self, tokens: Tokens, extras: bytes = b"", parent: bytes | None = None
    ) -> list[bytes]:
        """Return the keys of the whole blocks of tokens; see the function `block_keys`."""
        return block_keys(self, tokens, extras, parent)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def block_keys(
    namespace: StorageNamespace, tokens: Tokens, extras: bytes = b"", parent: bytes | None = None
) -> list[bytes]:
    """Return the keys of the whole blocks of tokens.

    Args:
        namespace: namespace of the blocks; it sets the block size.
        tokens: int32, from the start of the sequence, or from the end of the parent block. A
            partial block at the end gets no key.
        extras: the request's namespace from `make_namespace`: LoRA, tenant, images.
        parent: key of the previous block, to continue a chain; None at the start.

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
    # The fastest way to split the bytes: as opaque items, each of which becomes a bytes object.
    blocks = np.frombuffer(data, f"V{4 * namespace.block_size}").tolist()
    return [key := sha256(key + block + extras).digest() for block in blocks]
