"""Measure attention of other libraries on the same problems.

A peer that is not installed or cannot run raises `AbsentError`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from .absent import AbsentError
from .problems import HEADLINE, Record, Sizes, point
from .timing import Timing, measure, time_torch


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise AbsentError("not installed") from None
    if not torch.cuda.is_available():
        raise AbsentError("no GPU")
    return torch


def _decode_record(sizes: Sizes, batch: int, length: int) -> Record:
    return {
        "operation": "decode",
        "point": point(batch, length),
        "block_size": HEADLINE,
        "bytes": sizes.kv_bytes(batch * length),
    }


def torch_cudnn_decode(sizes: Sizes) -> Iterator[Record]:
    """Attention of cuDNN in PyTorch: contiguous KV, no block table."""
    torch = _torch()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    attend = torch.nn.functional.scaled_dot_product_attention
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    for batch, length in sizes.decode:
        q = torch.randn(batch, sizes.q_heads, 1, sizes.head_dim, **options)
        shape = (batch, sizes.kv_heads, length, sizes.head_dim)
        copies = max(2, min(sizes.calls, sizes.pool_tokens // (batch * length)))
        caches = [(torch.randn(shape, **options), torch.randn(shape, **options))]
        caches += [tuple(x.clone() for x in caches[0]) for _ in range(copies - 1)]
        calls = [lambda q=q, k=k, v=v: attend(q, k, v, enable_gqa=True) for k, v in caches]
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            seconds = time_torch(calls, sizes)
        yield _decode_record(sizes, batch, length) | {"seconds": seconds}
        del calls, caches
        torch.cuda.empty_cache()


def torch_cudnn_extend(sizes: Sizes) -> Iterator[Record]:
    """Attention of cuDNN in PyTorch: one dense row, causal only without cached tokens."""
    torch = _torch()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    attend = torch.nn.functional.scaled_dot_product_attention
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    for name, rows in sizes.extend.items():
        if len(rows) > 1:
            continue  # no ragged rows without padding
        new, cached = rows[0]
        q = torch.randn(1, sizes.q_heads, new, sizes.head_dim, **options)
        k, v = (
            torch.randn(1, sizes.kv_heads, new + cached, sizes.head_dim, **options) for _ in "kv"
        )
        causal = cached == 0
        calls = [lambda q=q, k=k, v=v, c=causal: attend(q, k, v, is_causal=c, enable_gqa=True)] * 2
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            seconds = time_torch(calls, sizes)
        flops = 4 * sizes.q_heads * sizes.head_dim * new * (new + cached)
        yield {
            "operation": "extend",
            "point": name,
            "block_size": HEADLINE,
            "seconds": seconds,
            "flops": sizes.attention_flops(rows) if causal else flops,
            "masked": causal,
        }


def jax_cudnn_decode(sizes: Sizes) -> Iterator[Record]:
    """Paged attention of cuDNN, through an internal function of JAX."""
    import jax

    if jax.default_backend() != "gpu":
        raise AbsentError("no GPU")
    yield from measure((_jax_cudnn(sizes, *each) for each in sizes.decode), sizes)


def _jax_cudnn(sizes: Sizes, batch: int, length: int) -> Timing:
    import jax
    import jax.numpy as jnp
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, paged_attention

    def make() -> Any:
        blocks = batch * length // HEADLINE  # it needs a pool of exactly this size
        shape = (blocks, sizes.kv_heads, HEADLINE, sizes.head_dim)
        keys = jax.random.split(jax.random.key(0), 2)
        k, v = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys)
        q = jnp.ones((batch, sizes.q_heads, 1, sizes.head_dim), jnp.bfloat16)
        ones, lengths = jnp.ones(batch, jnp.int32), jnp.full(batch, length, jnp.int32)
        table = jax.random.permutation(keys[0], blocks).reshape(batch, 1, -1, 1).astype(jnp.int32)
        copies = max(2, min(4, sizes.pool_tokens // (batch * length)))
        return (q, v, ones, lengths, table), [(k + i,) for i in range(copies)]

    def attend(q: Any, v: Any, ones: Any, lengths: Any, table: Any, k: Any) -> Any:
        return paged_attention(
            q,
            k,
            v,
            ones,
            lengths,
            table,
            table,
            scale=sizes.head_dim**-0.5,
            mask_type=MaskType.PADDING,
            qkv_layout="BNTH",
        )

    return Timing(_decode_record(sizes, batch, length), attend, make)


def jax_paged_decode(sizes: Sizes) -> Iterator[Record]:
    """Paged attention of JAX for GPUs (Pallas Triton), which splits the table's capacity."""
    import jax

    if jax.default_backend() != "gpu":
        raise AbsentError("no GPU")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield from measure((_jax_paged(sizes, *each) for each in sizes.decode), sizes)


def _jax_paged(sizes: Sizes, batch: int, length: int) -> Timing:
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    from .ours import make_tables

    def make() -> Any:
        shape = (sizes.kv_heads, sizes.pool_tokens // HEADLINE + 1, HEADLINE, sizes.head_dim)
        keys = jax.random.split(jax.random.key(0), 2)
        k, v = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys)
        q = jnp.ones((batch, sizes.q_heads, sizes.head_dim), jnp.bfloat16)
        tables = make_tables(sizes, HEADLINE, [length] * batch, sizes.calls)
        return (q, k, v, jnp.full(batch, length, jnp.int32)), [(table,) for table in tables]

    def attend(q: Any, k: Any, v: Any, lengths: Any, table: Any) -> Any:
        return paged_attention(q, k, v, table, lengths, k_splits=max(1, min(16, 64 // batch)))

    return Timing(_decode_record(sizes, batch, length), attend, make)


def _flashinfer() -> tuple[Any, Any]:
    torch = _torch()
    try:
        import flashinfer
    except ImportError:
        raise AbsentError("not installed") from None
    return torch, flashinfer


def _paged_inputs(
    torch: Any, sizes: Sizes, lengths: list[int], most: int
) -> tuple[Any, Any, list[Any], Any]:
    """Pools, first-block index per row, block ids of several calls, tokens in the last blocks."""
    pages = [math.ceil(length / HEADLINE) for length in lengths]
    indptr = torch.tensor([0, *pages], dtype=torch.int32).cumsum(0, dtype=torch.int32).cuda()
    num_blocks = sizes.pool_tokens // HEADLINE
    shape = (num_blocks, sizes.kv_heads, HEADLINE, sizes.head_dim)
    pools = tuple(torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in "kv")
    order = torch.randperm(num_blocks, device="cuda").to(torch.int32)
    need = sum(pages)
    calls = max(2, min(most, num_blocks // need))
    ids = [order.roll(-i * need)[:need].contiguous() for i in range(calls)]
    last = [length - HEADLINE * (n - 1) for length, n in zip(lengths, pages, strict=True)]
    return pools, indptr, ids, torch.tensor(last, dtype=torch.int32).cuda()


def _best(
    torch: Any, sizes: Sizes, variants: list[Callable[[Any], Callable[[], Any]]], ids: Any
) -> float:
    """Seconds of the fastest variant; variants that fail are printed and left out."""
    found = []
    for make in variants:
        try:
            found.append(time_torch([make(each) for each in ids], sizes))
        except Exception as failure:  # one that needs a compiler, say
            print(f"variant left out: {type(failure).__name__}: {str(failure)[-300:]}")
    if not found:
        raise AbsentError("no variant ran, see the step's output")
    return min(found)


def flashinfer_decode(sizes: Sizes) -> Iterator[Record]:
    """Decode by FlashInfer, planned once per call, with and without the tensor cores."""
    torch, flashinfer = _flashinfer()
    for batch, length in sizes.decode:
        pools, indptr, ids, last = _paged_inputs(torch, sizes, [length] * batch, sizes.calls)
        q = torch.randn(batch, sizes.q_heads, sizes.head_dim, dtype=torch.bfloat16, device="cuda")

        def make(
            blocks: Any,
            tensor_cores: bool,
            indptr: Any = indptr,
            last: Any = last,
            q: Any = q,
            pools: Any = pools,
        ) -> Callable[[], Any]:
            space = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                space, "HND", use_tensor_cores=tensor_cores
            )
            heads = sizes.q_heads, sizes.kv_heads, sizes.head_dim, HEADLINE
            kinds = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
            wrapper.plan(indptr, blocks, last, *heads, **kinds)
            return lambda: wrapper.run(q, pools)

        variants = [lambda b, t=t: make(b, t) for t in (False, True)]
        seconds = _best(torch, sizes, variants, ids)
        yield _decode_record(sizes, batch, length) | {"seconds": seconds}


def flashinfer_extend(sizes: Sizes) -> Iterator[Record]:
    """Ragged paged prefill by FlashInfer, with its fa3 and fa2 kernels."""
    torch, flashinfer = _flashinfer()
    for name, rows in sizes.extend.items():
        lengths = [row.new + row.cached for row in rows]
        pools, indptr, ids, last = _paged_inputs(torch, sizes, lengths, 2)
        new = torch.tensor([0, *(row.new for row in rows)], dtype=torch.int32)
        q_indptr = new.cumsum(0, dtype=torch.int32).cuda()
        shape = (sum(row.new for row in rows), sizes.q_heads, sizes.head_dim)
        q = torch.randn(shape, dtype=torch.bfloat16, device="cuda")

        def make(
            blocks: Any,
            backend: str,
            indptr: Any = indptr,
            q_indptr: Any = q_indptr,
            last: Any = last,
            q: Any = q,
            pools: Any = pools,
        ) -> Callable[[], Any]:
            space = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "HND", backend=backend)
            heads = sizes.q_heads, sizes.kv_heads, sizes.head_dim, HEADLINE
            kinds = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
            wrapper.plan(q_indptr, indptr, blocks, last, *heads, causal=True, **kinds)
            return lambda: wrapper.run(q, pools)

        variants = [lambda b, k=k: make(b, k) for k in ("fa3", "fa2")]
        yield {
            "operation": "extend",
            "point": name,
            "block_size": HEADLINE,
            "seconds": _best(torch, sizes, variants, ids),
            "flops": sizes.attention_flops(rows),
        }


PEERS: dict[str, Callable[[Sizes], Iterator[Record]]] = {
    "decode torch-cudnn": torch_cudnn_decode,
    "decode flashinfer": flashinfer_decode,
    "decode jax-cudnn-paged": jax_cudnn_decode,
    "decode jax-pallas-paged": jax_paged_decode,
    "extend torch-cudnn": torch_cudnn_extend,
    "extend flashinfer": flashinfer_extend,
}
