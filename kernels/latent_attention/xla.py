"""The XLA backend of latent attention: paged attention whose pool of values is that of keys.

The product with the weights also has the columns past `value_dim`, an eighth more for DeepSeek's
latents; a narrower copy of the pool would cost more.
"""

from functools import partial

import jax
from jaxtyping import Array, Float, Int32

from ..backends import is_gpu
from ..online_softmax import AttentionOptions
from ..paged_decode.batched import decode as decode_batched
from ..paged_decode.xla import decode as decode_xla
from ..paged_extend.batched import extend as extend_batched
from ..paged_extend.xla import extend as extend_xla


@partial(jax.jit, static_argnames=("options", "value_dim"))
def decode(
    q: Float[Array, "batch q_heads latent_dim"],
    latents: Float[Array, "blocks 1 block_size latent_dim"],
    block_tables: Int32[Array, "batch width"],
    lengths: Int32[Array, " batch"],
    options: AttentionOptions,
    value_dim: int,
) -> tuple[Float[Array, "batch q_heads value_dim"], Float[Array, "batch q_heads"]]:
    """`latent_decode` without its checks."""
    paged_decode = decode_batched if is_gpu() else decode_xla
    out, lse = paged_decode(q, latents, latents, block_tables, lengths, None, options)
    return out[..., :value_dim], lse


@partial(jax.jit, static_argnames=("options", "value_dim"))
def extend(
    q: Float[Array, "tokens q_heads latent_dim"],
    latents: Float[Array, "blocks 1 block_size latent_dim"],
    block_tables: Int32[Array, "batch width"],
    kv_lengths: Int32[Array, " batch"],
    q_lengths: Int32[Array, " batch"],
    q_starts: Int32[Array, " batch"],
    options: AttentionOptions,
    value_dim: int,
) -> tuple[Float[Array, "tokens q_heads value_dim"], Float[Array, "tokens q_heads"]]:
    """`latent_extend` without its checks."""
    rows = block_tables, kv_lengths, q_lengths, q_starts
    paged_extend = extend_batched if is_gpu() else extend_xla
    out, lse = paged_extend(q, latents, latents, *rows, None, options)
    return out[..., :value_dim], lse
