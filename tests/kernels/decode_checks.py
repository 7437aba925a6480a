"""Comparison with the oracle, shared by the tests of each backend of `paged_decode`."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from . import oracle
from .problems import Heads, assert_close, int32, make_cache, make_queries

SM_SCALE = 0.3


class DecodeChecks:
    """Base class of tests; `attend` is `paged_decode` or has the same signature."""

    attend: ClassVar[Callable[..., Any]]

    def check(
        self,
        lengths,
        *,
        block_size=4,
        heads=None,
        dtype="float32",
        pool_dtype=None,
        lse_dtype=None,
        width=None,
        attend=None,
        **options,
    ):
        """Compare output and lse with the oracle, on NaN-poisoned pools; return the output.

        The tolerance of the lse is that of `lse_dtype`, by default of `dtype`.
        """
        heads = heads or Heads()
        rng = np.random.default_rng(0)
        blocks = [-(-length // block_size) for length in lengths]
        cache = make_cache(
            rng,
            lengths,
            block_size=block_size,
            width=width or max(1, *blocks),
            num_blocks=sum(blocks) + 3,
            heads=heads,
            dtype=pool_dtype or dtype,
        )
        q = make_queries(rng, len(lengths), heads, dtype)
        attend = attend or self.attend
        attend = jax.jit(partial(attend, sm_scale=SM_SCALE, return_lse=True, **options))
        pools = cache.k_blocks, cache.v_blocks
        out, lse = attend(q, *pools, cache.block_tables, int32(lengths), **cache.scales)
        expected = oracle.decode(
            q.astype(jnp.float32), *cache.for_oracle, lengths, sm_scale=SM_SCALE, **options
        )
        assert out.dtype == q.dtype and lse.dtype == jnp.float32
        assert_close(out, expected[0], dtype)
        assert_close(lse, expected[1], lse_dtype or dtype)
        return out
