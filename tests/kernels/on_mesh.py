"""Compare the kernels on four CPU devices with those on one; a program of `test_mesh.py`.

It prints the largest difference of each call as JSON, by its name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from radixkv.kernels import (
    copy_blocks,
    gather_blocks,
    kv_write,
    latent_decode,
    latent_extend,
    paged_decode,
    paged_extend,
    scatter_blocks,
)
from radixkv.kernels.batched_attention import BatchSizes
from radixkv.kernels.online_softmax import AttentionOptions
from radixkv.kernels.paged_decode.batched import decode as batched_decode
from radixkv.kernels.paged_extend.batched import SIZES
from radixkv.kernels.paged_extend.batched import extend as batched_extend

HEADS = P(None, "tp")
"""Of queries, new keys, pools and staging, and of the scales of quantised pools."""
ALL = P()
"""Of latents, block tables, lengths, slots and ids, which all devices have."""

B, Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 3, 8, 4, 64, 8
LENGTHS, NEW = (1, 9, 30), (1, 5, 20)


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def int32(*numbers: int) -> jax.Array:
    return jnp.asarray(numbers, jnp.int32)


def cases() -> dict[str, tuple[Callable[..., Any], list[Any], list[P], Any]]:
    """Function, arguments, and how these and the results are sharded, by name."""
    k, v = (normal(seed, 16, KV_HEADS, BLOCK_SIZE, HEAD_DIM) for seed in (1, 2))
    pools, table = [k, v], jnp.arange(12, dtype=jnp.int32).reshape(B, 4)
    q, ragged = normal(3, B, Q_HEADS, HEAD_DIM), normal(4, sum(NEW), Q_HEADS, HEAD_DIM)
    sinks, scales = normal(5, Q_HEADS), jnp.abs(normal(6, 16, KV_HEADS))
    quantised = [(30 * pool).astype(jnp.int8) for pool in pools]
    new, ids, count = normal(7, B, KV_HEADS, HEAD_DIM), int32(1, 2), jnp.int32(2)

    def decode(q: Any, k: Any, v: Any, table: Any, lengths: Any, *options: Any) -> Any:
        sinks, k_scales = options or (None, None)
        given = {"sinks": sinks, "k_scales": k_scales, "v_scales": k_scales, "window": 7}
        return paged_decode(q, k, v, table, lengths, sm_scale=0.1, return_lse=True, **given)

    def extend(
        q: Any, k: Any, v: Any, table: Any, total: Any, new: Any, starts: Any, *options: Any
    ) -> Any:
        sinks, k_scales = options or (None, None)
        given = {"sinks": sinks, "k_scales": k_scales, "v_scales": k_scales}
        rows = total, new, starts
        return paged_extend(q, k, v, table, *rows, sm_scale=0.1, return_lse=True, **given)

    latents: dict[str, Any] = {"sm_scale": 0.1, "value_dim": 48, "return_lse": True}
    attention = AttentionOptions(0.1, None, None)

    def on_gpus(kernel: Any, sizes: BatchSizes, *args: Any) -> Any:
        *read, sinks, scales = args
        return kernel(*read, sinks, attention, (scales, scales), sizes)

    one = [table, int32(*LENGTHS)]
    many = [*one, int32(*NEW), int32(0, 1, 6)]
    options, of_options = [sinks, scales], [P("tp"), HEADS]
    return {
        "decode": (decode, [q, *pools, *one], [HEADS] * 3 + [ALL] * 2, (HEADS, HEADS)),
        "decode int8": (
            decode,
            [q, *quantised, *one, *options],
            [HEADS] * 3 + [ALL] * 2 + of_options,
            (HEADS, HEADS),
        ),
        "extend": (extend, [ragged, *pools, *many], [HEADS] * 3 + [ALL] * 4, (HEADS, HEADS)),
        "extend int8": (
            extend,
            [ragged, *quantised, *many, *options],
            [HEADS] * 3 + [ALL] * 4 + of_options,
            (HEADS, HEADS),
        ),
        "latent decode": (
            lambda *args: latent_decode(*args, **latents),
            [q, k[:, :1], *one],
            [HEADS] + [ALL] * 3,
            (HEADS, HEADS),
        ),
        "latent extend": (
            lambda *args: latent_extend(*args, **latents),
            [ragged, k[:, :1], *many],
            [HEADS] + [ALL] * 5,
            (HEADS, HEADS),
        ),
        "decode on GPUs, a loop": (
            partial(on_gpus, batched_decode, BatchSizes(8, 1, 1)),
            [q, *quantised, *one, *options],
            [HEADS] * 3 + [ALL] * 2 + of_options,
            (HEADS, HEADS),
        ),
        "extend on GPUs": (
            partial(on_gpus, batched_extend, SIZES),
            [ragged, *quantised, *many, *options],
            [HEADS] * 3 + [ALL] * 4 + of_options,
            (HEADS, HEADS),
        ),
        "decode, rows too": (
            decode,
            [
                jnp.concatenate([q, q[:1]]),
                *pools,
                table[jnp.array([0, 1, 2, 0])],
                int32(1, 9, 30, 0),
            ],
            [P("dp", "tp"), HEADS, HEADS, P("dp"), P("dp")],
            (P("dp", "tp"), P("dp", "tp")),
        ),
        "write": (
            lambda k, v, slots, *pools: kv_write(k, v, slots, *pools),
            [new, new, int32(3, -1, 77), *pools],
            [HEADS, HEADS, ALL, HEADS, HEADS],
            (HEADS, HEADS),
        ),
        "copy": (
            lambda k, v, *ids: copy_blocks((k, v), *ids),
            [*pools, ids, ids + 4, count],
            [HEADS] * 2 + [ALL] * 3,
            (HEADS, HEADS),
        ),
        "gather": (
            lambda k, v, *ids: gather_blocks((k, v), *ids),
            [*pools, ids, count],
            [HEADS] * 2 + [ALL] * 2,
            (HEADS, HEADS),
        ),
        "scatter": (
            lambda k, v, staging, *ids: scatter_blocks((k, v), (staging, staging), *ids),
            [*pools, k[:2], ids, count],
            [HEADS] * 3 + [ALL] * 2,
            (HEADS, HEADS),
        ),
    }


def difference(got: Any, expected: Any) -> float:
    """Largest difference of finite numbers, relative to the largest; infinities must be equal."""
    found = []
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        finite = jnp.isfinite(b)
        same = bool((jnp.isfinite(a) == finite).all())
        largest = jnp.where(finite, jnp.abs(b), 0).max()
        found.append(jnp.where(finite, jnp.abs(a - b), 0).max() / largest if same else jnp.inf)
    return float(max(found))


def main() -> None:
    """Call everything with JAX's check of varying axes, and one function without."""
    kind = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(kind, kind))
    found = {}
    for name, (function, arguments, specs, results) in cases().items():
        expected = jax.jit(function)(*arguments)
        for check in (True, False) if name == "decode" else (True,):
            sharded = jax.shard_map(
                function, mesh=mesh, in_specs=tuple(specs), out_specs=results, check_vma=check
            )
            got = jax.jit(sharded)(*arguments)
            found[name if check else f"{name}, not checked"] = difference(got, expected)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
