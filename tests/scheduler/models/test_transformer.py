"""Products with the matrices of a model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from radixkv.scheduler.models.transformer import Linear, linear


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_a_product_of_few_rows_converts_no_matrix(dtype: str, num_rows: int) -> None:
    matrix = jnp.asarray(np.random.default_rng(0).standard_normal((2048, 1024)), dtype)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((num_rows, 1024)), dtype)
    compiled = jax.jit(linear).lower(Linear(matrix), x).compile()
    y = compiled(Linear(matrix), x)
    assert y.shape == (num_rows, 2048)
    assert y.dtype == matrix.dtype
    exact = np.asarray(x, np.float64) @ np.asarray(matrix, np.float64).T
    error = np.abs(np.asarray(y, np.float64) - exact).max()
    assert error < (0.5 if dtype == "bfloat16" else 1e-3)  # bfloat16 of about 100 is 0.25 off
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < matrix.nbytes / 4
