"""Descriptions of offered parts: shapes, dtypes and digests, which D checks before and after."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ...handoff.messages import PartId
from .errors import TransportArgumentError

if TYPE_CHECKING:
    import jax

PayloadArray: TypeAlias = "jax.Array | npt.NDArray[Any]"
"""An array of an offer: gathered blocks of one pool."""

DIGEST_BYTES: Final = 16
DIGEST_KEY_BYTES: Final = 16

_NONCE_BYTES: Final = 12

# By name, because NumPy knows most of these only when ml_dtypes is loaded. No sub-byte dtypes.
_ITEM_BYTES: Final = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "int32": 4,
    "uint8": 1,
}


class ArraySpec(NamedTuple):
    """Shape and dtype (by name) of one array."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Descriptor:
    """Layout of a part. D compares P's descriptor with its own before it pulls.

    Attributes:
        arrays: the arrays, in the order of the offer.
        num_blocks: number of blocks in all arrays together.
        group: index of the layer group.
        namespace_digest: digest of all that both nodes must agree on: model, revision, dtype, salt.

    Raises:
        TransportArgumentError: without arrays, or for an empty array or an unsupported dtype.
    """

    arrays: tuple[ArraySpec, ...]
    num_blocks: int
    group: int
    namespace_digest: bytes

    def __post_init__(self) -> None:
        if not self.arrays or self.num_blocks < 1 or self.group < 0:
            raise TransportArgumentError(
                f"a part needs arrays, blocks and a group, got {len(self.arrays)} arrays, "
                f"{self.num_blocks} blocks and group {self.group}"
            )
        for spec in self.arrays:
            if spec.dtype not in _ITEM_BYTES:
                raise TransportArgumentError(f"arrays of {spec.dtype} cannot be sent")
            # jax.experimental.transfer never ends the pull of an empty array.
            if not spec.shape or min(spec.shape) < 1:
                raise TransportArgumentError(f"an array of shape {spec.shape} cannot be sent")
        if len(self.namespace_digest) != DIGEST_BYTES:
            raise TransportArgumentError(
                f"a namespace digest has {DIGEST_BYTES} bytes, got {len(self.namespace_digest)}"
            )

    @property
    def num_bytes(self) -> int:
        """Size of all arrays in bytes."""
        return sum(spec.num_bytes for spec in self.arrays)


@dataclass(frozen=True, slots=True)
class PullInfo:
    """All that D needs to pull and verify an offered part; it travels with SEND.

    Attributes:
        part_id: id of the part.
        descriptor: layout of the arrays.
        digests: see ``digest_arrays``; empty if the arrays never leave the process.
        digest_key: key of the digests, of this part alone.
        transport: name of P's transport; D must use the same.
        route: location of the arrays, in the transport's own format.
    """

    part_id: PartId
    descriptor: Descriptor
    digests: tuple[bytes, ...]
    transport: str
    route: bytes
    digest_key: bytes = field(default=b"", repr=False)


def describe(
    arrays: Sequence[PayloadArray], *, num_blocks: int, group: int = 0, namespace: bytes = b""
) -> Descriptor:
    """Describe arrays without reading them.

    Args:
        arrays: arrays of any shapes and dtypes that can be sent.
        num_blocks: number of blocks in the arrays.
        group: index of the layer group.
        namespace: all that both nodes must agree on, of any length.

    Raises:
        TransportArgumentError: for arrays that cannot be sent.
    """
    specs = tuple([ArraySpec(tuple(array.shape), str(array.dtype)) for array in arrays])
    return Descriptor(specs, num_blocks, group, digest_namespace(namespace))


def digest_namespace(namespace: bytes) -> bytes:
    """Return the digest of a namespace for a descriptor."""
    return hashlib.sha256(namespace).digest()[:DIGEST_BYTES]


def make_digest_key() -> bytes:
    """Return a new key for the digests of one part."""
    return secrets.token_bytes(DIGEST_KEY_BYTES)


def digest_arrays(arrays: Sequence[PayloadArray], key: bytes, first: int = 0) -> tuple[bytes, ...]:
    """Return the digest of each array's bytes; waits until they are on the host.

    The digests are message authentication codes (AES-GMAC). The key and the digests travel with
    SEND, which CURVE encrypts if there is a secret. Somebody who can change the arrays on their way
    but does not know the key finds no others with the same digests.

    Args:
        arrays: arrays of a part.
        key: result of `make_digest_key`, used for one part only.
        first: index of the first array in the part.
    """
    # Here, because transports in one process do not need the extra.
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    cipher = AESGCM(key)
    return tuple(
        [
            cipher.encrypt(index.to_bytes(_NONCE_BYTES, "little"), b"", array_bytes(host).data)
            for index, host in enumerate(map(np.asarray, arrays), first)
        ]
    )


def array_bytes(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Return the bytes of an array, without a copy if it is contiguous."""
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1)


def is_ready(array: PayloadArray) -> bool:
    """Whether the computation of an array has ended, successfully or not."""
    waiting: Any = array  # JAX's types lack is_ready
    return isinstance(array, np.ndarray) or bool(waiting.is_ready())
