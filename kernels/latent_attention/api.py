"""`latent_decode` and `latent_extend`: paged attention of all query heads over one latent head."""

from typing import Any, Literal, overload

import jax
from jaxtyping import Array, Float, Int32

from ..argument_checks import (
    KernelArgumentError,
    check_block_tables,
    check_float,
    check_int32,
    check_pool,
    check_queries,
)
from ..backends import Backend, choose_backend, target_device
from ..online_softmax import AttentionOptions, check_options
from .config import choose_config, unsupported
from .xla import decode as decode_xla
from .xla import extend as extend_xla


@overload
def latent_decode(
    q: Float[Array, "batch q_heads latent_dim"],
    latents: Float[Array, "blocks 1 block_size latent_dim"],
    block_tables: Int32[Array, "batch width"],
    lengths: Int32[Array, " batch"],
    *,
    sm_scale: float,
    value_dim: int,
    return_lse: Literal[False] = False,
    backend: Backend | None = None,
) -> Float[Array, "batch q_heads value_dim"]: ...
@overload
def latent_decode(
    q: Float[Array, "batch q_heads latent_dim"],
    latents: Float[Array, "blocks 1 block_size latent_dim"],
    block_tables: Int32[Array, "batch width"],
    lengths: Int32[Array, " batch"],
    *,
    sm_scale: float,
    value_dim: int,
    return_lse: Literal[True],
    backend: Backend | None = None,
) -> tuple[Float[Array, "batch q_heads value_dim"], Float[Array, "batch q_heads"]]: ...
def latent_decode(
    q: Float[Array, "batch q_heads latent_dim"],
    latents: Float[Array, "blocks 1 block_size latent_dim"],
    block_tables: Int32[Array, "batch width"],
    lengths: Int32[Array, " batch"],
    *,
    sm_scale: float,
    value_dim: int,
    return_lse: bool = False,
    backend: Backend | None = None,
) -> (
    Float[Array, "batch q_heads value_dim"]
    | tuple[Float[Array, "batch q_heads value_dim"], Float[Array, "batch q_heads"]]
):
    """Attention of one query token per row over that row's blocks of latents.

    A token has one latent, which all query heads share. The whole of it is the key, and its first
    ``value_dim`` elements are the value::

        latent of a token   | compressed KV, normalised (DeepSeek: 512) | rotary key (64) |
        key                 |---------------------------------------------------------|
        value               |-- value_dim ------------------------------|

    The queries are "absorbed": those of a head are multiplied by that head's up-projection of keys,
    followed by the rotary part. Multiply the output of a head by its up-projection of values. Token
    ``p`` of row ``b`` lies in the pool at::

        [block_tables[b, p // block_size], 0, p % block_size, :]

    so block copies and tiers treat it as a pool with one KV head. Memory beyond a row's length is
    never used: it may hold NaN, and its table entries may be anything. Under `jax.shard_map`, shard
    the queries over their heads and give each device all latents.

    Args:
        q: Absorbed queries, one token per row, bfloat16, float16 or float32; accumulation is in
            float32.
        latents: Pool of latents, of floats.
        block_tables: Block ids of each row, as in `paged_decode`.
        lengths: Tokens of each row, including the query's own; 0 marks an inactive row, whose
            output is exactly 0. The output of a row longer than its table is NaN.
        sm_scale: Factor of the logits. It is that of the model before absorption: for DeepSeek
            ``(128 + 64) ** -0.5``, times the square of YaRN's factor if there is one. Static.
        value_dim: Elements of a latent that are the value. Static.
        return_lse: Also return the log-sum-exp of the logits. Static.
        backend: Implementation; None chooses the fastest that supports the arguments. Static.

    Returns:
        The output in the dtype of ``q``; with ``return_lse`` also the natural log of the softmax
        denominator in float32, -inf for inactive rows.

    Raises:
        KernelArgumentError: A shape, dtype or option is wrong; raised while tracing.

    Source: multi-head latent attention, DeepSeek-V2 (arXiv 2405.04434), section 2.1.
    """
    options = _check(q, latents, block_tables, "batch", sm_scale, value_dim)
    check_int32(
        "block_tables", block_tables, (q.shape[0], block_tables.shape[1]), "batch of q, width"
    )
    check_int32("lengths", lengths, (q.shape[0],), "batch of q")
    arrays = q, latents, block_tables, lengths
    if _runs_mosaic(backend, q, latents, block_tables, value_dim):
        from .mosaic import decode as decode_mosaic  # slow to import

        out, lse = decode_mosaic(*arrays, **_launch(q, options), return_lse=return_lse)
    else:
        out, lse = decode_xla(*arrays, options, value_dim)
    return (out, lse) if return_lse and lse is not None else out


@overload
def latent_extend(
    q: Float[Array, "tokens q_heads latent_dim"],
    latents: Float[Array, "blocks 1 block_size latent_dim"],
    block_tables: Int32[Array, "batch width"],
    kv_lengths: Int32[Array, " batch"],
    q_lengths: Int32[Array, " batch"],
    q_starts: Int32[Array, " batch"],
    *,
    sm_scale: float,
    value_dim: int,
    return_lse: Literal[False] = False,
    backend: Backend | None = None,
) -> Float[Array, "tokens q_heads value_dim"]: ...
@overload
def latent_extend(
    q: Float[Array, "tokens q_heads latent_dim"],
    latents: Float[Array, "blocks 1 block_size latent_dim"],
    block_tables: Int32[Array, "batch width"],
    kv_lengths: Int32[Array, " batch"],
    q_lengths: Int32[Array, " batch"],
    q_starts: Int32[Array, " batch"],
    *,
    sm_scale: float,
    value_dim: int,
    return_lse: Literal[True],
    backend: Backend | None = None,
) -> tuple[Float[Array, "tokens q_heads value_dim"], Float[Array, "tokens q_heads"]]: ...
def latent_extend(
    q: Float[Array, "tokens q_heads latent_dim"],
    latents: Float[Array, "blocks 1 block_size latent_dim"],
    block_tables: Int32[Array, "batch width"],
    kv_lengths: Int32[Array, " batch"],
    q_lengths: Int32[Array, " batch"],
    q_starts: Int32[Array, " batch"],
    *,
    sm_scale: float,
    value_dim: int,
    return_lse: bool = False,
    backend: Backend | None = None,
) -> (
    Float[Array, "tokens q_heads value_dim"]
    | tuple[Float[Array, "tokens q_heads value_dim"], Float[Array, "tokens q_heads"]]
):
    """Causal attention of each row's last ``q_lengths[b]`` tokens over its blocks of latents.

    Rows lie in ``q`` as in `paged_extend`, and queries and latents are those of `latent_decode`.
    Write the latents of the query tokens into the pool before.

    Args:
        q: Absorbed queries, bfloat16, float16 or float32; accumulation is in float32.
        latents: Pool of latents, of floats.
        block_tables: Block ids of each row, as in `paged_extend`.
        kv_lengths: Tokens of each row, including its queries. The output of a row longer than its
            table is NaN; a query at a negative position sees nothing.
        q_lengths: Query tokens of each row; 0 marks an inactive row.
        q_starts: Index in ``q`` of each row's first query; rows must not overlap.
        sm_scale: As in `latent_decode`. Static.
        value_dim: Elements of a latent that are the value. Static.
        return_lse: Also return the log-sum-exp of the logits. Static.
        backend: Implementation; None chooses the fastest that supports the arguments. Static.

    Returns:
        The output in the dtype of ``q``, exactly 0 for tokens of no row; with ``return_lse`` also
        the natural log of the softmax denominator in float32, -inf for tokens that see nothing.

    Raises:
        KernelArgumentError: A shape, dtype or option is wrong; raised while tracing.
    """
    options = _check(q, latents, block_tables, "tokens", sm_scale, value_dim)
    rows = {"kv_lengths": kv_lengths, "q_lengths": q_lengths, "q_starts": q_starts}
    for name, array in rows.items():
        check_int32(name, array, (block_tables.shape[0],), "batch of block_tables")
    arrays = q, latents, block_tables, kv_lengths, q_lengths, q_starts
    if _runs_mosaic(backend, q, latents, block_tables, value_dim):
        from .mosaic import extend as extend_mosaic  # slow to import

        out, lse = extend_mosaic(*arrays, **_launch(q, options), return_lse=return_lse)
    else:
        out, lse = extend_xla(*arrays, options, value_dim)
    return (out, lse) if return_lse and lse is not None else out


def _runs_mosaic(
    backend: Backend | None,
    q: jax.Array,
    latents: jax.Array,
    block_tables: jax.Array,
    value_dim: int,
) -> bool:
    """Whether the Mosaic kernel is requested, or the fastest."""
    reason = unsupported(q, latents, value_dim, block_tables.shape[0])
    return choose_backend(backend, reason) == "mosaic"


def _launch(q: jax.Array, options: AttentionOptions) -> dict[str, Any]:
    """Static arguments of the Mosaic kernel."""
    config = choose_config(q.shape[0], q.shape[1], target_device().num_cores)
    return {"sm_scale": options.sm_scale, "config": config}


def _check(
    q: jax.Array,
    latents: jax.Array,
    block_tables: jax.Array,
    axis: str,
    sm_scale: float,
    value_dim: int,
) -> AttentionOptions:
    """Check what both functions share; return the static options."""
    check_pool("latents", latents)
    check_float("latents", latents)
    if latents.shape[1] != 1:
        raise KernelArgumentError(f"latents must have one head, got {latents.shape[1]}")
    check_queries(q, latents, axis)
    check_block_tables(block_tables)
    latent_dim = latents.shape[3]
    if isinstance(value_dim, bool) or not isinstance(value_dim, int):
        raise KernelArgumentError(
            f"value_dim must be a Python int, got {type(value_dim).__name__}: it is compiled in"
        )
    if not 1 <= value_dim <= latent_dim:
        raise KernelArgumentError(
            f"value_dim must be in 1 .. {latent_dim}, the elements of a latent, got {value_dim}"
        )
    return check_options(sm_scale, None, None, None, q.shape[1])
