"""The backend of paged attention, for reports: what `paged_decode` and `paged_extend` choose."""

from typing import NamedTuple

import jax

from .backends import Backend, target_device, why_not_mosaic
from .paged_decode.config import unsupported as unsupported_decode
from .paged_extend.config import unsupported as unsupported_extend


class AttentionBackend(NamedTuple):
    """A backend, and why it is used."""

    backend: Backend
    reason: str


def attention_backend(
    q: jax.Array | jax.ShapeDtypeStruct, k_blocks: jax.Array, num_rows: int
) -> AttentionBackend:
    """Return the backend of `paged_decode` and `paged_extend` on the device that is traced for.

    Args:
        q: Shape and dtype of the queries, ``[tokens, q_heads, head_dim]``.
        k_blocks: Shape and dtype of a pool.
        num_rows: Number of rows of the block tables.

    Returns:
        "mosaic" if both functions use it; otherwise "xla", with the first limit that is not met.
    """
    unsupported = unsupported_decode(q, k_blocks) or unsupported_extend(q, k_blocks, num_rows)
    reason = why_not_mosaic(unsupported)
    if reason is not None:
        return AttentionBackend("xla", reason)
    supported = f"{target_device().name} runs mosaic with {q.dtype.name}"
    return AttentionBackend("mosaic", supported)
