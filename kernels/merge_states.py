"""Merge attention over disjoint sets of tokens, such as a shared prefix and the rest."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .argument_checks import KernelArgumentError, check_dtype, check_float, check_shape


def merge_attention_states(
    out_a: Float[Array, "*rows head_dim"],
    lse_a: Float[Array, "*rows"],
    out_b: Float[Array, "*rows head_dim"],
    lse_b: Float[Array, "*rows"],
) -> tuple[Float[Array, "*rows head_dim"], Float[Array, "*rows"]]:
    """Merge attention over two sets of tokens into attention over both.

    If many rows share a prefix, attend to it once for all of them (their queries are the rows of
    one `paged_extend` without a window, or of dense attention), attend to each row's other tokens
    with `paged_decode`, and merge. XLA compiles the merge to one elementwise pass::

        weight_a = exp(lse_a) / (exp(lse_a) + exp(lse_b))      out = weight_a * out_a + ...

    Args:
        out_a: Attention over the first set of tokens.
        lse_a: Natural log of its softmax denominators, float32; -inf where it saw no token, where
            ``out_a`` is ignored, even if NaN.
        out_b: Attention over the second set, disjoint from the first; as ``out_a``.
        lse_b: As ``lse_a``. Include attention sinks in only one of the two.

    Returns:
        The output in the dtype of ``out_a`` and its log-sum-exp; 0 and -inf where neither saw a
        token.

    Raises:
        KernelArgumentError: A shape or dtype is wrong; raised while tracing.
    """
    check_float("out_a", out_a)
    if out_a.ndim == 0:
        raise KernelArgumentError("out_a must be [*rows, head_dim], got []")
    check_shape("out_b", out_b, out_a.shape, "as out_a")
    check_dtype("out_b", out_b, (out_a.dtype.name,))
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        check_shape(name, lse, out_a.shape[:-1], "rows of out_a")
        check_dtype(name, lse, ("float32",))
    peak = jnp.maximum(lse_a, lse_b)
    empty = peak == -jnp.inf
    peak = jnp.where(empty, 0.0, peak)
    weight_a, weight_b = jnp.exp(lse_a - peak), jnp.exp(lse_b - peak)
    total = jnp.where(empty, 1.0, weight_a + weight_b)

    def share(out: jax.Array, lse: jax.Array, weight: jax.Array) -> jax.Array:
        seen = jnp.where(lse[..., None] == -jnp.inf, 0.0, out.astype(jnp.float32))
        return seen * (weight / total)[..., None]

    out = share(out_a, lse_a, weight_a) + share(out_b, lse_b, weight_b)
    return out.astype(out_a.dtype), jnp.where(empty, -jnp.inf, peak + jnp.log(total))
