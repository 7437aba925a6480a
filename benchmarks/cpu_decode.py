"""Compare the jnp paged_decode with dense attention over the same tokens, on a CPU.

    python benchmarks/cpu_decode.py

Both are compiled, read float32 or bfloat16 keys and values, and run alternately. The dense one has
them contiguous and needs no block table, the paged one gathers its blocks first.
"""

import os
import platform
import time
from datetime import date
from importlib.metadata import version
from statistics import median

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from radixkv.kernels import paged_decode

ROWS, LENGTH, BLOCK_SIZE = 4, 2048, 16
Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
TURNS = 30


@jax.jit
def dense(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention of one query token per row over `k`, `v` [rows, length, kv_heads, head_dim]."""
    grouped = q.reshape(ROWS, KV_HEADS, -1, HEAD_DIM)
    logits = jnp.einsum("bhgd,bthd->bhgt", grouped, k, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(logits * HEAD_DIM**-0.5).astype(v.dtype)
    out = jnp.einsum("bhgt,bthd->bhgd", weights, v, preferred_element_type=jnp.float32)
    return out.reshape(q.shape).astype(q.dtype)


def measure(dtype: str) -> tuple[float, float]:
    """Median milliseconds of the dense and of the paged attention."""
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.standard_normal((ROWS, Q_HEADS, HEAD_DIM)), dtype)
    shape = (ROWS, LENGTH, KV_HEADS, HEAD_DIM)
    k, v = (jnp.asarray(rng.standard_normal(shape), dtype) for _ in "kv")
    width = LENGTH // BLOCK_SIZE
    tables = rng.permutation(ROWS * width).astype(np.int32) + 1

    def as_pool(tokens: jax.Array) -> jax.Array:
        blocks = tokens.reshape(-1, BLOCK_SIZE, KV_HEADS, HEAD_DIM).transpose(0, 2, 1, 3)
        return jnp.zeros((ROWS * width + 1, *blocks.shape[1:]), dtype).at[tables].set(blocks)

    pools = as_pool(k), as_pool(v)
    block_tables = jnp.asarray(tables).reshape(ROWS, width)
    lengths = jnp.full(ROWS, LENGTH, jnp.int32)
    paged = jax.jit(lambda *args: paged_decode(*args, sm_scale=HEAD_DIM**-0.5))
    calls = (lambda: dense(q, k, v)), (lambda: paged(q, *pools, block_tables, lengths))
    expected, got = (np.asarray(call(), np.float32) for call in calls)
    assert np.linalg.norm(got - expected) < 1e-2 * np.linalg.norm(expected)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(TURNS):
        for call, samples in zip(calls, times, strict=True):
            start = time.perf_counter()
            call().block_until_ready()
            samples.append(1e3 * (time.perf_counter() - start))
    return median(times[0]), median(times[1])


def main() -> None:
    """Print the table."""
    print(f"{ROWS} sequences of {LENGTH} tokens, blocks of {BLOCK_SIZE}, {Q_HEADS} query heads,")
    print(f"{KV_HEADS} KV heads of {HEAD_DIM}; jax {version('jax')}, {os.cpu_count()} cores,")
    print(f"{platform.processor() or platform.machine()}, {date.today()}\n")
    print("| dtype | dense | paged_decode | paged / dense |")
    print("| --- | --- | --- | --- |")
    for dtype in ("float32", "bfloat16"):
        dense_ms, paged_ms = measure(dtype)
        print(f"| {dtype} | {dense_ms:.1f} ms | {paged_ms:.1f} ms | {paged_ms / dense_ms:.2f} |")


if __name__ == "__main__":
    main()
