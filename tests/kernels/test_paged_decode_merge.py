"""The merge of the Mosaic `paged_decode`: simulated, and searched for races."""

from types import ModuleType

import jax.numpy as jnp
import numpy as np
import pytest

from radixkv.kernels.paged_decode import merge as merge_module

from .interpret import races_detected
from .problems import assert_close, int32

ROWS = 64


def check_merge(
    numbers: list[int], group: int, head_dim: int, module: ModuleType = merge_module
) -> None:
    """Merge these numbers of parts of one KV head each, beside parts that are NaN; with sinks."""
    rng = np.random.default_rng(0)
    firsts = [sum(numbers[:pair]) + pair + 1 for pair in range(len(numbers))]
    shape = firsts[-1] + numbers[-1] + 1, group, head_dim
    parts, lses = np.full(shape, np.nan), np.full((shape[0], ROWS), np.nan)
    sinks = rng.standard_normal((1, group))
    sinks[0, 1::2] += 200  # whose exp is no float32
    out, log = np.zeros((len(numbers), *shape[1:])), np.zeros((len(numbers), group))
    for pair, (first, number) in enumerate(zip(firsts, numbers, strict=True)):
        of_pair = slice(first, first + number)
        parts[of_pair] = rng.standard_normal((number, *shape[1:]))
        lses[of_pair, :group] = 3 * rng.standard_normal((number, group))
        if number > 2:
            parts[first + 1], lses[first + 1, :group] = 0, -np.inf
        weights = np.exp2(lses[of_pair, :group])
        total = weights.sum(0) + np.exp(sinks[0])
        out[pair] = (parts[of_pair] * weights[..., None]).sum(0) / total[:, None]
        log[pair] = np.log(total)
    with races_detected() as params:
        found, found_log = module.merge_parts(
            jnp.asarray(parts, jnp.float32),
            jnp.asarray(lses, jnp.float32),
            int32(list(zip(firsts, numbers, strict=True))),
            jnp.asarray(sinks),
            jnp.float32,
            True,
            params,
        )
        assert_close(found.reshape(out.shape), out, "float32")
        assert_close(found_log, log, "float32")


@pytest.mark.parametrize("poisoned", [0, 9])
def test_a_part_that_is_nan_spoils_its_row(poisoned):
    parts, lses = jnp.ones((11, 1, 128)), jnp.zeros((11, ROWS))
    parts, lses = parts.at[poisoned].set(jnp.nan), lses.at[poisoned].set(jnp.nan)
    with races_detected() as params:
        pairs = int32([[0, 10], [10, 1]])
        out, lse = merge_module.merge_parts(parts, lses, pairs, None, "bfloat16", True, params)
        assert out.dtype == "bfloat16" and lse is not None
        assert jnp.isnan(out[0]).all() and jnp.isnan(lse[0]).all()
        assert out[1].tolist() == [1.0] * 128 and lse[1].tolist() == [0.0]


def test_nothing_seen_is_exactly_zero():
    parts, lses = jnp.zeros((2, 1, 128)), jnp.full((2, ROWS), -jnp.inf)
    with races_detected() as params:
        sinks = jnp.array([[3.0]])
        out, lse = merge_module.merge_parts(
            parts, lses, int32([[0, 2]]), sinks, "float32", True, params
        )
        assert lse is not None and not out.any() and jnp.isneginf(lse).all()
